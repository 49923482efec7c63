"""Files in shared memory named after the process that answers for them, so that what a killed one
left behind is known and removed by the next run of the same user."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from multiprocessing import shared_memory
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROLLOUT = "samebits-rollout"


def new_name(prefix: str, pid: int | None = None) -> str:
    """A name that nothing has yet: `<prefix>-<user>-<pid>-<its start>-<random>`."""
    pid = pid or os.getpid()
    return f"{prefix}-{os.getuid()}-{pid}-{_start_time(pid)}-{secrets.token_hex(4)}"


def remove_stale(prefix: str, folders: Iterable[Path] = (SHARED_MEMORY,)) -> None:
    """Unlink files of this user whose process is gone; those of live ones and of others stay."""
    for folder in set(folders):
        for path in folder.glob(f"{prefix}-{os.getuid()}-*"):
            fields = path.name.removeprefix(prefix).split("-")
            if (
                len(fields) == 5
                and fields[2].isdigit()
                and _start_time(int(fields[2])) != fields[3]
            ):
                path.unlink(missing_ok=True)


def _start_time(pid: int) -> str:
    """Kernel start time of a process, so that a reused pid is not taken for the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


class _Owned(shared_memory.SharedMemory):
    """As the base class; a segment that is created without a name gets one of `new_name`."""

    owner: int | None = None

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0):
        if create and name is None:
            name = new_name(ROLLOUT, self.owner)
        super().__init__(name, create, size)


def own_segments() -> None:
    """Let this process, and those that it forks, create shared memory in this process's name.

    vLLM's ranks talk through such segments; its names (`psm_..`) do not say whose they are, and
    nobody removes them when all processes of an engine are killed.
    """
    _Owned.owner = os.getpid()
    shared_memory.SharedMemory = _Owned  # type: ignore[misc]
