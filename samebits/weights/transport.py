"""Move a model's weights from the trainer to the rollout engine through shared memory.

The sender writes one segment (a file in shared memory) and describes it in a manifest; the
receiver verifies contract, step, names and every checksum *before* it yields the first tensor, so
a refused transfer leaves the engine's weights as they were.

    with send(named_tensors, step=3, contract_digest=digest) as manifest:
        engine.call("load_weights", manifest.to_json())      # in the other process:
        # for name, tensor in receive(Manifest.from_json(text), contract_digest=..., names=...)

The segment is unlinked when the block ends. One that a killed process left behind is unlinked by
the next `send` of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from samebits import bits, segments
from samebits.errors import Refused, word
from samebits.weights.checksums import tensor_checksum

_PREFIX = "samebits-weights"
_ALIGNMENT = 64
_STAGE = 1 << 26  # bytes of a GPU's tensor that are on their way at one time
_SHARED_MEMORY = segments.SHARED_MEMORY
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float16, torch.float32)}


@dataclass(frozen=True)
class Entry:
    """One logical tensor: `checksum` is the hex form of its 128-bit `tensor_checksum`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        size = torch.empty((), dtype=_DTYPES[self.dtype]).element_size()
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Manifest:
    """What a segment holds. JSON-able, small; travels over any channel that the engines share."""

    segment: str
    step: int
    contract_digest: str
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parse and check every field. Raises Refused SB0708."""
        try:
            raw = json.loads(text)
            entries = []
            for item in raw.pop("entries"):
                entry = Entry(**{**item, "shape": tuple(item["shape"])})
                numbers = (entry.offset, *entry.shape)
                if not all(type(n) is int and n >= 0 for n in numbers):
                    raise ValueError(f"{entry.name}: shape or offset is not a natural number")
                if entry.dtype not in _DTYPES:
                    raise ValueError(f"{entry.name}: dtype {entry.dtype}")
                int(entry.checksum, 16)
                entries.append(entry)
            manifest = Manifest(**raw, entries=tuple(entries))
            if type(manifest.step) is not int:
                raise ValueError("step is not an integer")
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise _unusable(
                f"{type(problem).__name__}: {problem}", "a manifest of `send`"
            ) from None
        return manifest

    def checksums(self) -> dict[str, int]:
        """Tensor name -> checksum, to compare with what an engine holds after loading."""
        return {entry.name: int(entry.checksum, 16) for entry in self.entries}


@contextlib.contextmanager
def send(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    step: int,
    contract_digest: str,
    size: int = 0,
    live: Mapping[str, int] | None = None,
) -> Iterator[Manifest]:
    """Write `tensors` (Hugging Face checkpoint name, whole tensor, any device) into one segment.

    size   bytes to reserve before anything is written, where they are known: shared memory without
           that much room is then not filled in vain
    live   checksums of the tensors that the sender computes with: what is sent has to have them

    Yields the manifest; the segment lives until the block ends. Raises Refused SB0707 for a name
    given twice, or not exactly those of `live`; SB0710 for a tensor that is not the live one;
    SB0709 when neither shared memory nor the temporary folder (TMPDIR) has room.
    """
    segments.remove_stale(_PREFIX, (_SHARED_MEMORY, Path(tempfile.gettempdir())))
    with _Segment() as segment:
        segment.reserve(size)
        entries: list[Entry] = []
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen:
                raise _wrong_names(f"`{name}` twice", "every tensor once")
            if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
                raise _wrong_names(f"`{name}` of {tensor.dtype}", f"one of {', '.join(_DTYPES)}")
            seen.add(name)
            tensor = tensor.detach().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            checksum = bits.hex_digest(tensor_checksum(tensor))
            offset = segment.append(_parts(tensor, _staging(tensor.device)))
            entries.append(Entry(name, dtype, tuple(tensor.shape), offset, checksum))
        manifest = Manifest(str(segment.path), step, contract_digest, tuple(entries))
        if live is not None:  # not before `tensors` has ended: it may be a collective of all ranks
            _check_live(manifest, live)
        yield manifest


def receive(
    manifest: Manifest,
    *,
    contract_digest: str,
    names: Collection[str],
    step: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Verify the whole transfer, then return an iterator over (name, tensor on `device`).

    On a CPU tensors lie in a private mapping: writing to one reaches nobody else. Elsewhere they
    are copies, and it is the copies that were verified.

    `contract_digest`, `names` and `step` are the receiver's own. Raises Refused SB0706 (other
    contract), SB0707 (tensor missing, unknown or doubled), SB0708 (other step, segment gone or
    short), SB0705 (a checksum differs), always before anything is yielded.
    """
    if manifest.contract_digest != contract_digest:
        raise Refused(
            "SB0706",
            seen=f"weights sent under contract {manifest.contract_digest}",
            required=f"contract {contract_digest}",
            hint="samebits contract show --digests",
        )
    if step is not None and manifest.step != step:
        raise _unusable(f"weights of step {manifest.step}", f"weights of step {step}")
    _check_names([entry.name for entry in manifest.entries], names)
    view = _map_segment(manifest)
    received = []
    for entry in manifest.entries:
        tensor = _tensor(view, entry).to(device)
        received.append((entry.name, tensor))
        found = bits.hex_digest(tensor_checksum(tensor))
        if found != entry.checksum:
            raise Refused(
                "SB0705",
                seen=f"`{entry.name}` with checksum {found}",
                required=f"checksum {entry.checksum} (step {manifest.step})",
                hint="samebits explain SB0705",
            )
    return _handed_over(received, torch.device(device))


