"""Megatron-core's real `GPTModel`, DDP and optimizer as one tensor-parallel rank of a trainer.

    trainer = Trainer(model_dir, contract=path)
    trainer.load_weights(open_model(model_dir))
    scores = trainer.score([[1, 2, 3], [4, 5]], layout="packed")
    trainer.train_step(batch, loss_fn)
    new_weights = dict(trainer.export_weights())

`SAMEBITS_ARITHMETIC=stock` runs the same driver on Megatron's own modules and torch's operators.
One process holds one trainer: Megatron keeps its groups in global state. `trainer_process` runs one
rank per process.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samebits import bits, runtime
from samebits.engines import trainer_batch as batches
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_model import Architecture, build_model
from samebits.engines.trainer_slots import Slot, slots
from samebits.errors import Refused
from samebits.hooks.megatron import device
from samebits.weights import wide
from samebits.weights.checksums import tensor_checksum

# Rows of logits that exist at one time while scoring, by the kind of device: of 49152 columns
# 24 MiB on a CPU, 768 MiB on a GPU, where few rows leave most of it idle.
LOGIT_ROWS = {"cpu": 128, "cuda": 4096}
# Seconds between two lines about a call that takes long.
_QUIET = 20.0

# loss_fn(logprobs, old_logprobs, advantages, mask) -> (loss, metrics); all [sequences, targets],
# fp32, right-padded with mask 0; the loss is a mean over the masked tokens.
LossFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, dict[str, float]],
]


@dataclass(frozen=True)
class OptimizerSettings:
    """Megatron's optimizer with fp32 main parameters. `clip` 0 turns gradient clipping off.

    name   `adam`, or `sgd`: without momentum, so that it keeps nothing for a parameter
    beta1, beta2, eps   Adam's
    """

    lr: float = 1e-5
    name: str = "adam"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0


@dataclass(frozen=True)
class Scores:
    """Per sequence of length n: `logprobs` fp32 [n - 1]; `digests` n - 1 hex digests of the whole
    fp32 logit rows (`logprob.row_digest`), or None when they were not asked for."""

    logprobs: list[torch.Tensor]
    digests: list[list[str]] | None


@dataclass(frozen=True)
class StepResult:
    """`logprobs` are the training forward's own bits; `loss` and metrics are token-weighted."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    logprobs: list[torch.Tensor]


