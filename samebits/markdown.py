"""Tables, and generated blocks in pages that people write: what stands around a block is theirs.

A block stands between the lines `<!-- NAME: generated -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from samebits.errors import Refused

_END = "<!-- end -->"
_BLOCK = re.compile(rf"<!-- [\w-]+: generated -->\n.*?{_END}\n?", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of `rows` under `header`."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _start(name: str) -> str:
    return f"<!-- {name}: generated -->"


def framed(name: str, body: str) -> str:
    """A new block."""
    return f"{_start(name)}\n{body}\n{_END}"


def by_hand(text: str) -> str:
    """What people wrote: `text` without its blocks."""
    return _BLOCK.sub("", text)


def replaced(text: str, name: str, body: str, page: str) -> str | None:
    """`text` with `body` as its block `name`; None where it has no such block.

    page   what to call the text when its markers are not a pair: SB0929
    """
    start = _start(name)
    before, mark, rest = text.partition(f"{start}\n")
    if not mark and start not in text:
        return None
    old, end, after = rest.partition(_END)
    if not mark or not end or start in rest or "<!-- " in old:
        raise Refused(
            "SB0929",
            seen=f"{page}: {text.count(start)} x `{start}`, {text.count(_END)} x `{_END}`",
            required=f"`{start}` on a line of its own, once, and `{_END}` behind it",
            hint="samebits explain SB0929",
        )
    return f"{before}{framed(name, body)}{after}"
