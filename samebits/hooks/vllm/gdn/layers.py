"""Attention with an output gate, and Gated DeltaNet: aligned, and upstream's pair for the control.

All are subclasses of vLLM's layers, which create and shard the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

from samebits import runtime
from samebits.hooks.vllm.gdn import state
from samebits.hooks.vllm.gdn.metadata import Backend, Metadata
from samebits.hooks.vllm.weights import Shard


class Attention(Qwen3NextAttention):
    """vLLM's. Where a part of it is ours, not by the kernel for norms, rotation and gate in one,
    which vLLM takes on a GPU."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if runtime.regions() & {"norm.rms_zero_centred", "rope", "attention.gate"}:
            self.use_fused_qk_norm_rope_gate = False


class AlignedAttention(Attention):
    """hidden_states [T, H] -> output [T, H]; the gate is applied in fp32 with one rounding."""

    def forward(
        self, positions: torch.Tensor, output: torch.Tensor, hidden_states: torch.Tensor
    ) -> None:
        """hidden_states [T, H] bf16 at `positions` -> `output` [T, H], written in place."""
        from samebits.ops import output_gate

        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v, gate = self._project_qkv_gate(qkv, positions)
        output[:], _ = self.o_proj(output_gate.output_gate(self.attn(q, k, v), gate))