class Trainer:
    """One tensor-parallel rank. All ranks make the same calls with the same arguments."""

    def __init__(
        self,
        model_dir: str | Path,
        contract: str | Path | None = None,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        rendezvous: str | None = None,
        seed: int = 1234,
        optimizer: OptimizerSettings | None = None,
        gradients: bool = False,
        micro_tokens: int = 512,
        parallel: dict[str, int] | None = None,
    ):
        """Build the model with uninitialised weights.

        contract      the case's contract file; needed when aligned, and must be this model's
        rendezvous    init_method of torch.distributed, the same on all ranks (a file:// address)
        optimizer     None: no gradient buffers, score only
        gradients     gradient buffers without an optimizer: passes can be timed, and no step made
        micro_tokens  tokens per micro-batch (one sequence at least); decides memory, not bits
        parallel      other sizes that a caller may name; anything but 1 is refused (SB0604)
        """
        refuse_parallel(parallel or {})
        self.arch = Architecture.load(Path(model_dir))
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.micro_tokens = micro_tokens
        self.step = 0
        self._loaded = False
        self._digest_columns: set[int] = set()
        if runtime.platform() == "sm90":
            _use_gpu(tp_rank)
        self._bind(Path(model_dir), contract)
        self.arch.refuse_tp(tp_size)
        require_patched(hybrid=self.arch.linear is not None)
        self._init_groups(rendezvous, seed)
        self.device = device.current()
        with self.device:  # billions of parameters that came by way of the host would take seconds
            self.model: torch.nn.Module = build_model(self.arch, tp_size).to(self.device)
        self._ddp: Any = None
        self._optimizer: Any = None
        if optimizer is not None or gradients:
            self._ddp = _gradient_buffers(self.model)
        if optimizer is not None:
            self._optimizer = _optimizer(self._ddp, optimizer)

    def _bind(self, model_dir: Path, contract: str | Path | None) -> None:
        """Load the contract into this process and check model, layout and operators against it."""
        self.binding = None
        self.contract_digest = ""
        if contract is not None:
            path = str(Path(contract).resolve())
            if os.environ.setdefault("SAMEBITS_CONTRACT", path) != path:
                raise Refused(
                    "SB0613",
                    seen=f"contract {path}; this process has {os.environ['SAMEBITS_CONTRACT']}",
                    required="one contract per process",
                    hint="unset SAMEBITS_CONTRACT",
                )
        if not runtime.regions() and not os.environ.get("SAMEBITS_CONTRACT"):
            return
        loaded = runtime.contract()
        loaded.check_model(json.loads((model_dir / "config.json").read_text()))
        loaded.check_tp("trainer", self.tp_size)
        self.contract_digest = loaded.digest
        if runtime.regions():
            self.binding = loaded.bind("trainer")

    def _init_groups(self, rendezvous: str | None, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if dist.is_initialized():
            raise Refused(
                "SB0613",
                seen="torch.distributed is initialised in this process",
                required="one trainer per process",
                hint="samebits explain SB0613",
            )
        self._rendezvous_dir = None
        if rendezvous is None:
            self._rendezvous_dir = tempfile.TemporaryDirectory(prefix="samebits-trainer-")
            rendezvous = f"file://{self._rendezvous_dir.name}/ranks"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if runtime.platform() == "sm90" else "gloo",
            init_method=rendezvous,
            rank=self.tp_rank,
            world_size=self.tp_size,
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.tp_size)
        model_parallel_cuda_manual_seed(seed)
        self.group = parallel_state.get_tensor_model_parallel_group()

    # -- weights ---------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every published tensor into this rank's shard; SB0607 unless each comes once."""
        places = {slot.name: slot for slot in slots(self.arch, self.model, self.tp_size)}
        todo = dict(places)
        self._loaded = False  # a refusal half-way leaves a mixture, which must not be used
        for name, tensor in weights:
            if self.arch.tied and name == "lm_head.weight":
                continue  # a published copy of the embedding
            slot = todo.pop(name, None)
            if slot is None or tuple(tensor.shape) != slot.shape:
                wanted = "a tensor of this model" if slot is None else f"shape {slot.shape}"
                again = " again" if name in places and slot is None else ""
                raise _bad_weight(f"{name}{again}, shape {tuple(tensor.shape)}", wanted)
            if tensor.dtype not in (torch.bfloat16, slot.view.dtype):  # widening is exact
                raise _bad_weight(f"{name} of {tensor.dtype}", f"bfloat16 or {slot.view.dtype}")
            slot.view.copy_(slot.share(tensor, self.tp_rank, self.tp_size))
        if todo:
            missing = sorted(todo)
            raise _bad_weight(
                f"{len(missing)} tensors missing, first {missing[0]}", "every tensor of the model"
            )
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
        self._loaded = True

    def _require_weights(self) -> None:
        if not self._loaded:
            raise _bad_weight(
                "a trainer without a complete set of weights", "a load that succeeded"
            )

    @torch.no_grad()
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(published name, whole tensor where the model is), in forward order, the same on all
        ranks.

        bf16, but for the decays `A_log` of linear attention, which are fp32 as they are trained.
        Collective: every rank must run the iterator to its end. SB0612 when copies differ.
        """
        yield from self._whole(torch.Tensor.detach)

    @torch.no_grad()
    def live_checksums(self) -> dict[str, int]:
        """Published name -> `checksums.tensor_checksum` of the whole tensor, of the parameters that
        the model computes with now; every rank sums its own shard where it lies.

        Collective. SB0710 where a published tensor would be read from memory that is no parameter.
        """
        self._require_weights()
        places = list(slots(self.arch, self.model, self.tp_size))
        live = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        halves = torch.zeros((len(places), 2), dtype=torch.int64)  # a copy counts on rank 0 only
        for row, slot in zip(halves, places, strict=True):
            if slot.view.untyped_storage().data_ptr() not in live:
                raise Refused(
                    "SB0710",
                    seen=f"`{slot.name}` from memory that is no parameter at step {self.step}",
                    required="the parameter that the model computes with",
                    hint="samebits explain SB0710",
                )
            if slot.shard_dim is None and self.tp_rank:
                continue
            index = slot.index(self.tp_rank, self.tp_size)
            sums = tensor_checksum(slot.local(self.tp_size), shape=slot.shape, index=index)
            row.copy_(torch.tensor([wide.signed(sums), wide.signed(sums >> 64)]))
        ranks = [torch.empty_like(halves) for _ in range(self.tp_size)]
        dist.all_gather(ranks, halves, group=self.group)
        of_ranks = zip(*(map(wide.digest, rank) for rank in ranks), strict=True)
        sums_of = (bits.add_digests(*shares) for shares in of_ranks)
        return {slot.name: total for slot, total in zip(places, sums_of, strict=True)}

    def export_bytes(self) -> int:
        """Bytes of everything that `export_weights` yields, each tensor rounded up to 64."""
        places = slots(self.arch, self.model, self.tp_size)
        sizes = (math.prod(slot.shape) * slot.view.element_size() for slot in places)
        return sum(-(-size // 64) * 64 for size in sizes)

    @torch.no_grad()
    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(published name, whole fp32 gradient on the CPU) of the last step; clipped if clipping
        is on.

        Collective, as `export_weights`.
        """
        for name, tensor in self._whole(lambda parameter: parameter.main_grad):
            yield name, tensor.cpu()

    def _whole(self, of) -> Iterator[tuple[str, torch.Tensor]]:
        self._require_weights()
        for slot in slots(self.arch, self.model, self.tp_size, of):
            if slot.shard_dim is None:
                self._refuse_drift(slot)
                yield slot.name, slot.view.reshape(slot.shape).clone()
                continue
            yield slot.name, slot.whole(self._gather(slot.local(self.tp_size)))

    def _gather(self, local: torch.Tensor) -> list[torch.Tensor]:
        if self.tp_size == 1:
            return [local.clone()]
        parts = [torch.empty_like(local) for _ in range(self.tp_size)]
        dist.all_gather(parts, local, group=self.group)
        return parts

    def _refuse_drift(self, slot: Slot) -> None:
        if self.tp_size == 1:
            return
        parts = self._gather(slot.view.contiguous())
        wrong = [rank for rank, part in enumerate(parts) if not bits.equal(part, parts[0])]
        if wrong:
            raise Refused(
                "SB0612",
                seen=f"{slot.name} on ranks {wrong} differs from rank 0 at step {self.step}",
                required="equal copies on all ranks",
                hint="samebits explain SB0612",
            )

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, sequences, layout: str, on_rows) -> torch.Tensor:
        """Run the model on one micro-batch. `on_rows(hidden [n, 1, H], project, weight, targets
        [n])` gets the rows that predict a target, the output layer and its weight."""
        from megatron.core.packed_seq_params import PackedSeqParams

        if layout == "packed" and not runtime.aligned():
            raise Refused(
                "SB0611",
                seen=f"layout packed with arithmetic {runtime.arithmetic()}",
                required="layout padded",
                hint="samebits explain SB0611",
            )
        batch = batches.inputs(sequences, layout, with_mask=not runtime.aligned("attention"))
        batch = batch.to(self.device)
        packed = None
        if batch.cu_seqlens is not None:
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=batch.cu_seqlens,
                cu_seqlens_kv=batch.cu_seqlens,
                max_seqlen_q=batch.longest,
                max_seqlen_kv=batch.longest,
            )

        def process(*, hidden_states, output_layer, output_weight, **_):
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])[batch.rows]

            def project(part: torch.Tensor) -> torch.Tensor:
                return output_layer(part, weight=output_weight)[0]

            weight = output_layer.weight if output_weight is None else output_weight
            return on_rows(rows[:, None], project, weight, batch.targets)

        model = self.model if self._ddp is None else self._ddp
        return model(
            batch.input_ids,
            batch.position_ids,
            batch.attention_mask,
            packed_seq_params=packed,
            output_processor=process,
        )

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Sequence[int]], layout: str = "padded", digests: bool = False
    ) -> Scores:
        """Log-probability of every target under the present weights, on the CPU; see `Scores`."""
        slice_rows = LOGIT_ROWS[self.device.type]
        batches.check_sequences(sequences, self.arch.vocab)
        self._require_weights()
        self.model.eval()
        logprobs: list[torch.Tensor] = []
        names: list[list[str]] = []
        for indices in self._told(f"score, {layout}", sequences):
            part = [sequences[i] for i in indices]
            found: list[str] = []

            def on_rows(hidden, project, _, targets, found=found):
                out = [torch.empty(0, device=self.device)]
                for start in range(0, len(targets), slice_rows):
                    logits = project(hidden[start : start + slice_rows])
                    if digests:
                        found += self._row_digests(logits[:, 0])
                    out.append(_selected(logits, targets[start : start + slice_rows]))
                return torch.cat(out)

            values = self._forward(part, layout, on_rows).cpu()
            sizes = [len(s) - 1 for s in part]
            logprobs += [v.clone() for v in values.split(sizes)]
            ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
            names += [found[a:b] for a, b in itertools.pairwise(ends)]
        return Scores(logprobs, names if digests else None)

    def _told(self, what: str, sequences: Sequence[Sequence[int]]) -> Iterator[range]:
        """The micro-batches of `sequences`; rank 0 tells on stderr how many are behind it, where
        they take long."""
        begun = last = time.monotonic()
        for indices in batches.micro_batches(sequences, self.micro_tokens):
            yield indices
            now = time.monotonic()
            if self.tp_rank == 0 and now - last >= _QUIET and indices.stop < len(sequences):
                last = now
                done = f"{indices.stop} of {len(sequences)} sequences"
                sys.stderr.write(f"trainer: {what}: {done} in {now - begun:.0f} s\n")

    def _row_digests(self, logits: torch.Tensor) -> list[str]:
        from samebits.hooks.megatron.logprob import row_digests

        self._digest_columns.add(logits.shape[-1])
        return row_digests(logits.float(), self.group)

    def extent(self, served: bool) -> dict[str, int]:
        """Collective. `ranks`: how many ranks of the group say `served`; `digest_columns`: columns
        that row digests covered so far, all ranks together, 0 where not every row had as many."""
        columns = max(self._digest_columns, default=0) if len(self._digest_columns) == 1 else 0
        sums = torch.tensor([int(served), columns])
        dist.all_reduce(sums, group=self.group)
        return dict(zip(("ranks", "digest_columns"), sums.tolist(), strict=True))

    # -- training --------------------------------------------------------------------------------

    def train_step(
        self, batch: TrainBatch, loss_fn: LossFunction, layout: str = "padded"
    ) -> StepResult:
        """One optimizer step over `batch`, micro-batch by micro-batch.

        Every micro-batch's loss is weighted by its share of counted tokens, so a loss that is a
        mean over tokens gives the gradient of the mean over the whole batch.
        """
        self._require("an optimizer", self._optimizer)
        loss, metrics, logprobs = self._pass(batch, loss_fn, layout)
        return StepResult(loss, self._finish_step(), metrics, logprobs)

    def time_passes(
        self, batch: TrainBatch, loss_fn: LossFunction, repeats: int, layout: str = "padded"
    ) -> tuple[list[float], list[torch.Tensor]]:
        """Seconds of forward and backward over `batch`, `repeats` times after one that does not
        count, and the log-probabilities of the last; no weight moves."""
        seconds, logprobs = list[float](), list[torch.Tensor]()
        for _ in range(repeats + 1):
            started = self._now()
            *_, logprobs = self._pass(batch, loss_fn, layout)
            seconds.append(self._now() - started)
        return seconds[1:], logprobs

    def _now(self) -> float:
        """Seconds of a clock, once everything that was asked of the device has been done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _pass(
        self, batch: TrainBatch, loss_fn: LossFunction, layout: str
    ) -> tuple[float, dict[str, float], list[torch.Tensor]]:
        """Gradients of a batch, and its loss, metrics and log-probabilities."""
        from samebits.hooks.megatron.logprob import selected

        self._require("gradient buffers", self._ddp)
        batch.check(self.arch.vocab)
        self._require_weights()
        self.model.train()
        self._ddp.zero_grad_buffer()
        total = sum(float(m.sum()) for m in batch.mask)
        loss_sum, metrics, logprobs = 0.0, dict[str, float](), list[torch.Tensor]()
        for indices in self._told(f"step {self.step + 1}", batch.sequences):
            part = [batch.sequences[i] for i in indices]
            sizes = [len(s) - 1 for s in part]
            share = sum(float(batch.mask[i].sum()) for i in indices) / total

            def on_rows(hidden, project, weight, targets):
                if not len(targets):
                    return torch.empty(0, device=self.device)
                if runtime.aligned("gemm.lm_head") and runtime.aligned("logprob"):
                    return selected(hidden[:, 0], weight, targets, self.group)
                return _selected(project(hidden), targets)

            values = self._forward(part, layout, on_rows)
            logprobs += [v.clone() for v in values.detach().cpu().split(sizes)]
            if share == 0.0:
                continue
            loss, found = loss_fn(
                _rows_of(values.split(sizes)),
                self._of(batch.old_logprobs, indices),
                self._of(batch.advantages, indices),
                self._of(batch.mask, indices),
            )
            (loss * share).backward()
            loss_sum += float(loss.detach()) * share
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0.0) + float(value) * share
        return loss_sum, metrics, logprobs

    def _require(self, what: str, found: object) -> None:
        """SB0613 where the trainer was built without what a call needs."""
        if found is None:
            raise Refused(
                "SB0613",
                seen=f"a trainer built without {what}",
                required="optimizer settings at start",
                hint="samebits explain SB0613",
            )

    def _of(self, field: Sequence[torch.Tensor], indices: Iterable[int]) -> torch.Tensor:
        """A field of a micro-batch, padded, where the model is."""
        return _rows_of([field[i] for i in indices]).to(self.device)

    def _finish_step(self) -> float:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._ddp])
        ok, grad_norm, _ = self._optimizer.step()
        if not ok:
            raise RuntimeError("Megatron's optimizer skipped a step without a loss scaler")
        self.step += 1
        return float(grad_norm or 0.0)

    def close(self) -> None:
        """Leave the process groups, so that this process may build another trainer."""
        from megatron.core import parallel_state

        del self.model, self._ddp, self._optimizer
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._rendezvous_dir is not None:
            self._rendezvous_dir.cleanup()
        gc.collect()


def _use_gpu(index: int) -> None:
    """Check the chip and the assembler (SB0450, SB0451) and compute on GPU `index` from now on.

    Where torch has a kernel without atomics it takes it: gradients then repeat. Where it has none
    it goes on, because no bits of a gradient are promised.
    """
    from samebits.ops import gpu

    gpu.prepare(index)
    torch.cuda.set_device(index)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _rows_of(values: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([v.float() for v in values], batch_first=True)


def _selected(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [n, 1, V / ranks] -> log-probability of targets [n], fp32, through Megatron's loss.

    The loss is the negated log-probability; negating it back is exact.
    """
    from megatron.core import tensor_parallel

    return -tensor_parallel.vocab_parallel_cross_entropy(logits, targets[:, None])[:, 0]


