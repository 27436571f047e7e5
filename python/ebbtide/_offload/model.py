"""An offloaded model: its weights on the host, its units in a VBAR, and how they meet.

adopt     every weight gets its place on the host, and is parked (parked.py)
plan      the units get their places in the VBAR, spread over the order they run in (order.py)
enter     a unit's weights are made real: from the VBAR, where they are resident, else from the
          ring, into which the mover has copied them meanwhile
end       what a pass has shown is learned: another order, modules that nobody calls
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from ebbtide import _attach, _core
from ebbtide._offload import host, units
from ebbtide._offload.gates import Gate, Keep
from ebbtide._offload.order import Sequence_, spread
from ebbtide._offload.parked import Parked, Piece, host_of, park
from ebbtide._offload.station import GRAIN, SLACK, Load, Station, chunks
from ebbtide.vbar import VBAR

# Buffers up to this size stay on the GPU: they are written more often than not.
KEPT_BUFFER = 256 << 10
KEPT_SPAN = 32 << 20  # so do weights of modules that hold units, up to this size
LOOK_UP = 16  # an embedding is kept before others if it is no more than this part of the model
SPREAD = 4  # parts of a unit of which some stay and some do not
PEAKS = 16  # how long tensors' needs are remembered: two for a pass
STRANGE = 3  # passes in another order, each time, after which the layout is thought over
VIEWS = 6  # places in the ring for which a weight's tensors are kept


class Binding:
    """A place in a module that holds a weight."""

    __slots__ = ("key", "module", "name", "parked", "piece", "place")

    def __init__(self, module: nn.Module, place: Any, key: Any, name: str, parked: Parked) -> None:
        self.module = weakref.ref(module)
        self.place = place  # the dict or list
        self.key = key
        self.name = name
        self.parked = parked
        self.piece = parked._piece


class Unit(_core.Unit):
    """A unit with its names."""

    def __init__(
        self, choice: units.Choice, vbar: VBAR, bindings: list[Binding], offsets: dict[int, int]
    ) -> None:
        pieces = {id(b.piece): b.piece for b in bindings}
        ordered = sorted(pieces.values(), key=lambda p: offsets[id(p)])
        numbers = {id(p): i for i, p in enumerate(ordered)}
        low = offsets[id(ordered[0])]
        high = offsets[id(ordered[-1])] + ordered[-1].nbytes
        # All its tensors are views of one: whoever writes to one of them changes its version.
        base = over(vbar, vbar.address + low, high - low)
        swaps = []
        for b in bindings:
            at = offsets[id(b.piece)] - low
            made = real(b.parked, base[at : at + b.piece.nbytes])
            swaps.append((b.place, b.key, b.parked, made, numbers[id(b.piece)]))
        places = [(offsets[id(p)], p.nbytes, p.host.data_ptr()) for p in ordered]
        super().__init__(vbar, places, swaps)
        self.base, self.version = base, base._version
        self.model: weakref.ref[Model] | None = None
        self.name = choice.name
        self.span = choice.span
        self.run = len(choice.members) > 1
        self.bytes = sum(p.nbytes for p in ordered)
        self.pieces = ordered
        self.chunks = chunks([p.nbytes for p in ordered])
        self.numbers = numbers
        self.bindings = bindings
        self.load: Load | None = None
        self.shared: list[tuple[int, weakref.ref[Unit], int]] = []  # what others have, too
        self.bare = 0  # entered without its weights: they come one by one
        self.views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.wants_grad = any(b.parked.requires_grad for b in bindings)

    def _written(self) -> None:
        """Called on the way out, before its tensors are parked: one of them was written to."""
        self.version = self.base._version
        model = self.model and self.model()
        if model is not None:
            model.save_written(self)


def _pieces(choice: units.Choice, bindings: dict[nn.Module, list[Binding]]) -> list[Piece]:
    """A unit's, each once."""
    found = {id(b.piece): b.piece for module in choice.owners for b in bindings[module]}
    return list(found.values())


def over(owner: Any, address: int, size: int) -> torch.Tensor:
    """Bytes at an address on the GPU."""
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(owner._dlpack(address, size))


