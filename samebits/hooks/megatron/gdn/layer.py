"""Megatron's gated delta net with its arithmetic on the shared operators.

Parameters, shards and checkpoints stay Megatron's: ranks split heads, and the rows of a rank's
input projection are its q, k, v, z, b, a in this order. `A_log` is fp32 beside bf16 weights.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net

from samebits.errors import Refused
from samebits.hooks.megatron.gdn.schedule import contracted_schedule
from samebits.ops import conv1d, gdn, gdn_gate, l2_norm


class KeepsDecayInFp32(gated_delta_net.GatedDeltaNet):
    """A gated delta net whose `A_log` is fp32 and stays so when a wrapper converts the model.

    The decay is exp of it: in bf16 an update of A_log is lost until it reaches 1 part in 256, and
    the rollout engine keeps it in fp32.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.A_log.data = self.A_log.data.float()

    def _apply(self, fn, recurse=True):
        exact = self.A_log.data
        super()._apply(fn, recurse)
        if self.A_log.dtype != torch.float32:
            self.A_log.data = exact.to(self.A_log.device)
        return self


class GatedDeltaNet(KeepsDecayInFp32):
    """Hidden [s, b, H] bf16 -> ([s, b, H], None); packed sequences have b = 1.

    In a padded batch padding stands to the right of a sequence, where causality hides it.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.conv_bias or not self.use_qk_l2norm or self.cp_size > 1 or self.sp_size > 1:
            raise Refused(
                "SB0605",
                seen=f"conv bias {self.conv_bias}, l2 norm {self.use_qk_l2norm}, "
                f"context parallel {self.cp_size}, sequence parallel {self.sp_size > 1}",
                required="a convolution without bias, the l2 norm, neither kind of parallelism",
                hint="samebits explain SB0605",
            )
        self.schedule = contracted_schedule(self.key_head_dim, self.value_head_dim)
        # The rollout engine's expression, so that both round the same number.
        self.scale = self.key_head_dim**-0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_context=None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params=None,
        **_,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s, b, H] bf16, with b = 1 when packed -> (same shape, the bias)."""
        if inference_context is not None or inference_params is not None:
            raise Refused(
                "SB0605",
                seen="an inference context",
                required="whole sequences; the rollout engine decodes",
                hint="samebits explain SB0605",
            )
        s, b = hidden_states.shape[:2]
        if packed_seq_params is None:
            cu_seqlens = torch.arange(b + 1) * s
        else:
            cu_seqlens = self._resolve_cu_seqlens(
                packed_seq_params.cu_seqlens_q_padded,
                packed_seq_params.cu_seqlens_q,
                s,
                "cu_seqlens_q",
            )
        projected, _ = self.in_proj(hidden_states)
        rows = projected.transpose(0, 1).flatten(0, 1)  # one sequence after the other
        out = self._mix(rows, cu_seqlens)
        return self.out_proj(out.view(b, s, -1).transpose(0, 1))

    def _mix(self, rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Projected rows [T, q + k + v + z + b + a] bf16 of packed sequences -> [T, HV, V] bf16."""
        heads = self.num_v_heads_local_tp
        sizes = [self.conv_dim_local_tp, self.v_dim_local_tp, heads, heads]
        qkv, z, b, a = rows.split(sizes, -1)
        weight = self.conv1d.weight.squeeze(1)
        qk, v = conv1d.varlen(qkv, weight, cu_seqlens, exact=2 * self.qk_dim_local_tp)
        qk = qk.unflatten(-1, (-1, self.key_head_dim))
        q, k = l2_norm.l2_norm(qk, wide=True).chunk(2, 1)
        v, z = (x.unflatten(-1, (heads, self.value_head_dim)) for x in (v, z))
        g, beta = gdn_gate.gate(a, b, self.A_log, self.dt_bias)
        core = gdn.varlen(q, k, v, g, beta, cu_seqlens, self.scale, self.schedule)
        return self.out_norm(core, z)
