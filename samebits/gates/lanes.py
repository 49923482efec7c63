"""Stages side by side: each runs in a thread that owns a share of this process's CPUs.

Much of a stage is work of one core (an engine's start, its scheduler, torch's bf16 gradients), so
two stages on half of the CPUs each end sooner than one after the other. A GPU host has more CPUs
than two starts use (`most`). Engines inherit the CPUs of
the thread that starts them and size their thread pools by them; aligned bits depend on neither.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.casework import memory
from samebits.gates.run import clock, say, stopping
from samebits.recipe import Recipe

LANES, MANY = 2, 3
# MANY pay from so many CPUs, and fit beside an RL run whose parameters take so many bytes.
_CPUS, _SMALL = 12, 48 << 30
# Seconds without news until a line says what is running, and that an interrupted engine gets.
_QUIET, _GRACE = 30.0, 20.0


@dataclass(frozen=True)
class Task:
    """`work` runs once every task in `after` has ended; `alone` keeps all CPUs for it."""

    name: str
    work: Callable[[], Any]
    after: tuple[str, ...] = ()
    alone: bool = False


@dataclass
class _Running:
    task: Task
    cpus: frozenset[int]
    thread: threading.Thread
    started: float


def most(recipe: Recipe) -> int:
    """Stages of a case that may run side by side here."""
    if recipe.platform == "cpu" or len(os.sched_getaffinity(0)) < _CPUS:
        return LANES
    return MANY if memory.rl_bytes(recipe.config, "adam") <= _SMALL else LANES


def run(tasks: Sequence[Task], lanes: int = LANES) -> Iterator[tuple[str, Any]]:
    """(name, result) of every task as it ends; earlier tasks of `tasks` start first, and `lanes` of
    them at most run at a time.

    What a task depends on has been yielded, and its consumer has come back, before the task starts.
    The first failure is raised here once the engines of all other running tasks have ended; so is
    whatever stops the consumer.
    """
    cpus = frozenset(os.sched_getaffinity(0))
    waiting, ended = list(tasks), set[str]()
    news: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()
    running: dict[str, _Running] = {}
    try:
        while waiting or running:
            while started := _next(waiting, ended, running, cpus, lanes):
                task, share = started
                waiting.remove(task)
                thread = threading.Thread(target=_work, args=(task, share, news), daemon=True)
                running[task.name] = _Running(task, share, thread, time.monotonic())
                thread.start()
            try:
                name, result, error = news.get(timeout=_QUIET)
            except queue.Empty:
                say(f"still running: {_describe(running)}")
                continue
            running.pop(name).thread.join()
            if error is not None:
                raise error
            ended.add(name)
            yield name, result
    finally:
        stopping.set()
        try:
            _stop(running)
        finally:
            stopping.clear()


def _next(
    waiting: Sequence[Task],
    ended: set[str],
    running: dict[str, _Running],
    cpus: frozenset[int],
    lanes: int,
) -> tuple[Task, frozenset[int]] | None:
    """The task that starts now, with its CPUs; None when none may. The only one gets them all, and
    one that wants to be alone waits for others unless it is the first of all."""
    ready = [task for task in waiting if ended.issuperset(task.after)]
    beside = [task for task in ready if not task.alone]
    if ready and not running and ready[0] is waiting[0] and waiting[0].alone:
        return ready[0], cpus
    if ready and not running and len(beside) < 2:
        return (beside or ready)[0], cpus
    free = sorted(cpus.difference(*(r.cpus for r in running.values())))
    if not beside or not free or len(running) == lanes:
        return None
    return beside[0], frozenset(free[: max(1, len(cpus) // lanes)])


def _work(task: Task, cpus: frozenset[int], news: queue.SimpleQueue) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread, and of every process that it starts
    try:
        result = task.work()
    except BaseException as error:
        news.put((task.name, None, error))
    else:
        news.put((task.name, result, None))


def _describe(running: dict[str, _Running]) -> str:
    now = time.monotonic()
    return ", ".join(f"{name} for {clock(now - r.started)}" for name, r in running.items())


def _stop(running: dict[str, _Running]) -> None:
    """Interrupt the engines of unfinished tasks, as Ctrl-C would, and wait for their threads.

    A thread waits in a read from its engine; when the processes at the other end are gone, the
    stage closes what it opened. A process whose engine has gone is ended at once.
    """
    threads = [r.thread for r in running.values()]
    engines: dict[int, set[int]] = {}
    begun = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        waited = time.monotonic() - begun
        if waited > 2 * _GRACE:
            return
        present = {pid for thread in threads for pid in _children(thread.native_id)}
        for engine in present:
            engines.setdefault(engine, set()).update(_descendants(engine))
            _signal(engine, signal.SIGINT if waited < _GRACE else signal.SIGKILL)
        for engine in engines.keys() - present:
            for orphan in engines.pop(engine):
                _signal(orphan, signal.SIGKILL)
        for thread in threads:
            thread.join(0.5)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(thread_id: int | None, process: int | str = "self") -> list[int]:
    """Ids of the processes that a thread started and that still run."""
    try:
        found = Path(f"/proc/{process}/task/{thread_id}/children").read_text()
    except OSError:  # the thread has ended
        return []
    return [int(pid) for pid in found.split() if _runs(pid)]


def _runs(pid: str) -> bool:
    """False too for a process that has ended and that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(process: int) -> set[int]:
    found: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:  # the process has ended
        return found
    for thread in threads:
        for child in _children(int(thread), process):
            found |= {child} | _descendants(child)
    return found
