"""Gated delta networks in Megatron: hybrid blocks of linear and gated full attention.

Megatron's own module imports a function of this package, so nothing here imports Megatron at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The hybrid decoder block of `config`: ours where aligned, Megatron's own elsewhere."""
    from samebits.hooks.megatron.gdn.spec import block_spec as chosen

    return chosen(config)
