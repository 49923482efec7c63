"""`ladder.json` of a case: what each region costs and mends, as `samebits prove --ladder` saw it.

It stands beside the contract, names what it was measured with, and is STALE when any of that is no
longer so. The same numbers stand in the case's `broke.md` between two markers; what people wrote
around them is theirs. Reads and writes files only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import files, markdown
from samebits.contract import Contract
from samebits.errors import EXIT_DIFFERENT, EXIT_EQUAL, EXIT_NOT_OBSERVED, SamebitsError
from samebits.evidence import current

if TYPE_CHECKING:
    from samebits.recipe import Recipe

NAME = "ladder.json"
PAGE = "broke.md"
BLOCK = "ladder"
# Leg -> what it compares.
LEGS = {"B": "decode with prefill", "C": "trainer with prefill"}
# What a token costs, by work -> how a table calls it.
COSTS = {"decode": "decode", "prefill": "prefill", "score": "trainer score", "step": "trainer step"}


@dataclass(frozen=True)
class Leg:
    """Tokens compared and how many differ by bits; max |dlogp| in nats."""

    tokens: int
    mismatches: int
    max_abs: float

    def __str__(self) -> str:
        return f"{self.mismatches:,} of {self.tokens:,}"


@dataclass(frozen=True)
class Rung:
    """One rung: the region that it adds, what still differs, and milliseconds a token by work.

    A cost is None where the clock of a busy machine gave none.
    """

    name: str
    legs: Mapping[str, Leg]
    ms_per_token: Mapping[str, float | None]

    @property
    def mismatches(self) -> int:
        """Mismatches of both legs: only whether it is 0 says anything."""
        return sum(leg.mismatches for leg in self.legs.values())

    def counts(self) -> str:
        """One text for both legs."""
        return ", ".join(f"{name} {leg} differ" for name, leg in self.legs.items())

    def costs(self) -> str:
        """One text for all costs."""
        return (
            ", ".join(
                f"{COSTS[work]} {'-' if ms is None else f'{ms:.3g}'}"
                for work, ms in self.ms_per_token.items()
            )
            + " ms/token"
        )


@dataclass(frozen=True)
class Ladder:
    """All rungs of a case from stock up, and what they were measured with.

    depends   recipe, contract, trees and sources, as digests
    chip      what computed, in words
    command   what measures it again
    """

    case: str
    date: str
    chip: str
    command: str
    depends: Mapping[str, Any]
    rungs: Sequence[Rung]

    @property
    def exit_code(self) -> int:
        """1 when the last rung differs, 3 when stock does not, else 0."""
        if self.rungs[-1].mismatches:
            return EXIT_DIFFERENT
        return EXIT_EQUAL if self.rungs[0].mismatches else EXIT_NOT_OBSERVED

    @property
    def first_at_zero(self) -> Rung | None:
        """The rung from which on nothing differs."""
        found = None
        for rung in reversed(self.rungs):
            if rung.mismatches:
                break
            found = rung
        return found

    @property
    def silent(self) -> list[str]:
        """Legs on which stock agrees: their columns say nothing."""
        return [name for name, leg in self.rungs[0].legs.items() if not leg.mismatches]

    def summary(self) -> str:
        """One line."""
        stock, last = (
            ", ".join(f"{name} {leg}" for name, leg in rung.legs.items())
            for rung in (self.rungs[0], self.rungs[-1])
        )
        zero = self.first_at_zero
        first = "no rung at 0" if zero is None else f"first rung at 0: {zero.name}"
        return (
            f"{self.case} ladder: {len(self.rungs) - 1} rungs, stock {stock} differ, "
            f"all aligned {last}; {first}"
        )

    def ratio(self, rung: Rung, work: str) -> float | None:
        """Cost of a rung over that of stock."""
        ours, stock = rung.ms_per_token[work], self.rungs[0].ms_per_token[work]
        return None if ours is None or stock is None else ours / stock


def path_of(recipe: Recipe) -> Path:
    """Where the ladder of a case is."""
    return recipe.folder / NAME


def depends(recipe: Recipe, contract: Contract) -> dict[str, Any]:
    """What a ladder belongs to, as it is now."""
    return {
        "recipe": recipe.digest,
        "contract": contract.identity,
        "trees": current.trees(recipe),
        "sources": {s["name"]: s["content_hash"] for s in current.sources(contract)},
    }


def make(recipe: Recipe, contract: Contract, chip: str, flag: str, rungs: Sequence[Rung]) -> Ladder:
    """The ladder of what was measured just now."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = f"samebits prove {recipe.case}{flag}"
    return Ladder(recipe.case, date, chip, command, depends(recipe, contract), rungs)