def real(parked: Parked, flat: torch.Tensor) -> torch.Tensor:
    """The tensor that stands for a parked one, over these bytes."""
    with torch.inference_mode(False):
        item = parked.dtype.itemsize
        whole = flat[: flat.numel() // item * item].view(parked.dtype)
        offset = whole.storage_offset() + parked.storage_offset()
        made = whole.as_strided(parked.size(), parked.stride(), offset).detach()
        if parked._is_param:
            made = nn.Parameter(made, requires_grad=False)
        made._ebbtide_version = made._version
        for name, value in parked.__dict__.items():
            if name not in ("_piece", "_is_param"):
                setattr(made, name, value)
        return made


class Model:
    """Everything about one offloaded model. The root's gate owns it."""

    def __init__(
        self,
        root: nn.Module,
        index: int,
        *,
        order: Sequence[str] | None = None,
        prefetch: int = 2,
        pinned: int | None = None,
    ) -> None:
        self._root = weakref.ref(root)
        self.slots = prefetch
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.station = Station.of(index)
        self.mover = self.station.mover
        self.arena = host.Arena(self.mover, index, pinned)
        self.lock = self.station.lock
        self.local = threading.local()
        self._tracking = True
        self.learning = True
        self.unclean = False  # something has changed: plan again
        self.depth = 0  # root calls under way
        self.slow = 0  # slow entries in this pass
        self.slow_entries = self.bare_entries = 0  # in all
        self.sequence: Sequence_[Unit] = Sequence_()
        self.calls: list[str] = list(order or ())  # in which order modules are called
        self.called: list[str] = []  # in this pass
        self.leaving: set[int] = set()  # weights that were told to go to the CPU
        self.strange = 0  # passes in a row that were not as the one before
        self.touched: set[int] = set()  # pieces that were read outside of their units
        # Modules own their gates, and these own this: so nothing here may keep a module.
        self.gates: weakref.WeakSet[Gate] = weakref.WeakSet()
        self.units: list[Unit] = []
        self.bindings: list[Binding] = []
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.atomic: frozenset[str] = frozenset()
        self.excluded: set[str] = set()
        self.pinned: list[str] = []
        self.vbar: VBAR | None = None
        self.keep = Keep([])
        self.warned = False
        self.handed: list[Piece] = []  # whose bytes have been given out by state_dict()
        self.staying = WeakTensorKeyDictionary()  # buffers that were seen to be written
        self.largest = 0
        self.peaks: deque[int] = deque(maxlen=PEAKS)  # what tensors held, pass by pass
        self.firm = 0  # bytes that are to stay whatever happens
        self.given_up = 0  # pages that made room for tensors
        self.fits = False
        self.station.models.add(self)
        self.gates.add(Gate(root, self, "", root=True))
        _watch()
        self.plan()

    def __del__(self) -> None:
        # Nobody will use what is on its way, and the ring cannot go before it.
        with contextlib.suppress(AttributeError, _core.Error):
            self.drop_loads()

    @property
    def tracking(self) -> bool:
        """Whether every unit is entered the slow way: something has to come, or to be learned."""
        return self._tracking

    @tracking.setter
    def tracking(self, on: bool) -> None:
        if not on:
            self.drop_loads()
        self._tracking = on
        for gate in list(self.gates):
            gate.slow = on

    @property
    def root(self) -> nn.Module:
        found = self._root()
        if found is None:
            raise _core.Gone("the model was deleted")
        return found

    # ---- adopting: every weight its place on the host -------------------------------------------

    def _places(self, module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor, bool]]:
        """Where a module holds tensors: parameters, buffers, and lists of the same ones."""
        for place, buffer in ((module._parameters, False), (module._buffers, True)):
            for key, tensor in place.items():
                if tensor is not None:
                    yield place, key, tensor, buffer

    def _pageable(self, tensor: torch.Tensor, buffer: bool) -> bool:
        if isinstance(tensor, Parked):
            return True
        if buffer and (tensor.nbytes <= KEPT_BUFFER or tensor in self.staying):
            return False
        return units.is_plain(tensor)

    def _excluded(self, name: str) -> bool:
        return any(name == e or name.startswith(f"{e}.") or not e for e in self.excluded)

    def _own_bytes(self, module: nn.Module) -> int:
        if self._excluded(self.names[module]):
            return 0
        return sum(
            t.nbytes if not isinstance(t, Parked) else t.numel() * t.dtype.itemsize
            for _, _, t, buffer in self._places(module)
            if self._pageable(t, buffer)
        )

    def _keep(self, place: Any, key: Any, tensor: torch.Tensor, name: str) -> None:
        """A tensor that does not page is on the GPU, once and for all."""
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no values (it is on the meta device): load them first")
        if isinstance(tensor, Parked):
            with torch.no_grad():
                plain = torch.empty_like(host_of(tensor), device=self.torch_device)
                plain.copy_(host_of(tensor))
            if tensor._is_param:
                plain = nn.Parameter(plain, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, plain)
            return
        if tensor.device == self.torch_device:
            return
        if units.is_plain(tensor) or tensor.numel() == 0:
            tensor.data = tensor.data.to(self.torch_device)
            return
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{name} is a {type(tensor).__name__}, which Ebbtide cannot page: such weights "
                "stay on the GPU",
                stacklevel=4,
            )
        moved = tensor.to(self.torch_device)
        if isinstance(tensor, nn.Parameter) and not isinstance(moved, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        place[key] = moved

    def adopt(self, choices: list[units.Choice]) -> dict[nn.Module, list[Binding]]:
        """Park every weight. By module, its bindings."""
        extents = self._extents()
        done: dict[int, tuple[Piece, int]] = {}  # by storage: its piece, and where that begins
        found: dict[nn.Module, list[Binding]] = {}
        parked_by: dict[int, Parked] = {}
        for choice in choices:
            self.arena.reserve(self._sizes(choice, extents, done))
            for module in choice.owners:
                name = self.names[module]
                bindings = found[module] = []
                for place, key, tensor, buffer in list(self._places(module)):
                    full = f"{name}.{key}" if name else key
                    if not self._pageable(tensor, buffer):
                        continue
                    parked = parked_by.get(id(tensor))
                    if parked is None:
                        parked = self._park(tensor, extents, done, full)
                        parked_by[id(parked)] = parked
                    if place[key] is not parked:
                        place[key] = parked
                    parked._piece.model = weakref.ref(self)
                    bindings.append(Binding(module, place, key, full, parked))
                bindings += self._in_lists(module, bindings)
        return found

    def _in_lists(self, module: nn.Module, bindings: list[Binding]) -> list[Binding]:
        """Lists of a module that hold its weights too (nn.LSTM's flat weights)."""
        more = []
        by_id = {id(b.parked): b for b in bindings}
        for name, value in module.__dict__.items():
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Parked) and id(item) in by_id:
                        more.append(Binding(module, value, i, f"{name}[{i}]", item))
        return more

    def _extents(self) -> dict[int, tuple[int, int]]:
        """By storage, the bytes of it that weights use."""
        extents: dict[int, tuple[int, int]] = {}
        for module in list(self.names):
            for _, _, tensor, buffer in self._places(module):
                if isinstance(tensor, Parked) or not self._pageable(tensor, buffer):
                    continue
                key = tensor.untyped_storage().data_ptr()
                size = tensor.dtype.itemsize
                first = tensor.storage_offset()
                reach = sum(
                    (n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)
                )
                low, high = first * size // 64 * 64, (first + reach + 1) * size
                old = extents.get(key, (low, high))
                extents[key] = (min(old[0], low), max(old[1], high))
        return extents

    def _sizes(
        self,
        choice: units.Choice,
        extents: dict[int, tuple[int, int]],
        done: dict[int, tuple[Piece, int]],
    ) -> list[int]:
        keys: dict[int, int] = {}
        for module in choice.owners:
            for _, _, tensor, buffer in self._places(module):
                if isinstance(tensor, Parked) or not self._pageable(tensor, buffer):
                    continue
                key = tensor.untyped_storage().data_ptr()
                if key not in done:
                    keys[key] = extents[key][1] - extents[key][0]
        return list(keys.values())

    def _park(
        self,
        tensor: torch.Tensor,
        extents: dict[int, tuple[int, int]],
        done: dict[int, tuple[Piece, int]],
        name: str,
    ) -> Parked:
        if isinstance(tensor, Parked):
            return tensor
        key = tensor.untyped_storage().data_ptr()
        if key not in done:
            done[key] = self._piece(tensor, *extents[key])
        piece, start = done[key]
        offset = tensor.storage_offset() - start // tensor.dtype.itemsize
        parameter = isinstance(tensor, nn.Parameter)
        parked = park(
            piece,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            offset,
            parameter=parameter,
            requires_grad=tensor.requires_grad,
        )
        parked.__dict__.update(tensor.__dict__)
        try:
            # Whoever holds the parameter holds the parked one from now on.
            torch.utils.swap_tensors(tensor, parked)
        except RuntimeError:
            return parked
        return tensor

    def _piece(self, tensor: torch.Tensor, low: int, high: int) -> tuple[Piece, int]:
        kept = host.borrowed(tensor, self.mover, self.index)
        if kept is not None:
            piece = Piece(kept[0], self.torch_device)
            if kept[1] is not None:
                piece.borrowed = True
                weakref.finalize(piece, kept[1]).atexit = False
            return piece, 0
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), low, (high - low,), (1,))
        place = self.arena.take(high - low)
        with torch.no_grad():
            place.copy_(flat)
        return Piece(place, self.torch_device), low

    # ---- planning: every unit its place in the VBAR ---------------------------------------------

    def plan(self) -> None:
        """Adopt what there is now, and lay it out anew."""
        root = self.root
        self.leaving.clear()
        self.drop_loads()
        self.names.clear()
        self.names.update({module: name for name, module in root.named_modules()})
        calls = None if self.learning or not self.calls else self.calls
        choices = units.choose(root, self._own_bytes, self.atomic, calls)
        choices = [c for c in choices if not self._is_kept(c, choices)]
        bindings = self.adopt(choices)
        self._keep_the_rest({module for choice in choices for module in choice.owners})
        self.bindings = [b for found in bindings.values() for b in found]
        for gate in self.gates:
            gate.unit = None
        self.units = []
        self._lay_out(choices, bindings)
        for gate in list(self.gates):
            if gate.unit is None and not gate.root:
                gate.remove()
                self.gates.discard(gate)
        self._hook_state()
        self.unclean = False
        self.tracking = True
        self.sequence = Sequence_()
        self.largest = max((u.bytes for u in self.units if not u.span), default=0)
        self.given_up = 0
        self.balance()

    def _is_kept(self, choice: units.Choice, choices: list[units.Choice]) -> bool:
        """A few weights that a module needs all the time it runs, beside the units in it."""
        if not choice.span or choice.bytes > KEPT_SPAN:
            return False
        (module,) = choice.owners
        own = {id(t) for _, _, t, _ in self._places(module)}
        others = [m for c in choices if c is not choice for m in c.owners]
        return not any(id(t) in own for m in others for _, _, t, _ in self._places(m))

    def _keep_the_rest(self, owners: set[nn.Module]) -> None:
        for module, name in list(self.names.items()):
            for place, key, tensor, buffer in list(self._places(module)):
                kept = module not in owners
                if kept or not self._pageable(tensor, buffer) or self._excluded(name):
                    self._keep(place, key, tensor, f"{name}.{key}" if name else key)

    def _lay_out(
        self, choices: list[units.Choice], bindings: dict[nn.Module, list[Binding]]
    ) -> None:
        # What is to stay, what is needed all the time, and what nothing is computed with, so that
        # the link would have no time to bring it; then the rest, spread.
        firm = [c for c in choices if self._is_pinned(c)]
        spans = [c for c in choices if c.span and c not in firm]
        most = sum(c.bytes for c in choices) // LOOK_UP
        looked_up = [
            c
            for c in choices
            if all(isinstance(m, nn.Embedding) for m in c.members)
            and c.bytes <= most
            and c not in firm
            and not c.span
        ]
        rest = [c for c in choices if c not in (*firm, *spans, *looked_up)]
        groups = [_pieces(c, bindings) for c in firm + spans + looked_up]
        parts = [part for c in rest for part in self._parts(c, _pieces(c, bindings))]
        groups += [parts[i] for i in spread([sum(p.nbytes for p in part) for part in parts])]
        offsets: dict[int, int] = {}
        at = self.firm = 0
        for number, group in enumerate(groups):
            for piece in group:
                if id(piece) not in offsets:
                    offsets[id(piece)] = at
                    at += host._up(piece.nbytes)
            if number < len(firm):
                self.firm = at
        if not at:
            self.vbar = None
            return
        self.vbar = VBAR(self.station.device, at, rise=True)
        self.keep = Keep([(self.vbar.address, self.vbar.address + at)])
        by_choice = {}
        for choice in choices:
            held = [b for module in choice.owners for b in bindings[module]]
            unit = by_choice[id(choice)] = Unit(choice, self.vbar, held, offsets)
            unit.model = weakref.ref(self)
            self.units.append(unit)
        for choice in choices:
            self._put_gates(choice, by_choice[id(choice)])
        self._find_shared()

    def _find_shared(self) -> None:
        """Tied weights: pieces of several units."""
        having: dict[int, list[Unit]] = {}
        for unit in self.units:
            for piece in unit.numbers:
                having.setdefault(piece, []).append(unit)
        for piece, several in having.items():
            for unit in several:
                unit.shared += [
                    (unit.numbers[piece], weakref.ref(other), other.numbers[piece])
                    for other in several
                    if other is not unit
                ]

    def _parts(self, choice: units.Choice, pieces: list[Piece]) -> list[list[Piece]]:
        """What of a unit stays together. If a part of every unit stays, rather than every so many
        units, the others come evenly, and more of them are in the ring; but to go into a unit that
        is resident in one piece is cheaper, and a run of small layers is better off whole."""
        if self.fits or len(choice.members) > 1:
            return [pieces]
        target = sum(p.nbytes for p in pieces) // SPREAD
        parts: list[list[Piece]] = [[]]
        for piece in pieces:
            if sum(p.nbytes for p in parts[-1]) >= target:
                parts.append([])
            parts[-1].append(piece)
        return parts

    def _is_pinned(self, choice: units.Choice) -> bool:
        return any(
            name == p or name.startswith(f"{p}.") for name in choice.names for p in self.pinned
        )

    def _put_gates(self, choice: units.Choice, unit: Unit) -> None:
        last = len(choice.members) - 1
        for i, module in enumerate(choice.members):
            if not self.learning and 0 < i < last:
                continue
            gate = module.__dict__.get("forward")
            if not isinstance(gate, Gate):
                gate = Gate(module, self, choice.names[i])
                self.gates.add(gate)
            gate.unit = unit
            gate.run = last > 0
            gate.enters = self.learning or i == 0
            gate.leaves = i == last
            gate.slow = True

    def _hook_state(self) -> None:
        for module in list(self.names):
            if not any(getattr(h, "ebbtide", False) for h in module._state_dict_hooks.values()):
                module._register_state_dict_hook(_real_values)

    # ---- running --------------------------------------------------------------------------------

    def begin(self) -> None:
        """The root is called."""
        with self.lock:
            self.depth += 1
            if self.depth == 1:
                self._leave_run()
                self._begin()

    def end(self) -> None:
        """The root is left."""
        self._leave_run()
        with self.lock:
            self.depth -= 1
            if not self.depth:
                self._end()

    def _begin(self) -> None:
        for piece in self.handed:
            piece.look()
        if not self.tracking and not self.unclean:
            return
        if self.unclean and not self._busy():
            self.plan()
        self.called = []
        self.touched.clear()
        self.sequence.begin()
        self.slow = 0
        self.station.refused = 0
        self.balance()

    def _end(self) -> None:
        """What the pass has shown."""
        if not self.tracking and not self.touched and not self.unclean:
            return
        if self._busy():
            return
        self.balance()
        changed = self.tracking and self.sequence.end()
        self.strange = self.strange + 1 if changed else 0
        if self.touched:
            self._see_touched()
        if self.learning and self.called:
            self.calls = self.called
            self.learning = False
            self.plan()
        elif self.unclean or self.strange >= STRANGE:
            self.strange = 0
            self.learning = True
            self.unclean = True
        elif not self.slow:
            self.tracking = False
        if self.slow:
            # What PyTorch keeps and does not use may be more than this pass needed.
            _attach.make_room(self.index, self.largest)
            self.prefetch()

    def _busy(self) -> bool:
        return any(u.depth or u.bare for u in self.units)

    def _see_touched(self) -> None:
        """Weights that were read while their units were not entered: whoever reads them is above
        them."""
        found = set()
        by_name = {name: module for module, name in self.names.items()}
        for b in self.bindings:
            module = b.module()
            if id(b.piece) in self.touched and module is not None:
                name = self.names.get(module, "").rpartition(".")[0]
                while name and isinstance(by_name.get(name), units.NEVER_CALLED):
                    name = name.rpartition(".")[0]
                found.add(name)
        new = frozenset(name for name in found if name and name not in self.atomic)
        if new:
            self.atomic |= new
            self.learning = self.unclean = True

    def touch(self, piece: Piece) -> None:
        """An operator has read a weight that is parked."""
        if self.depth and not any(u.bare for u in self.units if id(piece) in u.numbers):
            self.touched.add(id(piece))

    def enter(self, gate: Gate) -> Unit | None:
        """Into a unit, the slow way: its weights have to come, or to be waited for."""
        with self.lock:
            unit = gate.unit
            assert unit is not None
            if gate.run and getattr(self.local, "run", None) is unit:
                self.called.append(gate.name)
                return unit
            if not unit.span:
                self._leave_run()
            # Without a call of the root, a pass is over when it begins again.
            if not self.depth and self.sequence.now and unit is self.sequence.now[0]:
                self._end()
                self._begin()
            while True:
                if (unit.stale or self.unclean) and not self._busy():
                    self.plan()
                unit = gate.unit
                if unit is None:
                    return None  # no unit any more: its weights come one by one, this time
                fast = unit.enter()
                # One that turns out to be stale is planned anew first.
                if fast or self._enter(unit) or self._busy():
                    break
            if not fast and unit.stale and not unit.depth:
                self._go_bare(unit)
            if gate.run:
                self.local.run = unit
            self.called.append(gate.name)
            if not unit.span:
                self.sequence.enter(unit)
            if not fast:
                self.tracking = True
                self.slow += 1
                self.slow_entries += 1
                self.prefetch()
            return unit

    def _enter(self, unit: Unit) -> bool:
        """False: it is stale, and was not entered."""
        if unit.depth and self._enter_again(unit):
            return True
        for _ in range(3):
            if not self._fetch(unit, demand=True):
                break
            load = unit.load
            assert load is not None
            load.use(self.mover)
            if unit.enter_with(load.staged, self._reals(unit, load.staged)):
                return True
            load.done(self.mover)
            unit.load = None
            if unit.stale:
                return False
        if unit.stale:
            return False
        self._go_bare(unit)
        return True

    def _go_bare(self, unit: Unit) -> None:
        """No room for it all, or it is not what it was: its weights come one by one, as they are
        used."""
        self._discard(unit)
        for b in unit.bindings if unit.stale else ():
            tensor = b.place[b.key] if isinstance(b.place, list) else b.place.get(b.key)
            if tensor is not None and tensor.device.type == "cpu" and units.is_plain(tensor):
                tensor.data = tensor.data.to(self.torch_device)
        unit.bare += 1
        self.bare_entries += 1
        self.local.__dict__.setdefault("bare", []).append(unit)

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

    def _fetch(self, unit: Unit, demand: bool = False) -> bool:
        """Send for a unit, or for what is missing: whether all of it is there, or on its way."""
        if unit.span:
            # In the ring it would be in everybody's way, for as long as it is needed.
            return not demand
        for number, ref, its in unit.shared:
            other = ref()
            if other is not None:
                unit.learn(number, other, its)
        if unit.load is None:
            unit.load = Load()
        load = unit.load
        whole = load.advance(self.mover, unit)
        if not whole and (not load.cargoes or demand) and self.station.want_ring():
            load = unit.load = unit.load or Load()
            whole = load.advance(self.mover, unit)
        if not whole and demand:
            # What others have in the ring, and do not use yet, must go.
            for model in list(self.station.models):
                model.drop_loads(but=unit)
            whole = load.advance(self.mover, unit)
        # What is resident by now needs no keeping: it is looked for where it is.
        if not load.cargoes and not demand:
            unit.load = None
        return whole

    def _reals(self, unit: Unit, staged: list[int]) -> list[Any]:
        """For each swap the tensor over its place in the ring; None: the VBAR's own."""
        reals: list[Any] = []
        for b in unit.bindings:
            number = unit.numbers[id(b.piece)]
            address = staged[number]
            if not address:
                reals.append(None)
                continue
            key = (id(b), address)
            made = unit.views.get(key)
            if made is None:
                if len(unit.views) >= VIEWS * len(unit.bindings):
                    unit.views.clear()
                flat = over(self.mover, address, b.piece.nbytes)
                made = unit.views[key] = real(b.parked, flat)
            reals.append(made)
        return reals

    def leave(self, unit: Unit) -> None:
        """Out of a unit. A run is left by its last member, or by whoever comes next."""
        if not unit.run:
            self._leave(unit)
        elif getattr(self.local, "run", None) is unit:
            self._leave_run()

    def _leave_run(self) -> None:
        run = getattr(self.local, "run", None)
        if run is not None:
            self.local.run = None
            self._leave(run)

    def _leave(self, unit: Unit) -> None:
        bare = self.local.__dict__.get("bare")
        if bare and unit in bare:
            with self.lock:
                bare.remove(unit)
                unit.bare -= 1
            return
        if unit.load is None:
            unit.leave()
            return
        with self.lock:
            load = unit.load
            try:
                if unit.depth == 1 and load.cargoes:
                    self.save_written(unit)
            finally:
                unit.leave()
                load.done(self.mover)
                if not unit.depth:
                    unit.load = None
                    self.prefetch()

    def save_written(self, unit: Unit) -> None:
        """Weights that the model itself has written to: the host gets their values. Buffers stay on
        the GPU, for they are likely to be written again."""
        for b in unit.bindings:
            made = b.place[b.key]
            since = getattr(made, "_ebbtide_version", None)  # None: somebody else's
            if since is None or since == made._version:
                continue
            made._ebbtide_version = made._version
            with torch.no_grad():
                values, old = made.detach().cpu(), host_of(b.parked)
                if torch.equal(_raw(values), _raw(old)):
                    continue
                b.piece.before_write()
                host_of(b.parked).copy_(values)
                b.piece.changed()
                if not b.parked._is_param and self._alone(b):
                    self._let_stay(b, made.detach().clone())

    def _alone(self, binding: Binding) -> bool:
        return all(b.parked is binding.parked for b in self.bindings if b.piece is binding.piece)

    def _let_stay(self, binding: Binding, plain: torch.Tensor) -> None:
        """A buffer is a plain tensor of the GPU from now on."""
        try:
            torch.utils.swap_tensors(binding.parked, plain)
            plain = binding.parked
        except RuntimeError:
            binding.place[binding.key] = plain
        self.staying[plain] = True
        self.dirty()

    def _discard(self, unit: Unit) -> None:
        load, unit.load = unit.load, None
        if load is not None:
            load.drop(self.mover)

    def drop_loads(self, but: Unit | None = None) -> None:
        """Give the ring back what is not in use."""
        for unit in self.units:
            if unit.load is not None and not unit.depth and not unit.load.used and unit is not but:
                self._discard(unit)

    def prefetch(self) -> None:
        """Bring what comes next, as far as the ring goes."""
        for unit in self.sequence.ahead():
            if unit.depth or unit.resident == unit.bytes:
                continue
            if not self._fetch(unit):
                return

    def ring_size(self) -> int:
        """How much of the GPU is to be for weights in passing: if the one that comes has to wait
        for the end of the one before with its last part, then the GPU waits for that part, every
        time."""
        return -(-self.slots * self.largest // GRAIN) * GRAIN

    def balance(self) -> None:
        """How much of the GPU is for weights that stay: what PyTorch's tensors, which come first,
        have left of it lately. A weight in use cannot give way to them, so it must not be in their
        place."""
        if self.vbar is None:
            return
        device, vbar = self.station.device.stats(), self.vbar.stats()
        size, given_up = vbar["bytes"], vbar["evictions_for_tensors"]
        most = min(device["limit"], device["total"] - device["headroom"]) - SLACK
        segments = _core.attached_stats(self.index) or {"segment_bytes": 0, "before": 0}
        tensors = segments["segment_bytes"] + segments["before"]
        if given_up != self.given_up:
            # They needed more, in between, than they have now.
            tensors = max(tensors, most - self.ring_size() - vbar["watermark"])
            self.given_up = given_up
        self.peaks.append(tensors)
        room = most - max(self.peaks)
        if self.learning and room < size + 4 * self.largest + size // 8:
            room = 0  # what it takes is not known yet: nothing stays
        elif room < size:
            room = max(room - self.ring_size(), 0)
        room = max(room, self.firm)
        self.fits = room >= size
        if self.fits and self.station.ring:
            self.station.trim()
        # What does not fit is tried all the same, a little beyond: a weight that lies across the
        # end has its room taken by smaller ones behind it. Where little stays anyway, that would be
        # too much.
        room = min(room + self.largest if room > self.largest else room, size)
        if room != vbar["watermark_limit"]:
            self.vbar.watermark_limit = room
        if room > vbar["watermark"]:
            self.vbar.watermark = room

    # ---- what the handle asks for ---------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        seen: dict[int, int] = {id(b.piece): b.piece.nbytes for b in self.bindings}
        stats = self.mover.stats()
        return {
            "bytes": sum(seen.values()),
            "resident": self.vbar.loaded_size if self.vbar is not None else 0,
            "units": len(self.units),
            "largest_unit": self.largest,
            "ring": self.station.ring,
            "streamed": stats["staged"],
            "filled": stats["filled"],
            "slow_entries": self.slow_entries,
            "one_by_one": self.bare_entries,
        }

    def _name_of(self, module: nn.Module) -> str:
        if module not in self.names:
            raise ValueError(f"this {type(module).__name__} is no part of the model")
        return self.names[module]

    def pin(self, module: nn.Module) -> None:
        with self.lock:
            self.pinned.append(self._name_of(module))
            self.dirty()

    def exclude(self, module: nn.Module) -> None:
        with self.lock:
            self.excluded.add(self._name_of(module))
            self.dirty()

    def restore(self, device: torch.device) -> nn.Module:
        """A plain model again."""
        root = self.root
        with self.lock:
            if any(u.depth for u in self.units):
                raise _core.Busy("the model is running")
            self.drop_loads()
            done: dict[int, torch.Tensor] = {}
            for b in self.bindings:
                parked = b.parked
                if not isinstance(parked, Parked):
                    continue
                piece = parked._piece
                if id(piece) not in done:
                    done[id(piece)] = piece.host.to(device, copy=True)
                plain = piece.view(
                    parked.dtype,
                    parked.size(),
                    parked.stride(),
                    parked.storage_offset(),
                    of=done[id(piece)],
                )
                if parked._is_param:
                    plain = nn.Parameter(plain, parked.requires_grad)
                for name, value in parked.__dict__.items():
                    if name not in ("_piece", "_is_param"):
                        setattr(plain, name, value)
                try:
                    torch.utils.swap_tensors(parked, plain)
                except RuntimeError:
                    b.place[b.key] = plain
            for module in list(self.names):
                for key, hook in list(module._state_dict_hooks.items()):
                    if getattr(hook, "ebbtide", False):
                        del module._state_dict_hooks[key]
            for gate in list(self.gates):
                gate.remove()
            self.gates.clear()
            self.units, self.bindings = [], []
            self.vbar = None
        return root

    # ---- changes --------------------------------------------------------------------------------

    def forget(self, piece: Piece) -> None:
        """A weight has other values now."""
        with self.lock:
            for unit in self.units:
                number = unit.numbers.get(id(piece))
                if number is not None:
                    unit.forget(number)
                    if not unit.depth:
                        self._discard(unit)

    def move_away(self, parked: Parked) -> None:
        """A weight is to go to the CPU. When all of them are, it is a plain model there."""
        with self.lock:
            self.leaving.add(id(parked))
            if self.leaving >= {id(b.parked) for b in self.bindings}:
                self.restore(torch.device("cpu"))

    def dirty(self) -> None:
        """A weight has become another one."""
        self.unclean = True
        for unit in self.units:
            unit.stale = 1


_watching: list[Any] = []


def _watch() -> None:
    """From now on it is seen when a module is given another weight, or another module."""
    if not _watching:
        _watching.append(register_module_parameter_registration_hook(_registered))
        _watching.append(register_module_buffer_registration_hook(_registered))
        _watching.append(register_module_module_registration_hook(_registered))


def _registered(module: nn.Module, name: str, what: Any) -> None:
    for station in list(Station._all.values()):
        for model in list(station.models):
            if module in model.names:
                model.dirty()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _real_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """state_dict() gives the values: where they are, on the host."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Parked):
            piece = value._piece
            piece.handed = True
            model = piece.model and piece.model()
            if model is not None and piece not in model.handed:
                model.handed.append(piece)
            state[name] = host_of(value)


_real_values.ebbtide = True  # type: ignore[attr-defined]
