"""Where two engines part: the first innermost difference, and the smallest command to repeat it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from samebits.contract import canonical

_DTYPE_OF_DIGITS = {4: "bfloat16", 8: "float32", 16: "float64"}


@dataclass(frozen=True)
class Side:
    """One side of a difference: who computed (for example `engine_decode, tp1`), and the bits."""

    who: str
    bits: str

    @property
    def value(self) -> str:
        """The bits as a number, where their width says which dtype they have."""
        dtype = _DTYPE_OF_DIGITS.get(len(self.bits))
        if dtype is None:
            return "-"
        if dtype == "bfloat16":  # the upper half of a float32
            return repr(canonical.from_bits({"bits": self.bits + "0000", "dtype": "float32"}))
        return repr(canonical.from_bits({"bits": self.bits, "dtype": dtype}))


@dataclass(frozen=True)
class DifferenceReport:
    """From the leg down to one element. A field that was not reached is None.

    step       RL or decode step; sequence, position, token say which log-probability differs
    layer      decoder layer, counted from 0
    region     first region whose output differs; `element` is its index
    operands   name -> digest of what the region was given; equal on both sides, or the difference
               is further up. Constants (eps, scale) only where they differ
    agree      which tokens of the sequence have equal log-probabilities, in words
    note       why the descent ended before an element was reached
    """

    leg: str
    comparison: str
    sequence: int
    position: int
    token: int
    left: Side
    right: Side
    command: str
    step: int | None = None
    layer: int | None = None
    region: str | None = None
    element: tuple[int, ...] | None = None
    element_left: Side | None = None
    element_right: Side | None = None
    differing: int | None = None
    elements: int | None = None
    operands: dict[str, str] | None = None
    agree: str | None = None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Plain text, from the outermost place to the innermost."""
        lines = [f"first difference of leg {self.leg}, {self.comparison}"]
        if self.step is not None:
            lines.append(f"  step      {self.step}")
        lines.append(
            f"  token     sequence {self.sequence}, position {self.position}, id {self.token}"
        )
        lines += _sides("  logprob ", self.left, self.right)
        if self.agree is not None:
            lines.append(f"  agree     {self.agree}")
        if self.region is None:
            lines.append(f"  region    {self.note or 'not traced'}")
        else:
            if self.layer is not None:
                lines.append(f"  layer     {self.layer}")
            lines.append(f"  region    {self.region}")
            if self.differing is not None:
                lines.append(f"  elements  {self.differing} of {self.elements} differ")
            lines.append(f"  element   {list(self.element or ())}")
            if self.element_left is not None and self.element_right is not None:
                lines += _sides("  value   ", self.element_left, self.element_right)
            for name, digest in (self.operands or {}).items():
                lines.append(f"  operand   {name} {digest}")
        return "\n".join([*lines, "", f"repeat: {self.command}"])


def _sides(label: str, left: Side, right: Side) -> list[str]:
    width = max(len(left.who), len(right.who))
    return [f"{label}  {side.who:<{width}}  {side.bits}  {side.value}" for side in (left, right)]
