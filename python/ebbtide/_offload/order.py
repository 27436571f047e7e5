"""Which unit comes next, and which are kept: no torch, no GPU, nothing but numbers.

The link must never be idle while something still has to come. Weights that stay on the GPU give it
time: while they compute, the next ones arrive. So those that stay are spread evenly over a pass,
whatever part of the model fits: every prefix of share_out()'s order is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


def spread(sizes: Sequence[int]) -> list[int]:
    """An order of the units 0, 1, ... of these sizes, which run in this order, so that every prefix
    is spread evenly over the run: the one that lies in the middle of the widest gap is next."""
    count = len(sizes)
    middles, at = [], 0
    for size in sizes:
        middles.append(at + size / 2)
        at += size
    total = max(at, 1)
    # The places 1/2, 1/4, 3/4, 1/8, ... of the run, each given to the nearest that is left.
    left = list(range(count))
    order: list[int] = []
    step = 0
    while left:
        step += 1
        target = _reversed(step) * total
        best = min(left, key=lambda unit: (abs(middles[unit] - target), unit))
        left.remove(best)
        order.append(best)
    return order


def share_out(units: Sequence[Sequence[int]], levels: int) -> list[tuple[int, int]]:
    """An order of the parts of units, (unit, part) for each, so that every prefix has about as much
    of every unit: to one of so many levels, and then on to the next. What is on the same level is
    spread."""
    rank = {unit: at for at, unit in enumerate(spread([sum(parts) for parts in units]))}
    found = []
    for unit, parts in enumerate(units):
        at, size = 0.0, max(sum(parts), 1)
        for part, bytes_ in enumerate(parts):
            level = int((at + bytes_ / 2) / size * levels)
            found.append((level, rank[unit], part, unit))
            at += bytes_
    return [(unit, part) for _, _, part, unit in sorted(found)]


def _reversed(number: int) -> float:
    """The bits of a number behind the binary point, backwards: 1/2, 1/4, 3/4, 1/8, 5/8, ..."""
    value, place = 0.0, 0.5
    while number:
        value += place * (number & 1)
        number >>= 1
        place /= 2
    return value


class Sequence_(Generic[U]):
    """The order in which units run, learned while they do."""

    def __init__(self) -> None:
        self.known: list[U] = []  # the last whole pass
        self.now: list[U] = []  # this one, so far
        self.at = -1  # where in `known` we are
        self.changes = 0  # passes that were not as the one before
        self._ahead: dict[int, tuple[U, ...]] = {}  # by place, what comes next

    def begin(self) -> None:
        """A pass begins."""
        self.now = []
        self.at = -1

    def enter(self, unit: U) -> None:
        self.now.append(unit)
        known, count = self.known, len(self.known)
        # Mostly the next one. If not, the nearest of its name behind it, or from the start.
        for ahead in range(1, count + 1):
            if known[(self.at + ahead) % count] is unit:
                self.at = (self.at + ahead) % count
                return

    def end(self) -> bool:
        """A pass is over: whether it was another one than before."""
        changed = bool(self.now) and self.now != self.known
        if changed:
            self.known = self.now
            self._ahead = {}
            self.at = len(self.known) - 1
            self.changes += 1
        self.now = []
        return changed

    def ahead(self) -> tuple[U, ...]:
        """What comes next, beyond the end of the pass too, each once."""
        found = self._ahead.get(self.at)
        if found is None:
            turned = self.known[self.at + 1 :] + self.known[: self.at + 1]
            found = self._ahead[self.at] = tuple({id(unit): unit for unit in turned}.values())
        return found
