"""How large a ring it takes: no torch, no GPU, nothing but numbers.

A unit in use keeps its place in the ring, and what comes meanwhile needs one as well. So there has
to be room for what comes of a unit, and for as much as the link brings until that one is done with.
More is better used for weights that stay: those need not come at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SIZES = 16  # of a ring, that are thought of
GAIN = 0.002  # part of a pass's time that makes a difference


class Need(NamedTuple):
    """What a pass says of the ring."""

    size: int  # that would have been the best
    late: bool  # weights came late without need
    times: tuple[tuple[int, float], ...]  # sizes, and how long it takes with them

    def time(self, size: int) -> float:
        """How long it takes with a ring of about that size."""
        return min(self.times, key=lambda found: abs(found[0] - size))[1]


class Step(NamedTuple):
    """A unit, of which something came."""

    bytes: int  # that came
    largest: int  # piece of it
    busy: float  # milliseconds from its arrival to its end
    after: float  # and until the next one was waited for


def time_of(steps: Sequence[Step], rate: float, ring: float) -> float:
    """Of a pass after many, in milliseconds, if the link brings so many bytes in one, and has
    nothing to wait for but room in the ring."""
    ends: list[float] = []  # of units
    now = link = ended = 0.0  # the GPU, the link, and the GPU at the end of the pass before
    sent = goal = free = 0.0  # bytes: that came, that are to come, and that are done with
    gone = 0  # units that are
    count = len(steps)
    for number in range(2 * count):
        if number == count:
            ended = now
        step = steps[number % count]
        goal += step.bytes
        usable = max(_usable(step, ring), step.bytes)
        while sent < goal:
            until = min(goal, free + usable)
            if until > sent:
                link += (until - sent) / rate
                sent = until
            else:
                link = max(link, ends[gone])
                free += steps[gone % count].bytes
                gone += 1
        now = max(now, link) + step.busy
        ends.append(now)
        now += step.after
    return now - ended


def _usable(step: Step, ring: float) -> float:
    """A piece that does not fit before the ring's end lies at its start, and leaves that end empty:
    half of such a piece, mostly, and if there is but one, what is left beside as many as fit."""
    if step.bytes <= step.largest:
        return ring // step.largest * step.largest if step.largest else ring
    return ring - step.largest / 2


def best_ring(steps: Sequence[Step], rate: float, ring: int, most: int, late: bool = False) -> Need:
    """Which size of the ring makes a pass the shortest, if what it has less than now is had by
    weights that stay, and need not come. If several do, the largest."""
    # A unit may lie around the end of the ring, if it is of several pieces.
    least = max(step.bytes + step.largest * (step.bytes > step.largest) for step in steps)
    come = sum(step.bytes for step in steps)
    sizes = [most - most * i // SIZES for i in range(SIZES)]
    best, shortest = most, math.inf
    times = []
    for size in (*(size for size in sizes if size > least), min(least, most)):
        # So much more comes in every pass, or less: only where the link is the bound, that matters.
        took = time_of(steps, rate * come / max(come + size - ring, 1), size)
        times.append((size, took))
        if took < shortest * (1 - GAIN):
            best, shortest = size, took
    return Need(best, late, tuple(times))
