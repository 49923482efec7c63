"""The process that runs `vllm.LLM` for a `RolloutEngine`.

`python -m samebits.engines.rollout_server FD` reads (name, arguments...) from the inherited socket
and answers ("ok", value), ("refused", error fields) or ("failed", text). Everything printed goes
to the driver's log.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from samebits import segments
from samebits.engines import rollout_wire as wire
from samebits.engines.rollout_wire import Completion, Request, Score
from samebits.errors import Refused, SamebitsError

# Share of the GPU's memory that has to be free at start; the cache's size is given in bytes.
_FREE = 0.1


def without_amx() -> None:
    """Tell vLLM's CPU platform of no AMX, here and in the engine that it forks.

    Where there is some, it takes prefix cache and chunked prefill from models with recurrent layers
    and turns their convolution's state around, for compiled kernels that no process here loads.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


class Server:
    """One method per call of the driver."""

    def start(self, settings: dict[str, Any], **own: Any) -> None:
        """Start vLLM with `settings`, the fields of `RolloutSettings` as JSON holds them; `own` are
        further arguments of `vllm.LLM`."""
        on_gpu = settings["platform"] != "cpu"
        if on_gpu:  # before vLLM is imported: its own Triton kernels get the same assembler
            from samebits.ops import gpu

            os.environ["TRITON_PTXAS_PATH"] = str(gpu.ptxas())
        else:
            without_amx()
        from vllm import LLM

        self._llm = LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            enforce_eager=not settings["cuda_graphs"],
            dtype="bfloat16",
            load_format=settings["load_format"],
            tensor_parallel_size=settings["tensor_parallel_size"],
            max_model_len=settings["max_model_len"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            long_prefill_token_threshold=settings["slice_tokens"],
            max_num_seqs=settings["max_num_seqs"],
            block_size=settings["block_size"],
            num_gpu_blocks_override=settings["kv_blocks"],
            kv_cache_memory_bytes=_cache_bytes(settings),
            enable_prefix_caching=settings["prefix_caching"],
            enable_chunked_prefill=True,
            seed=settings["seed"],
            mamba_ssm_cache_dtype="float32",  # of recurrent layers, where the model has some
            disable_log_stats=True,
            **(_on_gpu(settings["cuda_graphs"], settings["ahead"]) if on_gpu else {}),
            **own,
        )

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Sample the requests at temperature 1, all in flight together; results in their order."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=1.0,
                seed=request.seed,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_eos,
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self._run([list(request.prompt) for request in requests], params)
        return [self._completion(output) for output in outputs]

    def score(self, sequences: list[list[int]]) -> list[Score]:
        """Log-probability bits of every token but the first of each sequence, by prefill."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run(sequences, params)
        return [
            Score(
                wire.bits_of(
                    [
                        entry[token].logprob
                        for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                    ]
                ),
                output.request_id,
            )
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def semantics(self, outside: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What vLLM is set to compute, and the error id that refuses each request of `outside`."""
        config = self._llm.llm_engine.vllm_config.model_config
        return {
            "logprobs_mode": config.logprobs_mode,
            "tokenizer": not config.skip_tokenizer_init,
            "vocabulary": config.get_vocab_size(),
            "refused": {name: self._refusal(changes) for name, changes in outside.items()},
        }

    def _refusal(self, changes: dict[str, Any]) -> str | None:
        """Id of the error that a request meets, or None where it is served."""
        from vllm import SamplingParams

        settings = {"seed": 1, "max_tokens": 2, "logprobs": 0, "detokenize": False} | changes
        try:
            self._run([[1, 2]], SamplingParams(**settings))
        except SamebitsError as error:
            return error.error_id
        return None

    def tensor_parallel_size(self) -> int:
        """Ranks of the model, as vLLM was configured."""
        return self._llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size

    def reset_prefix_cache(self) -> int:
        """Drop the prefix cache; returns the blocks dropped. Refused SB0515 while in use."""
        outcome: Any = self._llm.reset_prefix_cache()
        if not outcome:
            raise Refused(
                "SB0515",
                seen="vLLM kept its prefix cache",
                required="no request in flight when the cache is reset",
                hint="samebits explain SB0515",
            )
        return outcome["dropped_blocks"]

    def rpc(self, method: str, arguments: tuple) -> list[Any]:
        """Call a method of every worker; results by rank. A refusal of a worker is raised here."""
        values = []
        for reply in self._llm.collective_rpc(method, args=arguments):
            if "refused" in reply:
                raise wire.decode(reply["refused"])
            values.append(reply["ok"])
        return values

    def _run(self, prompts: list[list[int]], params) -> list[Any]:
        """Outputs in the order of `prompts`; refuses when vLLM computed other token ids."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            if list(output.prompt_token_ids) != list(prompt):
                raise Refused(
                    "SB0901",
                    seen=f"vLLM computed other token ids than request {index} names",
                    required="the token ids that went in",
                    hint="samebits explain SB0901",
                )
        return outputs

    @staticmethod
    def _completion(output) -> Completion:
        best = output.outputs[0]
        tokens = tuple(best.token_ids)
        values = [entry[token].logprob for token, entry in zip(tokens, best.logprobs, strict=True)]
        return Completion(
            tokens,
            wire.bits_of(values),
            output.num_cached_tokens or 0,
            str(best.finish_reason),
            output.request_id,
        )


def _on_gpu(cuda_graphs: bool, ahead: bool) -> dict[str, Any]:
    """Settings that a GPU needs besides: how steps follow, and what a captured step is."""
    own: dict[str, Any] = {"async_scheduling": ahead, "gpu_memory_utilization": _FREE}
    if cuda_graphs:
        own["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return own


def _cache_bytes(settings: dict[str, Any]) -> int:
    """Bytes that one rank's pages need at most: two bf16 tensors per layer, or a recurrent state.

    vLLM makes the pages of all layers equal, by whole blocks of tokens.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings["model"])
    heads = config.num_key_value_heads // settings["tensor_parallel_size"] or 1
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page = 2 * 2 * settings["block_size"] * heads * size
    if hasattr(config, "linear_num_key_heads"):
        from samebits.hooks.vllm.gdn import state

        page += state.page_bytes(config, settings["tensor_parallel_size"])
    return page * settings["kv_blocks"] * config.num_hidden_layers


def serve(pipe: Connection) -> None:
    """Answer calls until the driver says stop or is gone."""
    server = Server()
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        if name == "stop":
            return
        try:
            pipe.send(("ok", getattr(server, name)(*arguments)))
        except SamebitsError as error:
            pipe.send(("refused", wire.encode(error)))
        except Exception:
            pipe.send(("failed", traceback.format_exc(limit=-3)))


if __name__ == "__main__":
    segments.own_segments()
    serve(Connection(int(sys.argv[1])))
