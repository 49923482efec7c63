"""The reduction plan: how a long sum is cut into leaves and folded, whatever the layout.

A sum of length n is cut into `leaves` contiguous parts of equal length. Each leaf is one
sequential accumulation in fp32. Leaves are folded by a fixed binary tree, left = lower index:
((0+1)+(2+3))+((4+5)+(6+7)), in fp32; the root is rounded once. A rank of a group of size t owns
the t-th whole subtree, so moving leaves between ranks cannot move a rounding point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from samebits.errors import Refused

T = TypeVar("T")


@dataclass(frozen=True)
class ReductionPlan:
    """`leaves` is a power of two, the largest group size that the plan can serve."""

    leaves: int

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.leaves & (self.leaves - 1):
            raise Refused(
                "SB0401",
                seen=f"reduction plan with {self.leaves} leaves",
                required="a power of two",
                hint="samebits explain SB0401",
            )

    def cuts(self, length: int) -> list[tuple[int, int]]:
        """[start, stop) of every leaf of a sum of `length` terms."""
        if length % self.leaves:
            raise Refused(
                "SB0402",
                seen=f"a sum of {length} terms over {self.leaves} leaves",
                required=f"a length divisible by {self.leaves}",
                hint="samebits explain SB0402",
            )
        step = length // self.leaves
        return [(i * step, (i + 1) * step) for i in range(self.leaves)]

    def local(self, group_size: int) -> ReductionPlan:
        """The plan of the subtree that one rank of a group of `group_size` owns."""
        if group_size < 1 or self.leaves % group_size:
            raise Refused(
                "SB0403",
                seen=f"a group of {group_size} ranks on a plan of {self.leaves} leaves",
                required="a group size that divides the number of leaves",
                hint="samebits explain SB0403",
            )
        return ReductionPlan(self.leaves // group_size)

    @staticmethod
    def fold(parts: Sequence[T], add: Callable[[T, T], T] | None = None) -> T:
        """Fold leaves (or subtree roots, in rank order) pairwise to the root."""
        level = list(parts)
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [add(a, b) if add else a + b for a, b in pairs]  # type: ignore[operator]
        return level[0]