def write(ladder: Ladder, path: Path) -> None:
    """Write a ladder in one piece."""
    files.write_atomic(path, (json.dumps(asdict(ladder), indent=1) + "\n").encode())


def read(recipe: Recipe) -> Ladder | None:
    """The recorded ladder of a case, None where there is none."""
    path = path_of(recipe)
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    rungs = [
        Rung(
            rung["name"],
            {name: Leg(**leg) for name, leg in rung["legs"].items()},
            rung["ms_per_token"],
        )
        for rung in data.pop("rungs")
    ]
    return Ladder(**data, rungs=rungs)


def stale(ladder: Ladder, recipe: Recipe) -> list[str]:
    """Names of what a ladder belongs to and that is no longer so; none when it speaks of this."""
    try:
        now, then = depends(recipe, Contract.of(recipe)), ladder.depends
    except SamebitsError as error:  # without a contract that fits there is nothing to speak of
        return [f"contract ({error.error_id})"]
    changed = [name for name in ("recipe", "contract") if now[name] != then[name]]
    for kind, what in (("trees", "tree/"), ("sources", "")):
        names = {*now[kind], *then[kind]}
        changed += sorted(what + n for n in names if now[kind].get(n) != then[kind].get(n))
    return changed


# --- the page -----------------------------------------------------------------------------------

COLUMNS = ("region added", *(f"{leg} differ" for leg in LEGS), "max dlogp", *COSTS.values())


def rows(ladder: Ladder) -> list[list[str]]:
    """A row for each rung, as COLUMNS; a cost in ms/token, and in brackets over that of stock."""
    found = []
    for index, rung in enumerate(ladder.rungs):
        largest = max(leg.max_abs for leg in rung.legs.values())
        name = f"`{rung.name}`" if index else f"{rung.name} (none)"
        costs = [_cost(rung.ms_per_token[work], ladder.ratio(rung, work)) for work in COSTS]
        found.append([name, *map(str, rung.legs.values()), f"{largest:.2g}", *costs])
    return found


def _cost(ms: float | None, ratio: float | None) -> str:
    return "-" if ms is None else f"{ms:.3g}" + ("" if ratio is None else f" ({ratio:.2f})")


def block(ladder: Ladder) -> str:
    """What stands between the markers of a page."""
    legs = "; ".join(f"{leg} compares {what}" for leg, what in LEGS.items())
    lines = [
        "Regions switched on one after the other, in both engines at once, from stock to all",
        f"aligned: `{ladder.command}`, {ladder.date}, {ladder.chip}.",
        f"{legs}. Tokens of which the bits differ; the largest |dlogp| of both legs;",
        "milliseconds a token, and in brackets over stock's of the same run.",
        "",
        markdown.table(COLUMNS, rows(ladder)),
        "",
        ladder.summary() + ".",
    ]
    if ladder.silent:
        lines += ["", f"Stock agrees on leg {', '.join(ladder.silent)}: its column says nothing."]
    return "\n".join(lines)


def require_page(recipe: Recipe) -> None:
    """Refuse (SB0929) a page that could not take the block."""
    page = recipe.folder / PAGE
    if page.is_file():
        markdown.replaced(page.read_text(), BLOCK, "", str(page))


def write_page(recipe: Recipe, ladder: Ladder) -> None:
    """Put the table into the case's page: between its markers, else before the first section."""
    page = recipe.folder / PAGE
    text = page.read_text() if page.is_file() else f"# {recipe.case}: what broke\n"
    body = block(ladder)
    made = markdown.replaced(text, BLOCK, body, str(page))
    if made is None:
        head, mark, sections = text.partition("\n## ")
        made = f"{head.rstrip()}\n\n{markdown.framed(BLOCK, body)}\n{mark}{sections}"
    files.write_atomic(page, made.encode())
