"""Which unit comes next, and which are kept: no torch, no GPU, nothing but numbers.

The link must never be idle while something still has to come. Weights that stay on the GPU give it
time: while they compute, the next ones arrive. So those that stay are spread evenly over a pass,
whatever part of the model fits: every prefix of share_out()'s order is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)

FEW = 8  # different orders that are remembered


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


class _Order(Generic[U]):
    """A pass, as it went."""

    __slots__ = ("units",)

    def __init__(self, units: list[U]) -> None:
        self.units = units


class Sequence_(Generic[U]):
    """The order in which units run, learned while they do. There may be several, by turns: of
    layers some are left out every other time, of experts others are asked."""

    def __init__(self) -> None:
        self.now: list[U] = []  # this pass, so far
        self.at = -1  # where we are in the one that it is likely to be
        self.changes = 0  # passes that were not as the one before
        self._orders: list[_Order[U]] = []  # the last few that were different, the latest at last
        self._before = self._last = self._likely = _Order[U]([])
        # By two that came one after the other, what came then.
        self._then: dict[tuple[_Order[U], _Order[U]], _Order[U]] = {}
        # By what this pass and the next are likely to be, and by place, what comes next.
        self._ahead: dict[tuple[_Order[U], _Order[U], int], tuple[U, ...]] = {}

    def begin(self) -> None:
        """A pass begins."""
        self.now = []
        self.at = -1

    def enter(self, unit: U) -> None:
        self.now.append(unit)
        known, count = self._likely.units, len(self._likely.units)
        if count and known[(self.at + 1) % count] is unit:
            self.at = (self.at + 1) % count
            return
        # It may be another one that has been. If not, then it is the nearest of its name behind
        # where we are, or from the start.
        so_far = len(self.now)
        for order in reversed(self._orders):
            if order.units[so_far - 1 : so_far] == [unit] and order.units[:so_far] == self.now:
                self._likely, self.at = order, so_far - 1
                return
        for ahead in range(2, count + 1):
            if known[(self.at + ahead) % count] is unit:
                self.at = (self.at + ahead) % count
                return

    def end(self) -> bool:
        """A pass is over: whether it was another one than the last few, if there have been any."""
        now = self.now
        self.begin()
        if not now:
            return False
        found = next((order for order in self._orders if order.units == now), None)
        strange = found is None and bool(self._orders)
        order = found or _Order(now)
        self.changes += order is not self._last
        self._remember(order)
        self._before, self._last = self._last, order
        self._likely = self._after(self._before, order)
        return strange

    def _remember(self, order: _Order[U]) -> None:
        self._then[self._before, self._last] = order
        if order in self._orders:
            self._orders.remove(order)
        self._orders.append(order)
        if len(self._orders) > FEW:
            gone = self._orders.pop(0)
            self._then = {two: then for two, then in self._then.items() if gone not in (*two, then)}
            self._ahead = {}

    def _after(self, before: _Order[U], last: _Order[U]) -> _Order[U]:
        """What comes after two: what came after them the last time, or the same again."""
        return self._then.get((before, last), last)

    def steady(self) -> list[U]:
        """The order that the last passes went in, if the next one is likely to, and the one after
        it; else none."""
        likely = self._likely
        same = self._before is self._last is likely
        return likely.units if same and self._after(likely, likely) is likely else []

    def resume(self, at: int) -> None:
        """As if a pass had begun and come to so many units, that were the likely ones."""
        self.now, self.at = self._likely.units[:at], at - 1

    def ahead(self) -> tuple[U, ...]:
        """What comes next, beyond the end of the pass too, each once."""
        likely = self._likely
        then = self._after(self._last, likely)
        found = self._ahead.get((likely, then, self.at))
        if found is None:
            turned = likely.units[self.at + 1 :] + then.units
            found = tuple({id(unit): unit for unit in turned}.values())
            self._ahead[likely, then, self.at] = found
        return found
