"""`order` (one line for every patch of an upstream) and `series/<model>` (subsequences of it)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from samebits.errors import Refused, word
from samebits.files import write_atomic
from samebits.patching.header import Patch
from samebits.patching.workspace import Workspace


def read_list(path: Path) -> list[str]:
    """Names in a list file: one a line, `#` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def write_list(path: Path, names: list[str]) -> None:
    """Write a list file, keeping its leading comment lines."""
    head = []
    if path.exists():
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            head.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{line}\n" for line in [*head, *names]).encode())


@dataclass(frozen=True)
class Series:
    """The patch files of one upstream."""

    workspace: Workspace
    upstream: str

    @property
    def folder(self) -> Path:
        """Folder of the patch files."""
        return self.workspace.patches / self.upstream

    @cached_property
    def order(self) -> list[str]:
        """Names of all patches, in the order in which they apply."""
        path = self.folder / "order"
        return read_list(path) if path.is_file() else []

    @cached_property
    def models(self) -> list[str]:
        """Models that have a series, sorted."""
        folder = self.folder / "series"
        if not folder.is_dir():
            return []
        return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name[0] != ".")

    def check_name(self, model: str) -> None:
        """Refuse a model name that could not be the name of a file in `series/`."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", model):
            raise Refused(
                "SB0102",
                seen=f"model {model!r}",
                required="letters, digits, dots, hyphens and underscores",
                hint=f"ls {word(self.folder / 'series')}",
            )

    def of(self, model: str) -> list[str]:
        """Patch names of `model`, in order."""
        self.check_name(model)
        if model not in self.models:
            raise Refused(
                "SB0102",
                seen=f"model {model} has no patches/{self.upstream}/series/{model}",
                required=f"one of: {', '.join(self.models) or 'none yet'}",
                hint=f"ls {word(self.folder / 'series')}",
            )
        return read_list(self.folder / "series" / model)

    def patch(self, name: str) -> Patch:
        """A patch by file name."""
        return self.files[name]

    @cached_property
    def files(self) -> dict[str, Patch]:
        """Every patch file of the folder, by name."""
        return {path.name: Patch.read(path) for path in sorted(self.folder.glob("*.patch"))}

    def patches(self, model: str | None = None) -> list[Patch]:
        """Patches of `model` (of the whole order without one); refuses lists that do not fit."""
        problems, where = self.problems(), f"patches/{self.upstream}"
        if problems:
            raise Refused(
                "SB0110",
                seen="; ".join(problems),
                required="order, series and files that name the same patches in the same order",
                hint=f"git -C {word(self.workspace.root)} status {word(where)}",
            )
        return [self.patch(name) for name in (self.order if model is None else self.of(model))]

    def problems(self) -> list[str]:
        """What does not fit between the files, `order` and each series."""
        where = f"patches/{self.upstream}"
        files, listed = set(self.files), set(self.order)
        found = [f"{where}/{name} is in no line of order" for name in sorted(files - listed)]
        found += [f"order names {n}, which is no file" for n in self.order if n not in files]
        found += [f"order names {n} twice" for n in sorted(listed) if self.order.count(n) > 1]
        used: set[str] = set()
        for model in self.models:
            found += self._series_problems(model, listed)
            used |= set(self.of(model))
        found += [f"{n} is in no model's series" for n in self.order if n not in used]
        return found

    def _series_problems(self, model: str, listed: set[str]) -> list[str]:
        names = self.of(model)
        found = [
            f"series/{model} names {n}, which "
            + ("order does not list" if n in self.files else "is no file")
            for n in names
            if n not in listed
        ]
        found += [
            f"series/{model} names {n} twice" for n in sorted(set(names)) if names.count(n) > 1
        ]
        inside = [n for n in self.order if n in names]
        if not found and inside != names:
            found.append(f"series/{model} is not in the order of order")
        last_touch: dict[str, list[str]] = {}
        for name in self.order:
            if name not in self.files:
                continue
            for path in self.patch(name).paths:
                for earlier in last_touch.setdefault(path, []):
                    if name in names and earlier not in names:
                        found.append(
                            f"series/{model} lists {name} without {earlier}, "
                            f"which changes {path} first"
                        )
                last_touch[path].append(name)
        return found
