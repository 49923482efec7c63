"""What one request's recurrent state consists of, and how vLLM's paged cache holds it.

vLLM carves every tensor of a layer's state from the same page, in the order given here. A page
holds the state at the last token of a block; with prefix caching a block ends where a chunk ends,
and there only the boundary state and the window of the convolution are alive.
"""

from __future__ import annotations

import functools
import math

import torch

from samebits import runtime

Spec = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


@functools.cache
def schedule() -> str:
    """The contract's schedule of the core: chunk_row or cpr."""
    return str(runtime.contract().constants("gdn.core")["schedule"])


def spec(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int, dtype: torch.dtype
) -> Spec:
    """(name, shape of one slot, dtype) of every state tensor of a rank's heads; fp32 ones first.

    The window holds the last `width - 1` inputs of the convolution, oldest first. The control keeps
    one fp32 state per value head.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    window = ("window", (width - 1, channels), dtype)
    if not runtime.aligned("gdn.core"):
        return ("state", (value_heads, key_dim, value_dim), torch.float32), window
    from samebits.ops import gdn

    sizes = key_heads, value_heads, key_dim, value_dim
    return *gdn.state_spec(schedule(), *sizes, runtime.platform()), window


def spec_of(text, dtype: torch.dtype, ranks: int) -> Spec:
    """`spec` of one of `ranks` ranks of the model with the text configuration `text`."""
    return spec(
        text.linear_num_key_heads // ranks,
        text.linear_num_value_heads // ranks,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
        dtype,
    )


def page_bytes(text, ranks: int) -> int:
    """Bytes of one layer's state in one slot."""
    tensors = spec_of(text, torch.bfloat16, ranks)
    return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors)


@functools.cache
def tensors() -> int:
    """How many tensors a state has, whatever the sizes of the model."""
    return len(spec(1, 1, 16, 16, 2, torch.bfloat16))
