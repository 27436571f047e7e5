"""What the models on one GPU share, its mover and its ring; and weights on their way."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from ebbtide import _attach, _core
from ebbtide._offload.timing import Link
from ebbtide.vbar import QUIETLY, Device

if TYPE_CHECKING:
    from ebbtide._offload.model import Model
    from ebbtide._offload.unit import Unit

SLACK = 8 << 20  # bytes that are nobody's
GRAIN = 2 << 20  # memory comes in pieces of this size
# A unit is brought in about so many parts, so that a part of the ring is used, too. Each costs the
# host some microseconds, which small layers have not got to spare.
CHUNKS = 8
IDLE = 8  # passes of others, after which a model is one that does not run: nothing is held for it


class Station:
    """A GPU, for the models that are offloaded from it. It goes with the last of them."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Station]] = weakref.WeakValueDictionary()
    _lock = threading.Lock()

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = Device(index)
        self.mover = _core.Mover(self.device)
        self.link = Link()
        self.crowded = False  # several passes were under way at once
        self.ring = 0
        self.in_pieces = False  # which have less room for units than they have bytes
        self.given_up = 0  # bytes of rings that have given way to tensors
        self.ring_range = [(0, 0)]  # its addresses; Keep looks at it
        # For what the ring is short of: to ask PyTorch in vain costs less than to be without it.
        self.asking = _attach.Asking(most_setbacks=1)
        self.refused = 0  # a size that could not be had in this pass
        self.models: weakref.WeakSet[Model] = weakref.WeakSet()
        self.lock = threading.RLock()  # of its models: one drops what others have on their way

    @classmethod
    def of(cls, index: int) -> Station:
        with cls._lock:
            found = cls._all.get(index)
            if found is None:
                found = cls._all[index] = cls(index)
            return found

    def __del__(self, quietly: AbstractContextManager[None] = QUIETLY) -> None:
        # The last model is gone. Its host memory may still be looked at, and keeps the mover.
        with quietly:
            self.mover.set_ring(0)

    def runs_another(self, model: Model) -> bool:
        """Whether a pass of another model is under way."""
        if len(self.models) < 2:
            return False
        return any(other.running.depth for other in list(self.models) if other is not model)

    def begins(self, model: Model) -> None:
        """A pass of a model, or what would be one."""
        for other in list(self.models):
            other.share.idle += 1
        model.share.idle = 0

    def active(self) -> list[Model]:
        """The models that run, as far as is seen: not those that have not for a while, for which
        the ring need have no room. Where many take turns, a while is longer."""
        models = list(self.models)
        most = max(IDLE, 2 * len(models))
        return [m for m in models if m.share.idle < most or m.running.depth]

    def crowd(self) -> None:
        """Of several passes under way at once each has a unit in the ring."""
        self.crowded = True
        for model in list(self.models):
            model.share.whole_ring()

    def drop_loads(self) -> None:
        """What no model is using yet goes out of the ring."""
        for model in list(self.models):
            model.drop_loads()

    def see_ring(self) -> None:
        """How large it is, if it has given way in the meantime."""
        stats = self.mover.stats()
        if stats["given_up"] != self.given_up:
            self.given_up = stats["given_up"]
            self.ring = stats["ring"]
            self.in_pieces = stats["pieces"] > 1
            for model in list(self.models):
                model.share.ring_gave_way(self.ring)

    def _in_use(self) -> bool:
        models = list(self.models)
        for model in models:
            if model.resting is not None and not model.resting.depth:
                model.end_rest()
        return any(unit.load and unit.load.used for model in models for unit in model.units)

    def set_ring(self, size: int) -> bool:
        """Another size of the ring, if nothing in it is in use."""
        if self._in_use():
            return False
        self.drop_loads()
        try:
            done = self.mover.set_ring(size)
        except _core.Busy:
            done = False
        stats = self.mover.stats()
        self.ring = size if done else stats["ring"]
        self.in_pieces = stats["pieces"] > 1
        self.ring_range[0] = stats["address"], stats["end"]
        return done

    def trim(self) -> None:
        """Nothing passes through the ring if every model fits."""
        if all(model.share.fits for model in self.active()):
            self.set_ring(0)

    def fit_ring(self) -> None:
        """Between passes: a limit that was lowered, or tensors that have grown, make it smaller;
        more room makes it larger."""
        most = max((m.share.ring_size() for m in self.active()), default=0)
        self.see_ring()
        if self.ring > most:
            self.set_ring(most)
        elif 0 < self.ring < most:
            self.want_ring()
        if self.in_pieces:
            self.set_ring(self.ring)

    def want_ring(self) -> bool:
        """A ring as large as its models want it, or as there is room for beside PyTorch's tensors,
        and at least as one unit: whether it is larger now. What is in it has to come again then, so
        that is not tried without a prospect."""
        models = self.active()
        wanted = max((m.share.ring_size() for m in models), default=0)
        self.see_ring()
        if self.ring >= wanted:
            return False
        least = min(max(m.share.largest for m in models), wanted)
        room = self.room()
        size = wanted if room >= wanted else max((room - SLACK) // GRAIN * GRAIN, least)
        if size <= self.ring or size == self.refused or self._in_use():
            return False
        if self.set_ring(size) or (self.ring < least < size and self.set_ring(least)):
            return True
        self.refused = size
        return False

    def room(self) -> int:
        """Bytes of the GPU that are not for PyTorch's tensors."""
        segments = _core.attached_stats(self.index) or {"segment_bytes": 0, "before": 0}
        return max(self.device._most - segments["segment_bytes"] - segments["before"], 0)

    def portion(self, unit: Unit) -> int:
        """How much of a unit is sent for together. In parts, so that all of the ring is used, and
        what comes last does not come late; in larger ones if some of the unit is resident, for then
        the ring has room for more than two, or most others are. Many small layers leave the host no
        time for that: they come as they find room, as long as the ring has room for most of another
        one beside them."""
        missing = unit.bytes - unit.resident
        if unit.small and missing <= self.ring * 5 // 8:
            return max(missing, 1)
        few = missing < unit.bytes or unit.others_stay
        return max(unit.bytes // (CHUNKS // 2 if few else CHUNKS), 1)

    def fetch(self, unit: Unit, demand: bool = False) -> bool:
        """Send for a unit, or for what is missing: whether all of it is there, or on its way."""
        if unit.span:
            # In the ring it would be in everybody's way, for as long as it is needed.
            return not demand
        for number, ref, its in unit.shared:
            other = ref()
            if other is not None:
                unit.learn(number, other, its)
        load = unit.load
        if load is None:
            load = unit.load = _core.Load(self.portion(unit))
        model = unit.model and unit.model()
        if model is not None and model.timing.on and not (demand or self.link.known):
            whole = load.whole or model.timing.advance(load, unit)
        else:
            whole = load.whole or load.advance(self.mover, unit, demand)
        if not whole and demand and model is not None and unit.bytes - unit.resident > self.ring:
            model.share.whole_ring()  # less is resident than there was
        if not whole and demand and model is not None:
            model.share.idle = 0  # its pass began before it was seen that something has to come
        # Between passes the ring is made as large as it should be.
        if not whole and (demand or not self.ring) and self.want_ring():
            load = unit.load
            if load is None:  # it was in the ring that is gone
                load = unit.load = _core.Load(self.portion(unit))
            whole = load.advance(self.mover, unit, demand)
        if not whole and demand:
            # What others have in the ring, and do not use yet, must go.
            for model in list(self.models):
                model.drop_loads(but=unit)
            if unit.load is load:  # or that has gone, too, for a ring that was refused
                whole = load.advance(self.mover, unit, demand)
            if not whole:
                # What has come may lie where the rest finds no room beside it: all at once, then.
                unit.discard(self.mover)
                load = unit.load = _core.Load(unit.bytes)
                whole = load.advance(self.mover, unit, demand)
            if not whole and self.in_pieces and self.set_ring(self.ring):
                load = unit.load = _core.Load(unit.bytes)
                whole = load.advance(self.mover, unit, demand)
        # What is resident by now needs no keeping: it is looked for where it is.
        if not load.cargoes and not demand:
            unit.load = None
        return whole
