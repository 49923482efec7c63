"""Where things lie: `patches/` is read and exported to, `build/` holds all that is generated."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from samebits.errors import Refused, word

LOCK_WAIT_SECONDS = 900
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def refusal(error: OSError, root: Path | None = None) -> Refused | None:
    """What an error of a full or read-only disk is to the user; None for any other.

    root   the checkout that is written to, where the caller knows it
    """
    place = root or Path.cwd()
    if error.errno == errno.EFBIG:
        return Refused(
            "SB0107",
            seen=str(error),
            required="files of 1 GB: no smaller limit of this shell (`ulimit -f`)",
            hint="prlimit --fsize",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(
            "SB0107",
            seen=str(error),
            required="about 1 GB free under build/",
            hint=f"df -h {word(place)}",
        )
    if error.errno in _READ_ONLY:
        return Refused(
            "SB0123",
            seen=str(error),
            required=f"{place} and its build/ writable for this user",
            hint=f"git clone {word(place)} ~/{word(f'{place.name}-writable')}",
        )
    return None


@dataclass(frozen=True)
class Workspace:
    """The root folder of a checkout of this project."""

    root: Path

    @classmethod
    def find(cls) -> Workspace:
        """The checkout that this package was imported from, else one around the current folder."""
        here = Path.cwd()
        for folder in (Path(__file__).resolve().parents[2], here, *here.parents):
            if (folder / "patches" / "pins.yaml").is_file():
                return cls(folder)
        raise Refused(
            "SB0124",
            seen=f"no patches/pins.yaml beside the package or above {here}",
            required="a checkout of the project",
            hint="samebits patch --root CHECKOUT check",
        )

    @property
    def patches(self) -> Path:
        """Folder of pins and series."""
        return self.root / "patches"

    @property
    def build(self) -> Path:
        """Folder of everything that can be made again."""
        return self.root / "build"

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a full or read-only disk into a refusal with an id."""
        try:
            yield
        except OSError as error:
            if known := refusal(error, self.root):
                raise known from error
            raise

    @contextlib.contextmanager
    def lock(self, name: str, wait_seconds: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """Hold the lock `name` of this folder; says so when another run holds it."""
        folder = self.build / "locks"
        lock = FileLock(folder / f"{name}.lock")
        try:
            with self.writing():
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    lock.acquire(timeout=0.1)
                except Timeout:
                    print(f"waiting for another run that works on {name}", file=sys.stderr)
                    lock.acquire(timeout=wait_seconds)
        except Timeout:
            waited = f" after {wait_seconds:g} s" if wait_seconds else ""
            raise Refused(
                "SB0108",
                seen=f"{folder / f'{name}.lock'} is held by another process{waited}",
                required="one run at a time",
                hint=f"fuser -v {word(str(folder / f'{name}.lock'))}",  # runs from any folder
            ) from None
        try:
            yield
        finally:
            lock.release()
