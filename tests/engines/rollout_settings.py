"""Runs in a process with the patched tree: what vLLM's front end refuses, and how it draws.

`python rollout_settings.py MODEL` prints JSON {case: error id, or null where it is accepted}, and
under "draws" the tokens that one seed gives in three batches. With `hybrid` or `qwen2` behind it,
the cases of a model with recurrent layers, or with a bias.
"""

from __future__ import annotations

import json
import sys

from samebits.errors import SamebitsError

GOOD = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "load_format": "samebits",
    "max_model_len": 128,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 24,
}
ENGINES = {
    "plain": {},
    "two ranks": {"tensor_parallel_size": 2},
    "four ranks": {"tensor_parallel_size": 4},
    "pipeline": {"pipeline_parallel_size": 2},
    "dtype": {"dtype": "float32"},
    "kv cache dtype": {"kv_cache_dtype": "fp8"},
    "lora": {"enable_lora": True},
    "speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "processed logprobs": {"logprobs_mode": "processed_logprobs"},
    "compiled": {"enforce_eager": False},
    "architecture": {"hf_overrides": {"architectures": ["MiMoForCausalLM"]}},
    "bias": {"hf_overrides": {"attention_bias": True}},
    "scaled rope": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}},
    "another model": {"hf_overrides": {"rms_norm_eps": 1e-3}},
}
RECURRENT = {
    "block_size": 64,
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float32",
}
HYBRID_ENGINES = {
    "plain": {},
    "two ranks": {"tensor_parallel_size": 2},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 16},
    "block inside a chunk": {"block_size": 96},
    "state of the model's dtype": {"mamba_ssm_cache_dtype": "auto"},
    "state in bf16": {"mamba_ssm_cache_dtype": "bfloat16"},
    "speculation": ENGINES["speculation"],
    "heads of 64": {"hf_overrides": {"linear_key_head_dim": 64}},
    "another model": {"hf_overrides": {"rms_norm_eps": 1e-3}},
}
QWEN2_ENGINES = {
    "plain": {},
    "two ranks": {"tensor_parallel_size": 2},
    "output bias": {"hf_overrides": {"attention_bias": True}},
    "mlp bias": {"hf_overrides": {"mlp_bias": True}},
    "norms of queries and keys": {"hf_overrides": {"qk_norm": True}},
    "other heads": {"hf_overrides": {"head_dim": 64}},
    "another class": {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}},
}
SAMPLED = {"seed": 1, "max_tokens": 4, "logprobs": 0}
SCORED = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
REQUESTS = {
    "sampled": SAMPLED,
    "scored": SCORED,
    "temperature": SAMPLED | {"temperature": 0.7},
    "greedy sampling": SAMPLED | {"temperature": 0.0},
    "top-p": SAMPLED | {"top_p": 0.9},
    "top-k": SAMPLED | {"top_k": 5},
    "min-p": SAMPLED | {"min_p": 0.1},
    "repetition": SAMPLED | {"repetition_penalty": 1.1},
    "presence": SAMPLED | {"presence_penalty": 0.1},
    "frequency": SAMPLED | {"frequency_penalty": 0.1},
    "min tokens": SAMPLED | {"min_tokens": 2},
    "logit bias": SAMPLED | {"logit_bias": {3: 1.0}},
    "allowed tokens": SAMPLED | {"allowed_token_ids": [1, 2]},
    "two samples": SAMPLED | {"n": 2},
    "no seed": {"max_tokens": 4, "logprobs": 0},
}


def _outcome(call) -> str | None:
    try:
        call()
    except SamebitsError as error:
        return error.error_id
    except Exception as error:  # vLLM refused it before the hooks were asked
        return f"vllm: {type(error).__name__}: {str(error)[:300]}"
    return None


def _engines(model: str, base: dict, cases: dict[str, dict]) -> dict[str, str | None]:
    from vllm.engine.arg_utils import EngineArgs

    from samebits.engines.rollout_server import without_amx

    without_amx()  # as every rollout on a CPU begins
    return {
        name: _outcome(lambda c=c: EngineArgs(model=model, **base | c).create_engine_config())
        for name, c in cases.items()
    }


def main(model: str) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    found = _engines(model, GOOD, ENGINES)
    found |= {
        f"request: {name}": _outcome(
            lambda p=p: current_platform.validate_request(None, SamplingParams(**p))
        )
        for name, p in REQUESTS.items()
    }

    def quantized() -> None:
        config = EngineArgs(model=model, **GOOD).create_engine_config()
        config.model_config.quantization = "fp8"  # a quantized model needs an extra package
        current_platform.check_and_update_config(config)

    found["quantization"] = _outcome(quantized)
    print(json.dumps(found | {"draws": _draws()}))


def _draws() -> list[int]:
    """Token of a seeded row: alone, beside a row without a seed, and beside a seeded row."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    tokens = []
    for rows, seeded in ((1, 1), (2, 1), (2, 2)):
        generators = {row: torch.Generator().manual_seed(row + 5) for row in range(seeded)}
        sampled, _ = TopKTopPSampler().forward(logits[:rows].clone(), generators, None, None)
        tokens.append(int(sampled[0]))
    return tokens


if __name__ == "__main__":
    if sys.argv[2:] == ["hybrid"]:
        print(json.dumps(_engines(sys.argv[1], GOOD | RECURRENT, HYBRID_ENGINES)))
    elif sys.argv[2:] == ["qwen2"]:
        print(json.dumps(_engines(sys.argv[1], GOOD, QWEN2_ENGINES)))
    else:
        main(sys.argv[1])
