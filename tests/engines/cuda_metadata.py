"""Runs in a process with the patched tree: tables of recurrent layers by a GPU's builder.

Prints JSON, step by step: slots, starts, context lengths, most rows of a request, and where slots
and context lengths lie. Tensors are on the CPU: the builder asks for no device of its own.
"""

from __future__ import annotations

import json
from types import SimpleNamespace as Fields

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from samebits.hooks.vllm.cuda.gdn import Builder

PAGE = 128


def step(builder: Builder, pages: list[list[int]], starts: list[int], lengths: list[int]) -> dict:
    """Metadata of one step, as values."""
    rows = torch.tensor(starts, dtype=torch.int32)
    common = Fields(
        block_table_tensor=torch.tensor(pages, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=rows,
        max_query_len=int(rows.diff().max()),
    )
    made = builder.build(0, common)
    return {
        "slots": made.slots.tolist(),
        "starts": made.query_start_loc.tolist(),
        "contexts": made.context_lens.tolist(),
        "most": made.most,
        "dtypes": sorted({str(x.dtype) for x in (made.slots, made.context_lens)}),
        "at": [made.slots.data_ptr(), made.context_lens.data_ptr()],
    }


if __name__ == "__main__":
    spec = MambaSpec(shapes=((1,),), dtypes=(torch.float32,), block_size=PAGE)
    config = Fields(
        scheduler_config=Fields(max_num_seqs=4), cache_config=Fields(mamba_cache_mode="align")
    )
    builder = Builder(spec, ["layer"], config, torch.device("cpu"))
    # Two requests and two that pad a captured step; then mixed; then decode once more.
    print(
        json.dumps(
            [
                step(builder, [[5, 6], [7, 8], [0, 0], [0, 0]], [0, 1, 2, 2, 2], [128, 129, 0, 0]),
                step(builder, [[5, 6], [9, 0]], [0, 1, 31], [129, 30]),
                step(builder, [[5, 6], [7, 8], [9, 0]], [0, 1, 2, 3], [130, 130, 31]),
            ]
        )
    )
