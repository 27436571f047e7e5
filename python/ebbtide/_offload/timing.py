"""How long units compute, and how fast the link is: by marks that the GPU passes in its own time.

A pass is measured now and then, and read when the GPU has come to its end. Nobody waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide import _core
from ebbtide._offload.pace import Need, Step, best_ring

if TYPE_CHECKING:
    from ebbtide._offload.unit import Unit

LEAST = 1 << 18  # bytes that say something of the link
PASSES = 8  # that are looked at for its sake: it is what it is
MOST = 1024  # units in use that are a pass
# Part of a pass for which the GPU waits for weights: that is worth a thought, and that is not to
# last if there is enough for it to compute.
WAITS, LATE = 0.005, 0.01


def _mark(mover: _core.Mover, own: bool = False) -> int:
    """0: it could not be set. That must not be what a pass fails for."""
    try:
        return mover.mark(own)
    except (_core.Error, MemoryError):
        return 0


class Link:
    """What the link of a GPU can do: as much as it has done at best."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes a millisecond
        self.known = False
        self._passes = 0

    def saw(self, size: int, took: float) -> None:
        """So much came in that time, or in less: it may have waited for room."""
        if took and size >= LEAST:
            self.rate = max(self.rate, size / took)

    def was_busy(self) -> None:
        """In a pass that was looked at: it had little to wait for."""
        self._passes += 1
        self.known = self._passes >= PASSES


class _Use:
    """A unit in use, in the pass that is measured."""

    __slots__ = ("arrived", "bytes", "largest", "left", "unit", "waited")

    def __init__(self, unit: Unit, waited: int) -> None:
        self.unit = unit
        self.bytes = self.largest = 0  # of what came, and of its largest piece
        self.waited = waited  # a mark; 0: none
        self.arrived = self.left = 0


class Timing:
    """Of one model's passes."""

    def __init__(self, mover: _core.Mover, link: Link) -> None:
        self.on = False  # this pass is measured
        self._mover = mover
        self._link = link
        self._uses: list[_Use] = []
        self._sent: list[tuple[int, int, int]] = []  # bytes, and the marks before and behind them
        self._last = 0  # the mark at the end of a pass that is over, and not read yet

    def begin(self) -> None:
        """A pass begins, and is measured if the one before it has been read."""
        if not self._last:
            self.forget()  # one that had no end
            self.on = True

    @property
    def pending(self) -> bool:
        """A pass is being measured, or has been and was not read yet."""
        return self.on or bool(self._last)

    def advance(self, load: _core.Load, unit: Unit) -> bool:
        """Send for more of a unit, and see how long that takes."""
        mover = self._mover
        before, begin = mover.stats()["staged"], _mark(mover, own=True)
        try:
            return load.advance(mover, unit, False)
        finally:
            self._sent.append((mover.stats()["staged"] - before, begin, _mark(mover, own=True)))

    def waits(self, unit: Unit) -> None:
        """A unit is about to be waited for."""
        if len(self._uses) >= MOST:
            self.forget()
            return
        if self._uses and not self._uses[-1].arrived:
            self._mover.unmark(self._uses.pop().waited)  # it has to be waited for once more
        self._uses.append(_Use(unit, _mark(self._mover)))

    def enters(self, unit: Unit, load: _core.Load) -> None:
        """It has arrived."""
        use = self._uses[-1]
        sizes = [g.bytes for at, g in zip(load.staged, unit.groups, strict=True) if at]
        use.bytes, use.largest = sum(sizes), max(sizes, default=0)
        use.arrived = _mark(self._mover)

    def leaves(self, unit: Unit) -> None:
        """Its last work has been queued."""
        for use in reversed(self._uses):
            if use.unit is unit and use.arrived and not use.left:
                use.left = _mark(self._mover)
                return

    def end(self) -> None:
        """The pass is over."""
        if self.on and self._uses:
            self._last = _mark(self._mover)
        self.on = False

    def forget(self) -> None:
        """What is being measured."""
        self.on = False
        uses, sent, last = self._uses, self._sent, self._last
        if not (uses or sent or last):
            return
        self._last = 0  # first: what has no end is not looked at, whatever happens in between
        self._uses, self._sent = [], []
        for use in uses:
            for mark in (use.waited, use.arrived, use.left):
                self._mover.unmark(mark)
        for _, begin, end in sent:
            self._mover.unmark(begin)
            self._mover.unmark(end)
        self._mover.unmark(last)

    def look(self, ring: int, wanted: int, most: int) -> Need | None:
        """How large the ring should be, by the pass that was measured, in which it was so large,
        and should have been so large. None: that is not known yet."""
        if not self._last:
            return None
        try:
            if self._mover.between(self._last, self._last) is None:
                return None
            steps, waited = self._read()
        except _core.Error:
            steps, waited = [], 0.0
        self.forget()
        if not any(step.bytes for step in steps):
            return None
        busy = sum(step.busy + step.after for step in steps)
        # If it is not the link that takes the time, but the GPU or the host, nothing is to be had;
        # and to reckon takes the host a millisecond or two.
        if waited <= WAITS * busy:
            return Need(wanted, False, ((wanted, busy),))
        self._link.was_busy()
        rate = self._link.rate
        if not rate:
            return None
        late = waited > LATE * busy and busy > sum(step.bytes for step in steps) / rate
        return best_ring(steps, rate, ring, most, late)

    def _read(self) -> tuple[list[Step], float]:
        """The pass that was measured, or nothing if it was not one like others; and how many
        milliseconds the GPU has waited for weights."""
        for size, begin, end in self._sent:
            if begin and end:
                self._link.saw(size, self._mover.between(begin, end) or 0.0)
        steps, waited = [], 0.0
        ends = [use.waited for use in self._uses[1:]] + [self._last]
        for use, end in zip(self._uses, ends, strict=True):
            if not (use.waited and use.arrived and use.left):
                return [], 0.0
            busy = self._mover.between(use.arrived, use.left) or 0.0
            after = self._mover.between(use.left, end) or 0.0
            steps.append(Step(use.bytes, use.largest, max(busy, 0.0), max(after, 0.0)))
            waited += self._mover.between(use.waited, use.arrived) or 0.0
        return steps, waited