class DeltaNet(QwenGatedDeltaNetAttention):
    """Project, compute the core over the paged state, norm with a gate, project."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.conv1d.quant_method = None  # its weight is read as it is: nothing may repack it

    def _spec(self) -> state.Spec:
        return state.spec(
            self.num_k_heads // self.tp_size,
            self.num_v_heads // self.tp_size,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
            self.model_config.dtype,
        )

    def get_state_shape(self):
        """Shapes of the tensors of one state, in the order of `state.spec`."""
        return tuple(shape for _, shape, _ in self._spec())

    def get_state_dtype(self):
        """Their dtypes, in the same order."""
        return tuple(dtype for _, _, dtype in self._spec())

    def get_attn_backend(self) -> type[Backend]:
        """The backend whose metadata `core` reads."""
        return Backend

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """hidden_states [T, H] bf16 -> output [T, H] bf16."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        step = get_forward_context().attn_metadata
        if step is None:  # a warm-up call without requests
            output.zero_()
            return
        qkv, z = qkvz.split([self.conv_dim // self.tp_size, self.value_dim // self.tp_size], -1)
        b, a = ba.chunk(2, -1)
        rows = self.core(qkv, b, a, step[self.prefix])
        rows = self.gated_norm(rows, z.unflatten(-1, (-1, self.head_v_dim)))
        output[:], _ = self.out_proj(rows.flatten(-2))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, C] -> q, k [T, HK, K] and v [T, HV, V]."""
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = qkv.split([keys, keys, values], -1)
        size = self.head_k_dim
        return (
            q.unflatten(-1, (-1, size)),
            k.unflatten(-1, (-1, size)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )

    def core(
        self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, step: Metadata
    ) -> torch.Tensor:
        """qkv [T, C], b and a [T, HV] bf16 -> [T, HV, V]; the state moves on in place."""
        raise NotImplementedError

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """x [T, HV, V] from `core`, z [T, HV, V] bf16 -> [T, HV, V] bf16."""
        raise NotImplementedError

    def samebits_shards(self, path: str, rank: int) -> Iterator[Shard]:
        """This rank's part of the layer's published tensors; vLLM fuses four projections in two."""
        ranks, everything = self.tp_size, slice(None)
        values, keys, hidden = self.value_dim, self.key_dim, self.hidden_size

        def part(size: int, start: int = 0) -> range:
            return range(start + rank * size // ranks, start + (rank + 1) * size // ranks)

        qkv = [*part(keys), *part(keys, keys), *part(values, 2 * keys)]
        fused = self.in_proj_qkvz.weight.data
        b, a = self.in_proj_ba.weight.data.chunk(2)
        heads = self.num_v_heads
        conv = self.conv1d.weight.data
        for name, shape, index, data in (
            ("in_proj_qkv.weight", (self.conv_dim, hidden), (qkv,), fused[: len(qkv)]),
            ("in_proj_z.weight", (values, hidden), (part(values),), fused[len(qkv) :]),
            ("in_proj_b.weight", (heads, hidden), (part(heads),), b),
            ("in_proj_a.weight", (heads, hidden), (part(heads),), a),
            ("conv1d.weight", (self.conv_dim, *conv.shape[1:]), (qkv,), conv),
            ("A_log", (heads,), (part(heads),), self.A_log.data),
            ("dt_bias", (heads,), (part(heads),), self.dt_bias.data),
            (
                "out_proj.weight",
                (hidden, values),
                (everything, part(values)),
                self.out_proj.weight.data,
            ),
        ):
            whole = (everything,) * (len(shape) - len(index))
            yield Shard(f"{path}.{name}", shape, (*index, *whole), data)
        if rank == 0:
            norm = self.norm.weight.data
            yield Shard(f"{path}.norm.weight", tuple(norm.shape), (everything,), norm)


class AlignedDeltaNet(DeltaNet):
    """The contract's schedule: bits of a row depend on its own sequence and position only."""

    def core(self, qkv, b, a, step):
        """qkv [T, C], b and a [T, HV] bf16 -> [T, HV, V] by the schedule of the contract."""
        from samebits.ops import conv1d, gdn, gdn_gate, l2_norm

        *states, window = self.kv_cache
        tables = (step.slots, step.query_start_loc, step.context_lens)
        weight = self.conv1d.weight.data.squeeze(1)
        keys = self.key_dim // self.tp_size
        qk, v = conv1d.advance(qkv, weight, window, *tables, exact=2 * keys)
        q, k = (x.unflatten(-1, (-1, self.head_k_dim)) for x in qk.split(keys, -1))
        g, beta = gdn_gate.gate(a, b, self.A_log.data, self.dt_bias.data)
        return gdn.advance(
            l2_norm.l2_norm(q, wide=True),
            l2_norm.l2_norm(k, wide=True),
            v.unflatten(-1, (-1, self.head_v_dim)),
            g,
            beta,
            states,
            *tables,
            self.head_k_dim**-0.5,
            state.schedule(),
            most=step.most,
        )

    def gated_norm(self, x, z):
        """x [T, HV, V] of the schedule's dtype, z bf16 -> bf16, by the shared operator."""
        from samebits.ops import gated_rms_norm, gdn

        wide = gdn.OUTPUTS[state.schedule()] == torch.float32
        return gated_rms_norm.gated_rms_norm(x, z, self.norm.weight.data, self.norm.eps, wide=wide)


class StockDeltaNet(DeltaNet):
    """Upstream's pair on a host without its kernels: a chunk form for slices, a recurrence for
    single tokens. vLLM ships a torch convolution for such hosts, transformers a torch core."""

    def core(self, qkv, b, a, step):
        """As the aligned one, by the chunk and recurrent forms that upstream ships for any host."""
        starts, contexts = step.query_start_loc.tolist(), step.context_lens.tolist()
        out = qkv.new_zeros(len(qkv), self.num_v_heads // self.tp_size, self.head_v_dim)
        for row, (slot, context) in enumerate(zip(step.slots.tolist(), contexts, strict=True)):
            span = slice(starts[row], starts[row + 1])
            if span.start < span.stop:
                out[span] = self._sequence(qkv[span], b[span], a[span], slot, context)
        return out

    def _sequence(self, qkv, b, a, slot: int, context: int) -> torch.Tensor:
        from torch.nn.functional import softplus
        from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream
        from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d

        states, windows = self.kv_cache
        weight = self.conv1d.weight.data.squeeze(1)
        window = windows[slot : slot + 1].transpose(1, 2)
        decode = context > 0 and len(qkv) == 1
        if decode:
            moved = window.contiguous()
            qkv = causal_conv1d.causal_conv1d_update_torch(
                qkv.unsqueeze(-1), moved, weight, None, self.activation
            ).squeeze(-1)
            window.copy_(moved)
        else:
            qkv = causal_conv1d.causal_conv1d_torch(
                qkv.T,
                weight,
                None,
                window,
                torch.tensor([0, len(qkv)]),
                torch.tensor([0]),
                torch.tensor([context > 0]),
                self.activation,
            ).T
        group = self.num_v_heads // self.num_k_heads
        q, k, v = self._heads(qkv)
        core = (
            upstream.torch_recurrent_gated_delta_rule
            if decode
            else upstream.torch_chunk_gated_delta_rule
        )
        out, moved = core(
            q.repeat_interleave(group, 1)[None],
            k.repeat_interleave(group, 1)[None],
            v[None],
            g=(-self.A_log.data.exp() * softplus(a.float() + self.dt_bias.data))[None],
            beta=b.sigmoid()[None],
            initial_state=states[slot : slot + 1] if context else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        states[slot].copy_(moved[0])
        return out[0]

    def gated_norm(self, x, z):
        """As the aligned one, by torch."""
        shape = x.shape
        return self.norm(x.flatten(0, 1), z.flatten(0, 1)).view(shape)


def attention_class() -> type[Attention]:
    """Class of full attention layers: with our gate where that is aligned, else with vLLM's."""
    return AlignedAttention if runtime.aligned("attention.gate") else Attention


def delta_net_class() -> type[DeltaNet]:
    """Class of recurrent layers for this process's arithmetic and platform."""
    aligned = runtime.aligned("gdn.core")
    if runtime.platform() == "sm90":
        from samebits.hooks.vllm.cuda import gdn

        return gdn.AlignedDeltaNet if aligned else gdn.StockDeltaNet
    return AlignedDeltaNet if aligned else StockDeltaNet
