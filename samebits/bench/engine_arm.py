"""One configuration of vLLM, timed in a process of its own.

`python -m samebits.bench.engine_arm IN`: IN names a JSON file of `Arm` with `ready`, a file that is
made once the engine runs, and `out`, where the answer is written. It is timed when a line comes
on standard input, and not if that is closed. An aligned arm is started exactly as `RolloutEngine`
starts one; any other is vLLM's own engine, with no plugin of this package and
with weights from a safetensors file. All can be asked for their memory (`engine_worker`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samebits.bench import engine_memory
from samebits.engines.rollout_wire import bits_of

# What is timed: so many requests at once, each with so many prompt and sampled tokens; of a model
# with recurrent states more of these, since its decode steps are what states are for.
REQUESTS, PROMPT, RESPONSE, LONG_RESPONSE = 256, 1024, 256, 1024
# The gate: fewer and shorter requests, decoded and then scored.
_GATED, _GATED_RESPONSE = 32, 64
REPEATS = 3
# A run of so many seconds is measured once, behind a warm-up with all requests: such runs differ by
# less than configurations do, and the GPU's time is worth more. Rows say how often.
_LONG = 10.0
# An arm that is this much slower than the best one so far is not timed again.
_HOPELESS = 1.15
BUDGET, BLOCK = 8192, 16  # tokens of a step, tokens of a page
MODES = ("seeded", "unseeded")
_VERSIONS = {"FLASH_ATTN": {"flash_attn_version": 3}}  # never another in its place
PASS = (8, 1024)  # sequences and tokens of a training pass
_MEASURED = "samebits.bench.engine_worker.Measured"


@dataclass(frozen=True)
class Arm:
    """A configuration. `model` is the folder with the weights that it loads.

    settings   fields of `RolloutSettings` of an aligned arm; None for one of vLLM's own
    runner     vLLM's model runner, 1 or 2
    backend    name of vLLM's attention backend
    compiled   torch.compile and all kinds of CUDA graphs, as vLLM does by itself; else graphs of
               decode steps alone
    invariant  vLLM's own batch invariance, VLLM_BATCH_INVARIANT=1
    response   tokens that every request samples
    block      tokens of a page of the cache; 0: as vLLM chooses
    pages      how many; 0: as many as `cached` bytes hold
    states     vLLM's dtype of recurrent states; None for a model without
    prefill    whose kernels prefill recurrent layers: `triton` are FLA's
    """

    name: str
    model: str
    settings: dict[str, Any] | None = None
    runner: int = 1
    backend: str = ""
    compiled: bool = False
    invariant: bool = False
    response: int = RESPONSE
    block: int = BLOCK
    pages: int = 0
    cached: int = 0
    states: str | None = None
    prefill: str = "triton"

    @property
    def aligned(self) -> bool:
        """Whether the operators of this package compute."""
        return self.settings is not None

    @property
    def length(self) -> int:
        """Tokens that a sequence may have."""
        return length_of(self.response)

    @property
    def rated(self) -> bool:
        """Whether ours is compared with it: one of vLLM's own that keeps states in fp32."""
        return not self.aligned and self.states in (None, "float32")


def length_of(response: int) -> int:
    """Tokens that a sequence with so long a response may have; a few more than it gets."""
    return PROMPT + response + BLOCK


def prompts(vocabulary: int, count: int, length: int = PROMPT, seed: int = 1) -> list[list[int]]:
    """Drawn token ids."""
    draw = np.random.default_rng(seed)
    return draw.integers(3, vocabulary, (count, length)).tolist()


