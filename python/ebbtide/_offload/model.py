"""An offloaded model: its weights on the host, its units in a VBAR, and how they meet.

adopt     every weight gets its place on the host, and is parked (adopt.py)
plan      the units get their places in the VBAR, spread over the order they run in (layout.py)
enter     a unit's weights are made real: from the VBAR, where they are resident, else from the
          ring, into which the mover has copied them meanwhile (way.py, station.py)
end       what a pass has shown is learned: another order, modules that nobody calls
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ebbtide import _attach, _core
from ebbtide._offload import hooks, layout, learned, outside, recurrent, units
from ebbtide._offload.adopt import Weights
from ebbtide._offload.gates import Gate, Keep
from ebbtide._offload.graphs import Graphs
from ebbtide._offload.learned import Patience
from ebbtide._offload.memory import ordinary
from ebbtide._offload.order import Sequence_
from ebbtide._offload.parked import Parked, Piece
from ebbtide._offload.share import Share
from ebbtide._offload.station import Station
from ebbtide._offload.timing import Timing
from ebbtide._offload.unit import Binding, Unit
from ebbtide._offload.way import Way
from ebbtide.vbar import QUIETLY, VBAR

# Part of a model, that stays, above which runs of small layers do so as a whole; and how much less
# it has to be for that to be over. With a half of it in passing the link has time between them.
MOST, AGAIN = 0.45, 0.1
FINE = 2 << 30  # bytes of a model up to which it comes and goes by small pages
PREFETCH = 2  # units at most that the ring has room for
TRIES = 8  # passes after which is tried whether more can stay, where nothing tells that it can
STRANGE = 3  # passes, each in an order of its own, after which the layout is thought over


class Model(Way):
    """Everything about one offloaded model. The root's gate owns it."""

    def __init__(
        self,
        root: nn.Module,
        index: int,
        *,
        order: Sequence[str] | None = None,
        prefetch: int | None = None,
        pinned: int | None = None,
    ) -> None:
        self._root = weakref.ref(root)
        self.name = ""  # the root's
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.station = Station.of(index)
        self.mover = self.station.mover
        self.lock = self.station.lock
        self.local = threading.local()
        self.running = _core.Pass(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
        self.running.watched = True
        self.course = self.running.course = _core.Course(self.mover, self.lock)
        self.weights = Weights(self.mover, index, pinned)
        self.share = Share(prefetch or PREFETCH)
        self.timing = Timing(self.mover, self.station.link)
        self.adapts = prefetch is None  # the ring is as large as it has to be
        self.timed = False  # for that, passes are measured
        self._tracking = True
        self.learning = not order
        self.unclean = False  # something has changed: plan again
        self.coarse = False  # units are as for a model that fits
        self.runs_stay = False  # those of many small layers stay as a whole, or not at all
        self.flips = Patience(1)  # with room that comes and goes, and what should stay with it
        self.enough = math.inf, math.inf  # for which these are to; and go on to: see _enough()
        self.mixed = False  # this pass is several ones: it tells nothing of their order
        self.slow = 0  # slow entries in this pass
        self.slow_entries = self.bare_entries = 0  # in all
        self.read_outside = 0  # weights that operators have copied, in all
        self.before: object = None  # what was as it is now for so many
        self.passes = 0
        self.came = 0  # times, as the station has counted them
        self.importance = 0  # among others; the station says
        self.absence = learned.Absence()
        self.settled = False
        self.sequence: Sequence_[Unit] = Sequence_()
        self.calls: list[str] = list(order or ())  # in which order modules are called
        self.usual = frozenset(self.calls)  # the same, whatever the order
        self.called: list[str] = []  # in this pass
        self.followed = False  # that is all that was in it
        self.leaving: set[int] = set()  # weights that were told to go to the CPU
        self.strange = Patience(STRANGE)  # with passes that are not as any of those before
        self.unseen = Patience(1)  # with passes that read outside of units, and are not followed
        self.stops = learned.Stops()
        self.touched: set[int] = set()  # pieces that were read outside of their units
        self.apart: set[str] = set()  # modules that run on another stream than those before them
        self.strayed = False  # that is news
        # Modules own their gates, and these own this: so nothing here may keep a module.
        self.gates: weakref.WeakSet[Gate] = weakref.WeakSet()
        self.units: list[Unit] = []
        self.known: set[str] = set()  # names of modules, when their order was last thought over
        self.readers = outside.Readers()
        self.gives: set[str] = set()  # modules whose results were over weights' memory
        self.shown = False  # one pass has shown which those are
        self.pinned: list[str] = []
        self.vbar: VBAR | None = None
        self.graphs = Graphs()
        self.keep = Keep((0, 0), self.station.ring_range)
        self.handed: dict[int, Piece] = {}  # whose bytes state_dict() has given to somebody
        self.rootless = False  # its modules are called without it
        self.resting: Unit | None = None  # a run whose load is kept for the next of its members
        self.moved = [0, 0]  # bytes that units streamed and filled which there are no more
        # Where tensors were, as long as offload() may still fail.
        self._were = [(tensor, tensor.device) for tensor in (*root.parameters(), *root.buffers())]
        self.station.arrives(self)
        recurrent.stand_in(root)
        self.gates.add(Gate(root, self, "", root=True))
        hooks.watch()

    def undo(self) -> None:
        """offload() has failed: everything is as it was."""
        were, self._were = self._were, []
        self._give_all_back(torch.device("cpu"))
        for tensor, device in were:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)

    def leave_gpu(self) -> None:
        """Weights that were on the GPU are on the host by now, and leave nothing behind there."""
        if any(device == self.torch_device for _, device in self._were):
            _attach.empty_cache(self.index)
            self.share.peaks.clear()
            self.balance()

    def done(self) -> None:
        """offload() has not failed."""
        self._were = []

    def __del__(self, quietly: AbstractContextManager[None] = QUIETLY) -> None:
        # Whoever called parts of it, without the root, may be in a run of them.
        with quietly:
            self._leave_run()
        # Nobody will use what is on its way, and the ring cannot go before it.
        with quietly:
            self.drop_loads()
            self.timing.forget()
        with quietly:
            self.graphs.keep(self.vbar)
        with quietly:
            self.station.departs(self)

    @property
    def tracking(self) -> bool:
        """Whether every unit is entered the slow way: something has to come, or to be learned."""
        return self._tracking

    @tracking.setter
    def tracking(self, on: bool) -> None:
        self.course.stop()
        if on and self._tracking:
            return  # new gates are slow, too
        if not on:
            self.drop_loads()
        self._tracking = on
        self.watch()
        for gate in list(self.gates):
            gate.slow = on

    @property
    def root(self) -> nn.Module:
        found = self._find_root()
        if found is None:
            raise _core.Gone("the model was deleted")
        return found

    def _tops(self) -> list[tuple[str, nn.Module]]:
        """The model, or what is left of it, by the names that modules had in it."""
        root = self._find_root()
        left = self._left() if root is None else [(self.name, root)]
        if not left:
            raise _core.Gone("the model was deleted")
        return left

    def _left(self) -> list[tuple[str, nn.Module]]:
        alive = list(self.weights.names.items())
        inner = {child for module, _ in alive for child in module.children()}
        return [(name, module) for module, name in alive if module not in inner]

    def _find_root(self) -> nn.Module | None:
        """Who wraps a model may take it out again, and be deleted: then that is the model, if it is
        all that is left."""
        root = self._root()
        if root is not None:
            return root
        left = self._left()
        if len(left) != 1:
            return None
        self.name, root = left[0]
        self._root = weakref.ref(root)
        gate = root.__dict__.get("forward")
        if isinstance(gate, Gate):
            gate.root = True
        else:
            self.gates.add(Gate(root, self, self.name, root=True))
        return root

    def parts(self) -> set[nn.Module]:
        """Its modules, as they are now."""
        with contextlib.suppress(_core.Gone):
            return {module for _, top in self._tops() for module in top.modules()}
        return set()

    def let_go(self) -> None:
        """Of modules that are no part of it any more."""
        with self.lock:
            if not self.running.gates:
                self._heal()
            if self._busy():
                raise _core.Busy("the model is running")
            self.plan()

    # ---- planning --------------------------------------------------------------------------------

    @ordinary()
    def plan(self) -> None:
        """Adopt what there is now, and lay it out anew."""
        if torch.cuda.is_current_stream_capturing():
            # Copies from the host would be a part of the graph, which may outlive the model.
            raise _core.Busy("the model is not as it was: run it once before it is captured")
        tops, weights = self._tops(), self.weights
        self.by_hand()
        self.unclean = True  # until all of this has been done
        self.followed = False  # it is in the middle of a pass, or before one
        self.leaving.clear()
        self.drop_loads()
        weights.survey(tops)
        if (names := set(weights.names.values())) != self.known:
            # When those that are new are called is not known.
            self.learning = self.learning or bool(self.known)
            self.known = names
            self.strange = Patience(STRANGE)
        self.coarse = self.share.fits and not self.learning and bool(self.calls)
        choices = self._choose(tops)
        while weights.keep_tied(choices):
            choices = self._choose(tops)
        choices = [c for c in choices if not weights.is_kept(c, choices)]
        bindings = weights.adopt(choices, self)
        weights.keep_the_rest({module for choice in choices for module in choice.owners})
        self._part_with_units()
        self._lay_out(choices, bindings)
        for gate in list(self.gates):
            if gate.unit is None and not gate.root:
                gate.remove()
                self.gates.discard(gate)
        hooks.hook_state(list(weights.names))
        pieces = {id(b.piece): b.piece for b in weights.bindings}
        self.handed = {key: piece for key, piece in pieces.items() if piece.given is not None}
        self.unclean = self.strayed = False
        self.tracking = True
        self.share.largest = max((u.bytes for u in self.units if not u.span), default=0)
        self.share.forget_needs()
        self.timing.forget()
        # Where layers are many and small the host has no time for a smaller ring.
        self.timed = self.adapts and not any(u.small for u in self.units)
        self.share.given_up = 0
        self.share.small = weights.small_bytes()
        self.balance()

    def _choose(self, tops: list[tuple[str, nn.Module]]) -> list[units.Choice]:
        seen = self.readers
        return units.choose(
            tops,
            self.weights.own_bytes,
            None if self.learning or not self.calls else self.calls,
            coarse=self.coarse,
            atomic=seen.atomic,
            opened=seen.opened,
            starts=seen.starts,
            apart=self.apart,
        )

    def _part_with_units(self) -> None:
        self.by_hand()
        for gate in self.gates:
            gate.unit = None
        for unit in self.units:
            self.moved[0] += unit.streamed
            self.moved[1] += unit.filled
        self.timing.forget()
        self.units, self.sequence = [], Sequence_()

    def _lay_out(
        self, choices: list[units.Choice], bindings: dict[nn.Module, list[Binding]]
    ) -> None:
        share = self.share
        self.enough = _enough(choices)
        self.runs_stay = self._runs_should_stay()
        offsets, size, share.firm = layout.place(
            choices, bindings, self.pinned, share.fits, self.runs_stay
        )
        if not size:
            self._part_with_vbar()
            return
        made = VBAR(self.station.device, size, rise=True, fine=size if size < FINE else 0)
        if self.vbar is not None:
            made.trade(self.vbar)  # a model is as important as it was
            # Somebody may go on holding what is over the old one: nobody has to make room for that.
            self.vbar.deprioritize()
        self._part_with_vbar(made)
        self.keep = Keep((made.address, made.address + size), self.station.ring_range)
        self.units = layout.make_units(self, choices, bindings, made, offsets)
        self.settled, self.before = False, None

    def _part_with_vbar(self, made: VBAR | None = None) -> None:
        """`made`: for another one."""
        vbar, self.vbar = self.vbar, made
        self.graphs.keep(vbar)

    def _runs_should_stay(self) -> bool:
        """Whether units of many small layers, if there are any, are to stay as a whole."""
        return self.share.likely >= self.enough[self.runs_stay]

    def balance(self) -> bool:
        """How much of the GPU is for weights that stay, as far as is known by now: whether that is
        something new."""
        if self.vbar is None:
            return False
        return self.share.balance(self.station, self.vbar, self.learning)

    # ---- a pass ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The root is called."""
        with self.lock:
            calls = self.running.depth
            self.by_hand()
            if self.running.gates == 1:
                self._heal()
            if calls > 1 or self.station.runs_another(self):
                self.station.crowd()
            if calls > 1:
                return
            self._leave_run()
            self._begin()

    def end(self) -> None:
        """The root is left."""
        if self.course.running:
            self.by_hand()
        try:
            self._leave_run()
        finally:
            late = self.handed and (self.slow or self.touched)
            with self.lock:
                if self.running.depth == 1:
                    self._end()
                    self.watch()
            if late and not torch.cuda.is_current_stream_capturing():
                # Who holds what state_dict() gave may write there, and waits for nothing.
                torch.cuda.synchronize(self.torch_device)

    def watch(self) -> None:
        """Whether the next pass has something to be seen to, at its begin or at its end."""
        with self.lock:  # or what another thread has just seen would be lost
            news = self._has_news()
            self.running.watched = self.tracking or news
            if news:
                self.course.stop()

    def failed(self, out_of_memory: bool) -> None:
        """The root is left by an exception: this pass shows nothing, unless all of them end so."""
        if self.course.running:
            self.by_hand()
        if out_of_memory or self.mixed or not self.stops.is_usual(self.called):
            self.called = []
            self.followed = False
            self.sequence.begin()
        with self.lock:
            self.timing.forget()
        if out_of_memory:
            self.share.out_of_memory()
            self.tracking = True

    def _begin(self) -> None:
        for key, piece in list(self.handed.items()):
            piece.look()
            if piece.given is None:
                self.handed.pop(key, None)
        if not self.tracking and not self.unclean:
            return
        self.station.begins(self)
        if self.unclean and not self._busy():
            self.plan()
        self.called = []
        self.followed = True
        self.touched.clear()
        self.sequence.begin()
        self.mixed = False
        self.slow = 0
        self.station.refused = 0
        self._see_timing()
        self.balance()
        self._see_settled()

    def _measures(self) -> bool:
        """Whether passes are measured, now and then."""
        return self.timed and not self.station.crowded

    def _see_timing(self) -> None:
        """How large a ring the last passes took."""
        if not self._measures():
            self.timing.forget()
            return
        found = self.timing.look(self.station.ring, self.share.whole(), self.share.most())
        if found is not None:
            self.share.needs(found)
        if not self.learning and self.share.unsteady():
            self.timing.begin()

    def _see_settled(self) -> None:
        """If nothing has changed, then what did not find a place of its own will not find one now,
        and to try costs time. But others may have left the GPU."""
        now = (self.share.room, self.mover.filled)
        self.passes = self.passes + 1 if now == self.before else 0
        self.before = now
        self._settle(self.passes % TRIES != 0)

    def _settle(self, settled: bool) -> None:
        if settled != self.settled:
            self.settled = settled
            for unit in self.units:
                unit.settled = settled

    def _end(self) -> None:
        """What the pass has shown."""
        if not (self.tracking or self.touched or self.unclean or self.strayed):
            return
        if self._busy():
            return
        self.timing.end()
        failed = self.stops.end()
        new = self.balance()
        if self.called and not self.shown:
            self._see_gives()
        if self.mixed and not self.learning:
            self.sequence.begin()
            strange = False
        else:
            strange = self.tracking and self.sequence.end()
            strange = strange or not (self.learning or learned.is_known(self.called, self.usual))
        # Where all of it fits, any order is as good as another.
        restless = self.strange.is_over(strange and not self.share.fits)
        read = bool(self.touched)
        news = self._see_touched()
        unseen = read and not self.followed
        self.touched.clear()
        self.followed = False
        if news:
            pass  # the next pass is planned anew
        elif self.learning and self.called:
            self.calls = self.called
            self.usual = frozenset(self.calls)
            self.learning = False
            self.plan()
        elif not self.unclean and (self.strayed or (self.coarse and not self.share.fits)):
            self.plan()  # runs without what has strayed; or smaller units, which can come in time
        elif not self.unclean and self.flips.is_over(self._runs_should_stay() != self.runs_stay):
            self.plan()
        elif self.unclean or restless:
            self.learning = True
            self.unclean = True
        elif not self.slow:
            self.tracking = self.unseen.is_over(unseen)
        if self.slow and (new or self.passes % TRIES == 0):
            self._make_room(often=new or not self.passes)
            self.prefetch()
        if not (new or failed or news or strange or restless or read):
            self._lay_course()

    def _lay_course(self) -> None:
        """The next passes, if they are as the last ones were, need not be seen to by Python: as
        many as there are until something is looked at anyway."""
        station, share, units_ = self.station, self.share, self.sequence.steady()
        if self.vbar is None or not units_ or not self._needs_nobody(units_):
            return
        calm = min(share.calm(station.ring, self._measures()), TRIES - 1 - self.passes % TRIES)
        if calm > 0:
            portions = [0 if u.is_resident else station.portion(u) for u in units_]
            self._settle(True)
            self.course.lay(units_, portions, self.called, self.vbar, share.outlook, calm)

    def _needs_nobody(self, units_: Sequence[Unit]) -> bool:
        """Whether a pass through these units has nothing in it that only Python sees to."""
        if self._has_news() or self.learning or self.mixed or self.rootless or self.timing.pending:
            return False
        if not (self.tracking and self.slow):  # it needs no course
            return False
        if self.before != (self.share.room, self.mover.filled):
            return False  # more stays than a pass ago
        if any(u.shared for u in units_) or any(u.span for u in self.units):
            return False
        # How long others have not run is counted by pass.
        return not any(other.gates for other in self.station.models if other is not self)

    def _has_news(self) -> bool:
        """Whether Python has something to see to before the next pass, or at its end."""
        return bool(self.unclean or self.handed or self.touched or self.strayed)

    def skipped(self, passes: int) -> None:
        """So many passes have not been seen to begin, for they were just as those before."""
        self.passes += passes
        if self._measures():
            self.share.skip(passes)
        for patience in (self.strange, self.flips, self.unseen):
            patience.skip(passes)

    def _make_room(self, often: bool) -> None:
        """What PyTorch keeps and does not use may be more than the pass needed: for the ring, or
        for a unit more that stays. `often`: after every pass, or else after so many."""
        asking, short = self.station.asking, self.share.short(self.station.ring)
        if not short:
            asking.met()
        size, by = (short, asking) if short else (self.share.largest, None)
        _attach.make_room(self.index, size, often, by, times=1 if often else TRIES)

    def _see_touched(self) -> bool:
        """Weights that were read while their units were not entered: whether that is news."""
        if not self.touched:
            self.readers.nobody()
            return False
        names, room = self.weights.names, self.station.room()
        called = set(self.called) if self.followed else None
        what = self.readers.see(self.units, names, self.touched, self.learning, room, called)
        self.learning = self.learning or what == "learn"
        self.unclean = self.unclean or bool(what)
        return bool(what)

    def _see_gives(self) -> None:
        """The first pass is over. Inside of a run of many small layers there need be no gates any
        more, but before those whose results have to be looked at. Of a few they cost nothing, and
        show when one runs on another stream."""
        self.shown = True
        for gate in list(self.gates):
            if gate.enters or gate.leaves or gate.root:
                continue
            if gate.unit is not None and not gate.unit.small:
                continue
            if not self.needs_gate(gate.name, gate.__self__, gate.unit):
                if gate.unit is not None:
                    gate.unit.closes = False
                gate.remove()
                self.gates.discard(gate)

    def needs_gate(self, name: str, module: nn.Module | None, unit: Unit | None) -> bool:
        """Whether a module inside of a run has to be seen: it may be called without the model, or
        give parts of its weights away; or somebody has read weights of the run between two calls,
        and may have kept them."""
        if self.rootless or name in self.gives or module is None:
            return True
        if unit is not None and self.readers.has_read(unit):
            return True
        return not units.gives_nothing_away(module)

    def touch(self, piece: Piece) -> None:
        """An operator has read a weight that is parked."""
        if self.running.depth and not any(u.bare for u in self.units if id(piece) in u.numbers):
            self.read_outside += 1
            self.touched.add(id(piece))
            self.watch()

    # ---- what the handle asks for ----------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        with self.lock:  # or it might be seen in the middle of a plan
            seen = {id(b.piece): b.piece for b in self.weights.bindings}.values()
            pinned = self.mover.pinned
            self.station.see_ring()
            return {
                "bytes": sum(piece.nbytes for piece in seen),
                "pageable": sum(p.nbytes for p in seen if p.nbytes and pinned(p.source) is None),
                "resident": self.vbar.loaded_size if self.vbar is not None else 0,
                "units": len(self.units),
                "largest_unit": self.share.largest,
                "ring": self.station.ring,
                "streamed": self.moved[0] + sum(u.streamed for u in self.units),
                "filled": self.moved[1] + sum(u.filled for u in self.units),
                "slow_entries": self.slow_entries + self.course.entries,
                "one_by_one": self.bare_entries,
                "read_outside": self.read_outside,
            }

    def prioritize(self) -> None:
        with self.lock:
            self.station.comes_first(self, told=True)
            if self.vbar is not None:
                self.vbar.prioritize()
            self.tracking = True

    def pin(self, module: nn.Module) -> None:
        with self.lock:
            self.pinned.append(self.weights.name_of(module))
            self.dirty()

    def exclude(self, module: nn.Module) -> None:
        with self.lock:
            self.weights.excluded.add(self.weights.name_of(module))
            self.dirty()

    def graphs_gone(self) -> None:
        with self.lock:  # or it might part with its VBAR meanwhile
            if self.vbar is not None:
                self.vbar.graphs_gone()

    def restore(self, device: torch.device) -> nn.Module:
        """A plain model again."""
        if device.type == "meta":
            raise ValueError("a model is restored with its values: not to the meta device")
        root = self.root
        with self.lock:
            if not self.running.gates:
                self._heal()
            if self.running.depth or any(u.depth for u in self.units):
                raise _core.Busy("the model is running")
            self.weights.survey(self._tops())  # of modules that came without a sign, too
            self._give_all_back(device)
        return root.to(device)  # what was kept on the GPU, too

    def _give_all_back(self, device: torch.device) -> None:
        self.drop_loads()
        self.weights.give_back(device, self)
        hooks.unhook_state(list(self.weights.names))
        self._part_with_units()  # somebody may hold a gate, and must not hold all of it by that
        for gate in list(self.gates):
            gate.remove()
        self.gates.clear()
        self._part_with_vbar()
        self.station.departs(self)

    # ---- changes ---------------------------------------------------------------------------------

    def wants(self, parked: Parked) -> None:
        """Whether a weight is to have a gradient has changed."""
        with self.lock:
            for unit in self.units:
                unit.wants(parked, parked.requires_grad)

    def forget(self, piece: Piece) -> None:
        """A weight has other values now."""
        with self.lock:
            for unit in self.units:
                number = unit.numbers.get(id(piece))
                if number is not None:
                    unit.forget(number)
                    # It is filled again where it is, and that is no try.
                    unit.settled, self.before = False, None
                    if not unit.depth:
                        unit.discard(self.mover)

    def move_away(self, parked: Parked) -> None:
        """A weight is to go to the CPU. When all of them are, it is a plain model there."""
        with self.lock:
            self.leaving.add(id(parked))
            self.dirty()  # if others stay, then what was kept on the GPU must come back
            if self.leaving >= {id(b.parked) for b in self.weights.bindings}:
                self.restore(torch.device("cpu"))

    def dirty(self) -> None:
        """A weight has become another one."""
        self.unclean = True
        self.watch()
        for unit in self.units:
            unit.stale = 1


def _enough(choices: Sequence[units.Choice]) -> tuple[float, float]:
    """Bytes that stay for which runs of small layers do so as a whole; and go on doing so."""
    if not any(c.is_small for c in choices):
        return math.inf, math.inf
    size = sum(c.bytes for c in choices)
    return size * MOST, size * (MOST - AGAIN)
