"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def move_aside(path: Path, why: str) -> Path:
    """Rename a file or folder to the first free `<name>.<why>-N`."""
    number = 1
    while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk, and move it into place."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".draft.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
