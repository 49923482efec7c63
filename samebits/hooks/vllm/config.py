"""Refusals at engine start: a configuration that nobody has proved does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits import runtime
from samebits.errors import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HOOK = "samebits"  # the name under which a patched module imports its hooks
# Qwen2's queries, keys and values have a bias, whatever its configuration says.
QWEN2 = "Qwen2ForCausalLM"
DENSE = ("LlamaForCausalLM", QWEN2, "Qwen3ForCausalLM")
HYBRID = ("Qwen3_5ForCausalLM",)  # with recurrent layers: `gdn.config` knows what they need


def check(vllm_config: VllmConfig) -> None:
    """Raise `Refused` (SB0501 to SB0508) for the first setting outside what is proved.

    The stock control runs what it is given: it is there to differ.
    """
    model = vllm_config.model_config
    if model is None or not runtime.aligned():  # vLLM also builds configs without a model
        return
    _check_tree()
    _check_architecture(vllm_config, model)
    _check_engine(vllm_config, model)
    _check_parallel(vllm_config, model)
    _check_contract(model)


def _refuse(error_id: str, seen: str, required: str) -> None:
    raise Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")


def _check_tree() -> None:
    """The patched modules import their hooks; upstream's own would compute natively, in silence."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.v1.sample import sampler

    bare = [m.__name__ for m in (linear, vocab_parallel_embedding, sampler) if not hasattr(m, HOOK)]
    if bare:
        raise Refused(
            "SB0513",
            seen=f"{', '.join(bare)} without the project's patches ({linear.__file__})",
            required="a vLLM tree with the series applied",
            hint="samebits patch apply vllm",
        )


def _check_architecture(vllm_config: VllmConfig, model) -> None:
    found = list(model.architectures or [])
    if len(found) != 1 or found[0] not in (*DENSE, *HYBRID):
        _refuse("SB0501", f"architectures {found}", " or ".join((*DENSE, *HYBRID)))
    text = model.hf_text_config
    if found[0] in HYBRID:
        from samebits.hooks.vllm.gdn.config import check as check_hybrid

        check_hybrid(vllm_config)
    else:
        _check_dense(model, text, found[0])
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if getattr(text, name, False):
            _refuse(
                "SB0501", f"{name}=true", "no bias but that of Qwen2's queries, keys and values"
            )
    for name, neutral in (("logit_scale", 1.0), ("final_logit_softcapping", None)):
        if getattr(text, name, neutral) not in (neutral, None):
            _refuse(
                "SB0501", f"{name}={getattr(text, name)}", "logits as the output layer gives them"
            )


def _check_dense(model, text, architecture: str) -> None:
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or model.get_sliding_window() is not None:
        _refuse("SB0501", f"layer types {sorted(layer_types)}", "full attention in every layer")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1:
        _refuse("SB0501", f"rope_parameters {rope}", "the default rotary embedding, all of a head")
    if architecture == QWEN2:
        _check_qwen2(text)


def _check_qwen2(text) -> None:
    """What vLLM's class does besides, and a size that it takes from elsewhere."""
    for name, neutral in (("qk_norm", False), ("is_causal", True)):
        if getattr(text, name, neutral) != neutral:
            _refuse("SB0501", f"{name}={getattr(text, name)}", f"{name}={neutral} in {QWEN2}")
    if getattr(text, "dual_chunk_attention_config", None) is not None:
        _refuse("SB0501", "dual_chunk_attention_config", "full attention in every layer")
    size, heads = getattr(text, "head_dim", None), text.num_attention_heads
    if size is not None and size * heads != text.hidden_size:
        _refuse("SB0501", f"head_dim {size}", f"{text.hidden_size} / {heads} in {QWEN2}")


def _check_engine(vllm_config: VllmConfig, model) -> None:
    import torch
    from vllm.config import CompilationMode

    if vllm_config.use_v2_model_runner:
        _refuse("SB0502", "Model Runner V2", "Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)")
    if model.dtype != torch.bfloat16:
        _refuse("SB0503", f"dtype {model.dtype}", "bfloat16")
    if vllm_config.cache_config.cache_dtype != "auto":
        _refuse("SB0503", f"kv_cache_dtype {vllm_config.cache_config.cache_dtype}", "auto")
    if model.quantization is not None or vllm_config.quant_config is not None:
        _refuse("SB0503", f"quantization {model.quantization}", "no quantization")
    for name in ("speculative_config", "lora_config", "kv_transfer_config"):
        if getattr(vllm_config, name) is not None:
            _refuse("SB0504", name, f"no {name}")
    if model.runner_type != "generate" or model.logits_processors:
        _refuse(
            "SB0504", f"runner {model.runner_type}, {model.logits_processors}", "plain generation"
        )
    if model.logprobs_mode != "raw_logprobs":
        _refuse("SB0505", f"logprobs_mode={model.logprobs_mode}", "raw_logprobs")
    if vllm_config.compilation_config.mode not in (None, CompilationMode.NONE):
        _refuse(
            "SB0506",
            f"compilation mode {vllm_config.compilation_config.mode.name}",
            "enforce_eager",
        )


def _check_parallel(vllm_config: VllmConfig, model) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            _refuse("SB0507", f"{name}={getattr(parallel, name)}", f"{name}=1")
    size = parallel.tensor_parallel_size
    text = model.hf_text_config
    contract = runtime.contract()
    contract.check_tp("rollout", size)
    for count, what in (
        (contract.plan("gemm.row").leaves, "leaves of the reduction plan"),
        (text.num_attention_heads, "attention heads"),
        (text.num_key_value_heads, "key-value heads"),
    ):
        if count % size:
            _refuse(
                "SB0507", f"tensor_parallel_size={size} over {count} {what}", "an even division"
            )


def _check_contract(model) -> None:
    """The contract names the model; the engine must have loaded that one."""
    runtime.contract().check_model(model.hf_text_config)