def _handed_over(
    received: list[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor once; its memory is free when the next is asked for, and the chip's in the end:
    a trainer on the same one needs it."""
    while received:
        yield received.pop(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _staging(device: torch.device) -> torch.Tensor | None:
    """Memory through which tensors of a GPU pass: it is pinned, and used again for all of them,
    where pages that nobody has touched would take longer than the copy."""
    if device.type != "cuda":
        return None
    return _pinned()


@functools.cache
def _pinned() -> torch.Tensor:
    return torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True)


def _parts(tensor: torch.Tensor, stage: torch.Tensor | None) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor, whole, or as much at a time as `stage` holds."""
    if stage is None:
        yield bits.int_view(tensor).ravel().view(np.uint8).data
        return
    for part in tensor.reshape(-1).view(torch.uint8).split(len(stage)):
        staged = stage[: len(part)].copy_(part)
        yield staged.numpy().data


def _check_live(manifest: Manifest, live: Mapping[str, int]) -> None:
    sent = manifest.checksums()
    _check_names([entry.name for entry in manifest.entries], live)
    wrong = [name for name, checksum in sent.items() if checksum != live[name]]
    if wrong:
        name, many = wrong[0], f"{len(wrong)} of {len(sent)} tensors"
        raise Refused(
            "SB0710",
            seen=f"{many}, first `{name}` with checksum {bits.hex_digest(sent[name])}",
            required=f"checksum {bits.hex_digest(live[name])}, of the sender's own parameter at "
            f"step {manifest.step}",
            hint="samebits explain SB0710",
        )


def _check_names(sent: list[str], expected: Collection[str]) -> None:
    doubled = (
        sorted({name for name in sent if sent.count(name) > 1})
        if len(set(sent)) < len(sent)
        else []
    )
    missing = sorted(set(expected) - set(sent))
    unknown = sorted(set(sent) - set(expected))
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"
        for kind, names in (("doubled", doubled), ("missing", missing), ("unknown", unknown))
        if names
    ]
    if problems:
        raise _wrong_names("; ".join(problems), f"exactly the model's {len(set(expected))} tensors")


def _map_segment(manifest: Manifest) -> mmap.mmap | bytes:
    path = Path(manifest.segment)
    filled = [entry for entry in manifest.entries if entry.nbytes]
    end = max((entry.offset + entry.nbytes for entry in filled), default=0)
    try:
        if not path.name.startswith(_PREFIX):
            raise OSError(errno.EINVAL, "not a weight segment")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < end:
                raise OSError(errno.EINVAL, f"{size} bytes long")
            # A private mapping: torch wants writable memory, and writes must not reach the sender.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as problem:
        raise _unusable(f"{path.name}: {problem.strerror}", f"a segment of {end} bytes") from None


def _tensor(view: mmap.mmap | bytes, entry: Entry) -> torch.Tensor:
    count = entry.nbytes // torch.empty((), dtype=_DTYPES[entry.dtype]).element_size()
    if count == 0:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    flat = torch.frombuffer(view, dtype=_DTYPES[entry.dtype], count=count, offset=entry.offset)
    return flat.view(entry.shape)


class _Segment:
    """A growing file in shared memory; moves to the temporary folder when memory runs out."""

    def __init__(self) -> None:
        self._folders = [f for f in (_SHARED_MEMORY, Path(tempfile.gettempdir())) if f.is_dir()]
        self.path = self._folders.pop(0) / segments.new_name(_PREFIX)
        self._size = 0

    def __enter__(self) -> _Segment:
        self._file = _create(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def reserve(self, size: int) -> None:
        """Take memory for `size` bytes, in the next folder where this one has no room for them."""
        if not size:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as problem:
            if problem.errno not in _FULL:
                raise
            if not self._folders:
                raise self._full(size) from None
            self._move(0, memoryview(b""))
            self.reserve(size)

    def append(self, parts: Iterable[memoryview]) -> int:
        """Write `parts` side by side from the next aligned offset on, and return that offset."""
        offset = self._size = -(-self._size // _ALIGNMENT) * _ALIGNMENT
        for data in parts:
            try:
                self._write(self._size, data)
            except OSError as problem:
                if problem.errno not in _FULL:
                    raise
                self._move(self._size, data)
            self._size += len(data)
        return offset

    def _write(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        written = 0
        while written < len(data):  # a raw file may write less than it was given
            written += self._file.write(data[written:])

    def _move(self, offset: int, data: memoryview) -> None:
        """Copy what is written to the next folder, then write `data` there."""
        if not self._folders:
            raise self._full(len(data))
        old, old_file = self.path, self._file
        self.path = self._folders.pop(0) / old.name
        self._file = _create(self.path)
        try:
            with old.open("rb") as source:
                shutil.copyfileobj(source, self._file)
            self._write(offset, data)
        except OSError as problem:
            raise (self._full(len(data)) if problem.errno in _FULL else problem) from None
        finally:
            old_file.close()
            old.unlink(missing_ok=True)

    def _full(self, wanted: int) -> Refused:
        return Refused(
            "SB0709",
            seen=f"no space left in {self.path.parent} after {self._size} bytes",
            required=f"room for {wanted} more bytes",
            hint=f"df -h {_SHARED_MEMORY} {word(tempfile.gettempdir())}",
        )


def _create(path: Path):
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b", buffering=0)


def _unusable(seen: str, required: str) -> Refused:
    return Refused("SB0708", seen=seen, required=required, hint="samebits explain SB0708")


def _wrong_names(seen: str, required: str) -> Refused:
    return Refused("SB0707", seen=seen, required=required, hint="samebits explain SB0707")