def _bad_weight(seen: str, required: str) -> Refused:
    return Refused("SB0607", seen=seen, required=required, hint="samebits explain SB0607")


def refuse_parallel(sizes: dict[str, int]) -> None:
    """SB0604 for any size but 1 of `pp`, `cp`, `ep` or `dp`, or `sp` other than 0 or 1."""
    wrong = {name: size for name, size in sizes.items() if size > 1}
    if wrong:
        raise Refused(
            "SB0604",
            seen=", ".join(f"{name}={size}" for name, size in wrong.items()),
            required="1 for everything but tensor parallelism",
            hint="samebits explain SB0604",
        )


# Module of Megatron -> name of the hook that its patch imports.
HOOKED = {
    "megatron.core.models.common.embeddings.rope_utils": "samebits_rotary",
    "megatron.core.models.gpt.gpt_model": "samebits_linear",
    "megatron.core.optimizer.optimizer": "samebits_device",
    "megatron.core.tensor_parallel.cross_entropy": "samebits_logprob",
    "megatron.core.tensor_parallel.layers": "samebits_embedding",
    "megatron.core.tensor_parallel.mappings": "samebits_device",
}


# The same, for models with gated delta nets.
HOOKED_HYBRID = {"megatron.core.ssm.gated_delta_net": "samebits_native"}


def require_patched(hybrid: bool = False) -> None:
    """SB0610 unless the imported Megatron carries every hook (both arithmetics need the series)."""
    wanted = HOOKED | (HOOKED_HYBRID if hybrid else {})
    try:
        lacking = [m for m, hook in wanted.items() if not hasattr(importlib.import_module(m), hook)]
        seen = f"no hook in {', '.join(lacking)}"
    except ImportError as error:
        lacking, seen = ["megatron.core"], str(error)
    if lacking:
        raise Refused(
            "SB0610",
            seen=seen,
            required="the patched tree of megatron-core 0.18.0",
            hint="samebits patch apply megatron",
        )


def _gradient_buffers(model):
    """Megatron's DistributedDataParallel, with a gradient buffer in fp32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        model,
    )


def _optimizer(ddp, settings: OptimizerSettings):
    """Megatron's mixed-precision optimizer, which keeps the parameters in fp32 too."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.name,
            lr=settings.lr,
            sgd_momentum=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
        [ddp],
    )
