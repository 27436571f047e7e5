"""What the models on one GPU share, its mover and its ring; and weights on their way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from ebbtide import _attach, _core
from ebbtide._offload.timing import Link
from ebbtide.vbar import QUIETLY, VBAR, Device

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
        self._models: tuple[weakref.ref[Model], ...] = ()  # another one whenever one comes
        self.limit: tuple[int, int] | None = None  # that offload() has set, and the one before it
        self.newest = self.oldest = 0  # importances of models
        self.told: Callable[[], Model | None] = lambda: None  # that is first, whoever runs
        self.streamed = 0  # bytes, when a pass was last seen to begin
        self.lock = threading.RLock()  # of its models: one drops what others have on their way

    @classmethod
    def of(cls, index: int) -> Station:
        with cls._lock:
            found = cls._all.get(index)
            if found is None:
                found = cls._all[index] = cls(index)
            return found

    @classmethod
    def all(cls) -> list[Station]:
        return [found for its in cls._all.valuerefs() if (found := its()) is not None]

    @property
    def models(self) -> list[Model]:
        return [found for its in self._models if (found := its()) is not None]

    def __del__(self, quietly: AbstractContextManager[None] = QUIETLY) -> None:
        # The last model is gone. Its host memory may still be looked at, and keeps the mover.
        with quietly:
            self.mover.set_ring(0)
        with quietly:
            self.device.trim()  # the ring's memory; weights' goes with the last VBAR

    def runs_another(self, model: Model) -> bool:
        """Whether a pass of another model is under way."""
        if len(self.models) < 2:
            return False
        return any(other.running.depth for other in self.models if other is not model)

    def arrives(self, model: Model) -> None:
        with self.lock:
            for other in self.models:
                other.course.stop()
            self._models = (*(its for its in self._models if its() is not None), weakref.ref(model))
            self.comes_first(model)

    def departs(self, model: Model) -> None:
        """It is a plain model, or gone. The last one takes the limit along that offload() has set,
        unless somebody has set another one since. Finalizers call this: it takes no lock."""
        if any(other.gates for other in self.models if other is not model):
            return
        limit, self.limit = self.limit, None
        with QUIETLY:  # a lower one is set, too, if more is in use
            if limit is not None and self.device.limit == limit[0]:
                self.device.limit = limit[1]

    def limited(self, to: int, before: int) -> None:
        """offload() has set the GPU's limit. Of those before, one of its own does not come back."""
        if self.limit is not None and self.limit[0] == before:
            before = self.limit[1]
        self.limit = to, before

    def comes_first(self, model: Model, told: bool = False) -> None:
        """Of all models, from now on. `told`: and not only until others run and it does not."""
        self.newest += 1
        model.importance = self.newest
        if told:
            self.told = weakref.ref(model)

    def begins(self, model: Model) -> None:
        """A pass of a model, or what would be one, in which Python has a part. Of others' passes,
        that have none, it is seen that there were some."""
        model.share.idle = 0
        if len(self.models) < 2:
            return
        streamed = self.mover.stats()["staged"]
        since, self.streamed = streamed - self.streamed, streamed
        for other in self.models:
            came = other.running.times
            if came != other.came or other is model or other.running.depth:
                other.came, other.share.idle = came, 0
                other.absence.ends()
            else:
                other.share.idle += 1
                if other.absence.goes_on(since, _can_go(other)) and other is not self.told():
                    self.oldest -= 1
                    other.importance = self.oldest
                    other.absence.gave_way()
        self.rank()

    def rank(self) -> None:
        """The VBARs, as important as their models. Others of the program keep their places."""
        models = [m for m in self.models if m.vbar is not None]
        models.sort(key=lambda m: m.importance)
        vbars = [m.vbar for m in models if m.vbar is not None]
        ranks = [vbar.stats()["rank"] for vbar in vbars]
        for to, rank in enumerate(sorted(ranks)):
            at = ranks.index(rank)
            if at != to:
                vbars[at].trade(vbars[to])
                ranks[at], ranks[to] = ranks[to], ranks[at]

    def before(self, vbar: VBAR) -> tuple[int, int]:
        """What a model has to leave to others: bytes of the GPU that more important ones have; and
        the ring of whoever needs one."""
        if len(self.models) < 2:
            return 0, 0
        rank, held, ring = vbar.stats()["rank"], 0, 0
        for model in self.models:
            its = model.vbar
            if its is not None and its is not vbar and its.stats()["rank"] > rank:
                held += its.loaded_size
        for model in self.streaming():
            if model.vbar is not vbar:
                ring = max(ring, model.share.ring_size())
        return held, ring

    def active(self) -> list[Model]:
        """The models that run, as far as is seen: not those that have not for a while, for which
        the ring need have no room. Where many take turns, a while is longer."""
        models = self.models
        most = max(IDLE, 2 * len(models))
        return [m for m in models if m.share.idle < most or m.running.depth]

    def streaming(self) -> list[Model]:
        """Those of them that do not fit: what comes passes through the ring."""
        return [m for m in self.active() if not m.share.fits]

    def crowd(self) -> None:
        """Of several passes under way at once each has a unit in the ring."""
        self.crowded = True
        for model in self.models:
            model.course.stop()
            model.share.whole_ring()

    def drop_loads(self) -> None:
        """What no model is using yet goes out of the ring."""
        for model in self.models:
            model.drop_loads()

    def see_ring(self) -> None:
        """How large it is, if it has given way in the meantime."""
        stats = self.mover.stats()
        if stats["given_up"] != self.given_up:
            self.given_up = stats["given_up"]
            self.ring = stats["ring"]
            self.in_pieces = stats["pieces"] > 1
            for model in self.models:
                model.share.ring_gave_way(self.ring)

    def _in_use(self) -> bool:
        models = self.models
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
        if not self.streaming():
            self.set_ring(0)

    def fit_ring(self) -> None:
        """Between passes: a limit that was lowered, or tensors that have grown, make it smaller;
        more room makes it larger."""
        most = max((m.share.ring_size() for m in self.streaming()), default=0)
        self.see_ring()
        if self.ring > most > 0:
            self.set_ring(most)
        elif 0 < self.ring < most:
            self.want_ring()
        if self.in_pieces:
            self.set_ring(self.ring)

    def want_ring(self, asker: Model | None = None) -> bool:
        """A ring as large as its models want it, or as there is room for beside PyTorch's tensors,
        and at least as one unit: whether it is larger now. What is in it has to come again then, so
        that is not tried without a prospect. The one that asks may have taken itself for one that
        fits."""
        models = self.streaming()
        if asker is not None and asker not in models:
            models.append(asker)
        wanted = max((m.share.ring_size() for m in models), default=0)
        self.see_ring()
        if self.ring >= wanted:
            return False
        least = min(max((m.share.largest for m in models), default=0), wanted)
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
        if not whole and (demand or not self.ring) and self.want_ring(model):
            load = unit.load
            if load is None:  # it was in the ring that is gone
                load = unit.load = _core.Load(self.portion(unit))
            whole = load.advance(self.mover, unit, demand)
        if not whole and demand:
            # What others have in the ring, and do not use yet, must go.
            for model in self.models:
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


def _can_go(model: Model) -> int:
    """Bytes of the GPU that a model has and can do without: not what is kept for a graph."""
    return 0 if model.vbar is None else model.vbar.loaded_size - model.vbar.stats()["held"]
