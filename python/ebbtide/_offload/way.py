"""The way into a unit and out again, where C cannot go it alone: something has to come, or to be
waited for, or is to be seen.

Into it   what is missing is sent for, or has been; its real tensors go into their places; what
          comes after it is sent for
Out       what was written is saved; its place in the ring is free; what comes next is sent for
Neither   a run of small layers that are called without their model rests between two of them; and
          what an interrupted pass left behind is put right before the next
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ebbtide import _attach, _core
from ebbtide._offload import learned, units
from ebbtide._offload.adopt import Weights
from ebbtide._offload.memory import ordinary
from ebbtide._offload.order import Sequence_
from ebbtide._offload.parked import Piece
from ebbtide._offload.station import Station
from ebbtide._offload.timing import Timing
from ebbtide._offload.unit import Unit

if TYPE_CHECKING:
    from ebbtide._offload.gates import Gate


class Way:
    """What of a Model is about units that are entered and left. Everything is under its lock."""

    index: int
    torch_device: torch.device
    station: Station
    mover: _core.Mover
    lock: threading.RLock
    local: threading.local
    running: _core.Pass
    course: _core.Course
    weights: Weights
    timing: Timing
    tracking: bool
    unclean: bool
    mixed: bool
    slow: int
    slow_entries: int
    bare_entries: int
    rootless: bool
    sequence: Sequence_[Unit]
    called: list[str]
    known: set[str]
    units: list[Unit]
    resting: Unit | None
    apart: set[str]
    strayed: bool

    def plan(self) -> None:
        raise NotImplementedError

    def dirty(self) -> None:
        raise NotImplementedError

    def watch(self) -> None:
        raise NotImplementedError

    def skipped(self, passes: int) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _busy(self) -> bool:
        return any(u.depth or u.bare for u in self.units)

    # ---- by a course ----

    def by_hand(self) -> None:
        """Passes that went as the one before have gone by themselves, in C: from here on Python
        sees to them again, in the middle of one if it has come to that."""
        with self.lock:
            passes, begun = self.course.clear()
            if begun is not None:
                self.called, at, self.slow = begun
                self.followed, self.mixed = True, False
                self.sequence.resume(at)
                self.station.refused = 0
            self.skipped(passes + (begun is not None))

    # ---- into a unit -----------------------------------------------------------------------------

    def enter(self, gate: Gate) -> Unit | None:
        """Into a unit, the slow way: its weights have to come, or to be waited for."""
        with self.lock:
            if self.course.running or (self.course.left and not self.running.depth):
                self.by_hand()
            unit = gate.unit
            if unit is None and self.unclean and not self._busy():
                self.plan()  # the last one has failed
                unit = gate.unit
            if unit is None:
                return None  # another thread has just planned anew: they come one by one, this time
            self.end_rest(but=unit)
            if gate.run and self.running.run is unit and (unit.within or not self._round(gate)):
                if unit.within or not self.running.strays(unit):
                    self.called.append(gate.name)
                    return unit
                # Each stream waits for what comes for it, and is waited for: so this time the run
                # is entered once more, and from now on this one is for itself.
                self.apart.add(gate.name)
                self.strayed = True
                self.watch()
            if not unit.span:
                self._leave_run()
                if unit.run and self.running.run is not None:
                    return None  # it is called by a member of that: its weights come one by one
            before, times = unit, unit.depth + unit.bare
            try:
                return self._go_in(gate)
            except BaseException:
                # Whoever is not in will not go out.
                unit = gate.unit
                if unit is not None and unit.depth + unit.bare > (unit is before and times):
                    if self.running.run is unit:
                        self.running.run = None
                    self._leave(unit)
                raise

    def _go_in(self, gate: Gate) -> Unit | None:
        unit = gate.unit
        self.mixed = self.mixed or self.running.depth > 1
        if size := self._round(gate):
            del self.called[size:]
            self._end()
            self._begin()
        while True:
            unit = gate.unit
            if unit is not None and (unit.stale or self.unclean) and not self._busy():
                self.plan()
                unit = gate.unit
            if unit is None:
                return None  # no unit any more: its weights come one by one, this time
            # If all of it was, then what comes after it has been sent for, too.
            ready = unit.load is not None and unit.load.whole
            # Where another thread is, what is resident need not be seen to either.
            fast = not ready and (unit.enter() or (unit.load is None and unit.enter_again()))
            if fast and unit.load is not None:
                unit.discard(self.mover)  # a part had been sent for: it was about to go
            # One that turns out to be stale is planned anew first.
            if fast or self._enter(unit) or self._busy():
                break
        if not fast and unit.stale and not unit.depth:
            self._go_bare(unit)
        if gate.run:
            self.running.run = unit
        self.called.append(gate.name)
        if not unit.span:
            self.sequence.enter(unit)
        if not fast:
            if not self._tracking:
                self.tracking = True
            self.slow += 1
            self.slow_entries += 1
            if not ready:
                self.prefetch()
        return unit

    def _round(self, gate: Gate) -> int:
        """If a pass is over by now, without a call of the root: how much of it was one."""
        if self.running.depth:
            return 0
        return learned.length(self.called, gate.name, len(self.known))

    def _enter(self, unit: Unit) -> bool:
        """False: it is stale, and was not entered."""
        if unit.depth and self._enter_again(unit):
            return True
        if unit.depth and unit.outdated:
            self._go_bare(unit)  # who is in goes on with what the weights were
            return True
        for _ in range(3):
            load = unit.load
            if load is None or not load.whole or unit.shared:
                if not self.station.fetch(unit, demand=True):
                    # Anything is faster than one by one.
                    if _attach.flush(self.index, unit.bytes - self.station.room()):
                        continue
                    break
                load = unit.load
                assert load is not None
            if self.timing.on:
                self.timing.waits(unit)
            try:
                load.use(self.mover)
            except _core.Gone:  # it has given way to tensors
                unit.discard(self.mover)
                continue
            try:
                tensors = unit.at(self.mover, load)
                if self.timing.on:
                    self.timing.enters(unit, load)
                if unit.enter_with(load, tensors.reals, tensors.ahead):
                    unit.tensors = tensors
                    return True
            except BaseException:
                unit.load = None
                load.done(self.mover)
                raise
            load.done(self.mover)
            unit.load = None
            if unit.stale:
                return False
        if unit.stale:
            return False
        self.station.crowd()  # another unit may be in use meanwhile
        self._go_bare(unit)
        return True

    @ordinary()
    def _go_bare(self, unit: Unit) -> None:
        """No room for it all, or it is not what it was: its weights come one by one, as they are
        used."""
        if not unit.depth:
            unit.discard(self.mover)
        for b in unit.bindings if unit.stale else ():
            tensor = None if b.weak else b.there()
            if tensor is not None and tensor.device.type == "cpu" and units.is_plain(tensor):
                tensor.data = tensor.data.to(self.torch_device)
        # First the thread knows it: whatever happens in between, it is left by that.
        self.local.__dict__.setdefault("bare", []).append(unit)
        unit.bare += 1
        self.bare_entries += 1

    def _enter_again(self, unit: Unit) -> bool:
        """Into a unit in which another thread is, or this one: False if nobody is by now."""
        load = unit.load
        if load is None:
            return unit.enter_again()
        load.use(self.mover)
        try:
            return unit.enter_again()  # with a load, it is left with the lock held
        except BaseException:
            load.done(self.mover)
            raise

    def prefetch(self) -> None:
        """Bring what comes next, as far as the ring goes. If that fails, then it is not what the
        pass fails for: whoever needs it tries again, and is told."""
        fetch = self.station.fetch
        with contextlib.suppress(_core.Error, MemoryError):
            for unit in self.sequence.ahead():
                load = unit.load
                if load is not None:
                    if load.whole or unit.depth:
                        continue
                elif unit.depth or unit.is_resident:
                    continue
                if not fetch(unit):
                    return

    # ---- and out ---------------------------------------------------------------------------------

    def leave(self, unit: Unit) -> None:
        """Out of a unit. A run is left by its last member, or by whoever comes next."""
        if self.course.running:
            self.by_hand()
        if not unit.run:
            self._leave(unit)
        elif self.running.run is unit:
            self._leave_run()

    def _leave_run(self) -> None:
        """But not from inside of one of its members, who may have looked its weights up."""
        run = self.running.run
        if run is not None and not run.within:
            with self._where_it_came_in():
                self.running.run = None
                self._leave(run)

    def _where_it_came_in(self) -> AbstractContextManager[Any]:
        """The stream on which this thread has come into its run, by which it goes out, too: who
        comes next may be on another one."""
        stream = self.running.stream
        if stream == torch._C._cuda_getCurrentRawStream(self.index):
            return contextlib.nullcontext()
        device = self.torch_device
        default = torch.cuda.default_stream(device)
        if stream == default.cuda_stream:
            return torch.cuda.stream(default)
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))

    def _leave(self, unit: Unit, stays: bool = False) -> None:
        """`stays`: what it has in the ring does, for the next who enters it."""
        if unit in (bare := self.local.__dict__.get("bare", ())):
            with self.lock:
                bare.remove(unit)
                unit.bare = max(unit.bare - 1, 0)
            return
        if unit.load is None:
            unit.leave()
            return
        with self.lock:
            load, times = unit.load, unit.mine
            if stays and unit is not self.resting:
                load.use(self.mover)
                self.resting = unit
            try:
                if unit.depth == 1 and unit.tensors is not None and unit.tensors.written():
                    self.save_written(unit)
            finally:
                try:
                    unit.leave()  # it is left, also if it raises
                finally:
                    if not unit.depth:
                        unit.tensors = None
                        unit.load = load if unit is self.resting else None
                    if unit.mine < times:  # or Ctrl-C came first, and it is still to be left
                        load.done(self.mover)
                    if not unit.depth and self.timing.on:
                        self.timing.leaves(unit)
            if not unit.depth:
                if self.station.crowded:  # there may be no other time for it
                    self.station.want_ring()
                self.prefetch()

    def comes_to(self, piece: Piece) -> None:
        """A weight is looked at, or written, by nobody in its unit. If this thread is between two
        members of a run that has it, it comes out: what they have written is to be seen, and they
        are to see what is."""
        run = self.running.run
        if run is not None and not run.within and id(piece) in run.numbers:
            if self.course.running:
                self.by_hand()
            self._leave_run()

    def save_written(self, unit: Unit) -> None:
        """Weights that the model itself has written to: the host gets their values."""
        for b, made in unit.now():
            if self.weights.save(b, made, unit.versions):
                self.dirty()

    def drop_loads(self, but: Unit | None = None) -> None:
        """Give the ring back what is not in use."""
        self.end_rest()
        for unit in self.units:
            if unit.load is not None and not unit.depth and not unit.load.used and unit is not but:
                unit.discard(self.mover)

    # ---- neither in nor out ----------------------------------------------------------------------

    def _heal(self) -> None:
        """This thread is in nothing: what it has not left it never will. An exception that comes
        from outside, Ctrl-C, may strike anywhere in here."""
        for unit in self.local.__dict__.pop("bare", ()):
            unit.bare = max(unit.bare - 1, 0)
        self.running.run = None
        for unit in self.units:
            while unit.mine:
                self._leave(unit)
            load = unit.load
            if load is not None and not unit.depth and unit is not self.resting:
                while load.used:
                    load.done(self.mover)
                    unit.load = None

    def rest(self) -> None:
        """The outermost call of this thread has ended in a run, without a call of the model. Nobody
        is in it now, but what has come for it stays for the next of its members."""
        with self.lock:
            run = self.running.run
            if run is None:
                return
            where = self._where_it_came_in()
            self.running.run = None
            if not self.rootless:
                self.rootless = True
                self.dirty()
            with where:
                self._leave(run, stays=not run.stale)

    def end_rest(self, but: Unit | None = None) -> None:
        """Another unit comes, or the ring changes: what was kept for a run goes."""
        unit = self.resting
        if unit is None or unit is but:
            return
        self.resting = None
        load = unit.load
        if load is not None and load.used:
            load.done(self.mover)
            if not unit.depth:
                unit.load = None
