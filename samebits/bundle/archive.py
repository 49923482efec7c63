"""One group as an archive cut into parts: the same files give the same bytes."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from samebits.bundle.wheels import File
from samebits.errors import Refused
from samebits.patching.fetch import sha256

# Machine code of this processor compresses better after the first filter; the window is wide
# enough to see two like trees of sources.
_XZ = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},
]


class _Parts(io.RawIOBase):
    """Writes `<stem>-00.part`, `<stem>-01.part`... of at most `limit` bytes each."""

    def __init__(self, folder: Path, stem: str, limit: int):
        self.whole = hashlib.sha256()
        self.size = 0
        self.parts: list[dict[str, Any]] = []
        self._folder, self._stem, self._limit = folder, stem, limit
        self._file: BinaryIO | None = None
        self._part = hashlib.sha256()
        self._count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        self.whole.update(view)
        self.size += total
        while len(view):
            if self._file is None or self._count == self._limit:
                self._next()
            assert self._file is not None
            piece = view[: self._limit - self._count]
            self._file.write(piece)
            self._part.update(piece)
            self._count += len(piece)
            view = view[len(piece) :]
        return total

    def _next(self) -> None:
        self._end()
        name = f"{self._stem}-{len(self.parts):02d}.part"
        self._file = (self._folder / name).open("wb")
        self._part, self._count = hashlib.sha256(), 0
        self.parts.append({"name": name, "size": 0, "sha256": ""})

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self.parts[-1] |= {"size": self._count, "sha256": self._part.hexdigest()}
            self._file = None

    def finish(self) -> None:
        """Close the last part; an archive is never empty."""
        self._end()


def write(
    folder: Path,
    stem: str,
    files: Sequence[File],
    *,
    limit: int,
    compress: bool,
    old: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the parts of an archive; {sha256, size, compression, parts, files} for the manifest.

    limit      most bytes of a part
    compress   by xz; not for content that is compressed already
    old        what an earlier call returned: its parts serve where they hold the same files
    A content that several paths share is stored once.
    Refuses SB1108 two different files for one path.
    """
    chosen: dict[str, File] = {}
    for file in files:
        other = chosen.setdefault(file.path, file)
        if other.content != file.content:
            raise Refused(
                "SB1108",
                seen=f"two different files {file.path}",
                required="one file for a path",
                hint="samebits explain SB1108",
            )
    table = {
        path: [len(file.content), file.sha256, file.mode] for path, file in sorted(chosen.items())
    }
    if old is not None and old["files"] == table and _serves(folder, old["parts"], limit):
        return {key: old[key] for key in ("sha256", "size", "compression", "parts", "files")}
    for left in folder.glob(f"{stem}-[0-9][0-9].part"):
        left.unlink()
    parts = _Parts(folder, stem, limit)
    target: Any = parts
    stream: Any = lzma.LZMAFile(target, "wb", filters=_XZ) if compress else parts  # noqa: SIM115
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in _first_of_each(table):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(chosen[path].content), chosen[path].mode
            archive.addfile(entry, io.BytesIO(chosen[path].content))
    if compress:
        stream.close()
    parts.finish()
    return {
        "sha256": parts.whole.hexdigest(),
        "size": parts.size,
        "compression": "xz" if compress else "none",
        "parts": parts.parts,
        "files": table,
    }


def _first_of_each(table: dict[str, list[Any]]) -> list[str]:
    """Paths without those whose content an earlier one has: the installer writes it to all."""
    first: dict[str, str] = {}
    for path, (_, digest, _) in table.items():
        first.setdefault(digest, path)
    return list(first.values())


def _serves(folder: Path, parts: list[dict[str, Any]], limit: int) -> bool:
    """Whether written parts are whole and cut as a new archive would be."""
    full = all(part["size"] == limit for part in parts[:-1]) and parts[-1]["size"] <= limit
    paths = [(folder / part["name"], part["sha256"]) for part in parts]
    return full and all(path.is_file() and sha256(path) == digest for path, digest in paths)