def _start(arm: Arm) -> Any:
    """The running `vllm.LLM` of an arm."""
    if arm.settings is not None:
        from samebits.engines.rollout_server import Server

        server = Server()
        server.start(arm.settings, worker_extension_cls=_MEASURED)
        return server._llm
    from vllm import LLM

    own: dict[str, Any] = {}
    if not arm.compiled:
        own["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if arm.block:
        own |= {"block_size": arm.block, "num_gpu_blocks_override": arm.pages}
    if arm.states is not None:
        own["mamba_ssm_cache_dtype"] = arm.states
        own["additional_config"] = {"gdn_prefill_backend": arm.prefill}
    return LLM(
        model=arm.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="safetensors",
        max_model_len=arm.length,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=arm.cached,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        gpu_memory_utilization=0.05,
        attention_config={"backend": arm.backend, **_VERSIONS.get(arm.backend, {})},
        worker_extension_cls=_MEASURED,
        **own,
    )


def _generate(llm: Any, asked: Sequence[Sequence[int]], response: int, seed: int | None) -> Any:
    """Sample `response` tokens of every prompt at temperature 1, with their log-probabilities."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=1.0,
            seed=None if seed is None else seed + i,
            max_tokens=response,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        for i in range(len(asked))
    ]
    return llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)


def _bits(tokens: Sequence[int], entries: Sequence[Any]) -> list[int]:
    """fp32 patterns of what vLLM reports for each of `tokens`."""
    return bits_of([e[t].logprob for t, e in zip(tokens, entries, strict=True)]).tolist()


def _prefilled(llm: Any, whole: Sequence[Sequence[int]]) -> list[list[int]]:
    """Bits of the log-probability of every token but the first of each sequence."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
    return [_bits(t[1:], o.prompt_logprobs[1:]) for t, o in zip(whole, outputs, strict=True)]


def differing(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """Tokens whose bits differ; both sides have the same."""
    rows = zip(left, right, strict=True)
    return sum(a != b for row in rows for a, b in zip(*row, strict=True))


def _gate(llm: Any, vocabulary: int) -> tuple[int, int]:
    """(mismatches, tokens) of decoded tokens against a prefill of the same tokens."""
    asked = prompts(vocabulary, _GATED, 200, seed=2)
    done = [output.outputs[0] for output in _generate(llm, asked, _GATED_RESPONSE, 100)]
    whole = [[*ids, *answer.token_ids] for ids, answer in zip(asked, done, strict=True)]
    decoded = [_bits(answer.token_ids, answer.logprobs) for answer in done]
    prefilled = [row[-_GATED_RESPONSE:] for row in _prefilled(llm, whole)]
    return differing(decoded, prefilled), _GATED * _GATED_RESPONSE


def repeated(call: Callable[[], float], best: float | None) -> list[float]:
    """REPEATS values of `call`, or one where it takes long or is hopeless beside `best`."""
    found = [call()]
    wanted = REPEATS if found[0] < _LONG else 1
    while len(found) < wanted and (best is None or found[0] <= _HOPELESS * best):
        found.append(call())
    return found


def measure(llm: Any, arm: Arm, best: dict[str, float]) -> dict[str, Any]:
    """Seconds of whole runs by mode (an aligned arm has seeds only), and what the gate found.

    best   median seconds of the fastest of vLLM's own so far, by mode
    A run ends when its last token is on the host, so it needs no synchronisation. RuntimeError
    where the cache cannot hold all requests at once.
    """
    (held,) = llm.collective_rpc("samebits_measured")
    if lacking := engine_memory.short_of_pages(held, REQUESTS):
        raise RuntimeError(lacking)
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    wrong, tokens = _gate(llm, vocabulary)
    served: dict[str, int] = {}
    if arm.aligned:
        (served,) = (reply["ok"] for reply in llm.collective_rpc("samebits_served", args=(False,)))
    prefilled = [_prefilled(llm, prompts(vocabulary, *PASS, seed=3))] if arm.aligned else []
    asked = prompts(vocabulary, REQUESTS)
    modes = {"seeded": 1000, **({} if arm.aligned else {"unseeded": None})}
    # Kernels are loaded, and samplers compiled, when first met: with as many rows as are timed.
    for seed in modes.values():
        _generate(llm, asked, 4, seed)
    seconds = {}

    def run(seed: int | None) -> float:
        begun = time.perf_counter()
        outputs = _generate(llm, asked, arm.response, seed)
        spent = time.perf_counter() - begun
        if any(len(output.outputs[0].token_ids) != arm.response for output in outputs):
            raise RuntimeError(f"a response of other than {arm.response} tokens")
        return spent

    for mode, seed in modes.items():
        seconds[mode] = repeated(lambda seed=seed: run(seed), best.get(mode))  # type: ignore[misc]
    (held,) = llm.collective_rpc("samebits_measured")  # again, for its peak
    return {
        "memory": held,
        "seconds": seconds,
        "mismatches": wrong,
        "gated": tokens,
        "served": served,
        "prefilled": prefilled[0] if arm.aligned else None,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "model_runner": 2 if config.use_v2_model_runner else 1,
    }


def median(found: Mapping[str, Any], mode: str) -> float:
    """Median seconds of a run."""
    return statistics.median(found["seconds"][mode])


def name_hybrid() -> None:
    """Tell vLLM where its text-only hybrid model is, in a process without a plugin."""
    if os.environ.get("VLLM_PLUGINS") == "":
        from vllm.model_executor.models import ModelRegistry

        name = "Qwen3_5ForCausalLM"
        ModelRegistry.register_model(name, f"samebits.bench.stock_hybrid:{name}")


def main() -> int:
    """Start the arm described by the file of the first argument, and time it on its turn."""
    given = json.loads(Path(sys.argv[1]).read_text())
    out, ready = (Path(given.pop(name)) for name in ("out", "ready"))
    arm = Arm(**given)
    started = time.perf_counter()
    llm = _start(arm)
    spent = round(time.perf_counter() - started, 1)
    ready.touch()
    line = sys.stdin.readline()
    if not line:
        return 0
    found = measure(llm, arm, json.loads(line))
    out.write_text(json.dumps({"arm": asdict(arm), "ready": spent, **found}))
    return 0


# vLLM spawns its engine core, which imports the parent's main module before anything else.
if __name__ in ("__main__", "__mp_main__"):
    name_hybrid()
if __name__ == "__main__":
    sys.exit(main())
