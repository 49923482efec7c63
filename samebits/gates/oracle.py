"""Leg O: an fp32 oracle. Equal bits on both sides can be equally wrong; this leg sees that.

The oracle is the Hugging Face model of the same architecture with the same bf16 weights, computed
in fp32 by transformers. It shares no operator with this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.gates.streams import Stream

if TYPE_CHECKING:
    import torch


def score(model_dir: Path, sequences: Sequence[Sequence[int]], device: str = "cpu") -> Stream:
    """Score whole sequences (token ids); position i holds log p(token i | tokens < i).

    device   `cpu` or `cuda`, where products keep all bits of fp32 (no TF32) and attention is plain
             torch, because fused kernels may not keep them
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from samebits.weights.sources import open_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = AutoConfig.from_pretrained(model_dir)
    if device == "cuda":
        config._attn_implementation = "eager"
        torch.set_float32_matmul_precision("highest")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    _fill(model, open_model(model_dir, device))
    model.eval().to(device)
    stream = Stream()
    with torch.inference_mode():
        for index, sequence in enumerate(sequences):
            if len(sequence) < 2:
                continue
            ids = torch.tensor([list(sequence)], device=device)
            logits = model(ids).logits[0, :-1].double()
            logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            stream.add(index, 1, sequence[1:], logp.float().cpu().numpy())
    del model
    torch.cuda.empty_cache()  # this process goes on, beside engines that need the memory
    return stream


def _fill(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor into its parameter, widened one by one: a second copy of all of them in
    fp32 would not fit beside a large model."""
    todo = dict(model.named_parameters())
    unexpected = []
    for name, tensor in weights:
        parameter = todo.pop(name, None)
        if parameter is None:
            unexpected.append(name)
        else:
            parameter.data.copy_(tensor)
    if todo or unexpected:
        raise RuntimeError(f"oracle weights: missing {sorted(todo)}, unexpected {unexpected}")


def distance(stream: Stream, oracle: Stream) -> tuple[int, float, float]:
    """(tokens, mean |dlogp|, max |dlogp|) of a stream to the oracle over the tokens both hold."""
    from samebits.gates.streams import compare

    counts = compare(stream, oracle)
    if counts.values is None or counts.tokens == 0:
        return 0, float("nan"), float("nan")
    return counts.tokens, counts.values.mean_abs, counts.values.max_abs
