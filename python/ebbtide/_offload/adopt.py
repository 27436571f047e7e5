"""Adopting a model: every weight gets its place on the host, and is parked (parked.py).

What cannot page, or should not, is put on the GPU for good: small buffers and those that are seen
to be written, small weights of modules that hold units, tensors that are more than their memory,
and what is excluded.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ebbtide import _core
from ebbtide._offload import host, places, recurrent, units
from ebbtide._offload.memory import Region, flat, regions
from ebbtide._offload.parked import Parked, Piece, geometry, host_of, park
from ebbtide._offload.unit import Binding

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

# Buffers up to this size stay on the GPU: they are written more often than not.
KEPT_BUFFER = 256 << 10
KEPT_SPAN = 32 << 20  # so do weights of modules that hold units, up to this size
# And so do the smallest weights (norms, biases), if all of them are but a small part of the model:
# they would cost the host more than they are worth.
KEPT_WEIGHT, KEPT_PART = 64 << 10, 128


class Weights:
    """Where a model's weights are while nobody uses them. It may keep no module: see Model."""

    def __init__(self, mover: _core.Mover, index: int, pinned: int | None) -> None:
        self.torch_device = torch.device("cuda", index)
        self.arena = host.Arena(mover, pinned)
        self.lender = host.Lender(self.arena)
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.bindings: list[Binding] = []
        self.excluded: set[str] = set()
        self.staying = WeakTensorKeyDictionary()  # buffers that were seen to be written
        self.small = 0  # weights up to this size stay on the GPU
        self.regions: dict[int, Region] = {}  # by tensor, where in its storage it is
        self.tied: set[int] = set()  # tensors that are in several places
        # Tensors of modules that are excluded, and of spans (keep_tied()), wherever they are.
        self.left_alone: set[int] = set()
        self.warned = False

    def name_of(self, module: nn.Module) -> str:
        if not isinstance(module, nn.Module):
            raise TypeError(f"this takes a module of the model, not {module!r}")
        if module not in self.names:
            raise ValueError(f"this {type(module).__name__} is no part of the model")
        return self.names[module]

    # ---- what pages ------------------------------------------------------------------------------

    def _places(self, module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor, bool]]:
        """Where a module holds tensors: parameters, buffers, and lists of the same ones."""
        for place, buffer in ((module._parameters, False), (module._buffers, True)):
            for key, tensor in list(place.items()):
                if tensor is not None:
                    yield place, key, tensor, buffer

    def _pageable(self, tensor: torch.Tensor, buffer: bool) -> bool:
        if id(tensor) in self.left_alone:
            return False
        if isinstance(tensor, Parked):
            return True
        if not units.is_plain(tensor):
            return False
        if buffer and (tensor.nbytes <= KEPT_BUFFER or tensor in self.staying):
            return False
        region = self.regions.get(id(tensor))
        return tensor.nbytes > self.small or region is None or region.several

    def survey(self, tops: Sequence[tuple[str, nn.Module]]) -> None:
        """Look at a model, or at what is left of it, as it is now: its modules' names, which
        weights share memory, and what of it is small."""
        self.names.clear()
        met: set[nn.Module] = set()
        for top_name, top in tops:
            for name, module in top.named_modules(met, top_name):
                self.names[module] = name
                recurrent.let_go(module)
        self.small = 0
        self.left_alone = {
            id(tensor)
            for module, name in self.names.items()
            if self._excluded(name)
            for _, _, tensor, _ in self._places(module)
        }
        everywhere = [
            tensor
            for module in self.names
            for _, _, tensor, buffer in self._places(module)
            if self._pageable(tensor, buffer)
        ]
        found = {id(tensor): tensor for tensor in everywhere}
        self.tied = {key for key, n in Counter(map(id, everywhere)).items() if n > 1}
        plain = [t for t in found.values() if not isinstance(t, Parked)]
        self.regions = regions(plain, lambda t: t.untyped_storage().data_ptr())
        small = sum(t.nbytes for t in plain if t.nbytes <= KEPT_WEIGHT)
        if small * KEPT_PART <= sum(t.numel() * t.dtype.itemsize for t in found.values()):
            self.small = KEPT_WEIGHT

    def small_bytes(self) -> int:
        """Of weights that stay on the GPU because they are small."""
        found = {
            id(t): t.nbytes
            for module in self.names
            for _, _, t, buffer in self._places(module)
            if not buffer and units.is_plain(t) and t.nbytes <= self.small
        }
        return sum(found.values())

    def _excluded(self, name: str) -> bool:
        return any(name == e or name.startswith(f"{e}.") or not e for e in self.excluded)

    def own_bytes(self, module: nn.Module) -> int:
        if self._excluded(self.names[module]):
            return 0
        return sum(
            t.nbytes if not isinstance(t, Parked) else t.numel() * t.dtype.itemsize
            for _, _, t, buffer in self._places(module)
            if self._pageable(t, buffer)
        )

    def _memory_of(self, choice: units.Choice) -> dict[int, set[int]]:
        """Of a unit's weights: by the memory they are in, which tensors those are."""
        found: dict[int, set[int]] = {}
        for module in choice.owners:
            for _, _, t, buffer in self._places(module):
                if self._pageable(t, buffer):
                    memory = t._piece if isinstance(t, Parked) else self.regions[id(t)]
                    found.setdefault(id(memory), set()).add(id(t))
        return found

    def keep_tied(self, choices: list[units.Choice]) -> bool:
        """The few weights of a span that others have, too, stay on the GPU in all their places:
        whether there are any, so that units have to be chosen anew. Not those that others only
        overlap: they would not any more."""
        spans = [self._memory_of(c) for c in choices if _is_small_span(c)]
        if not spans:
            return False
        times: Counter[int] = Counter()
        tensors: dict[int, set[int]] = {}
        for choice in choices:
            for memory, its in self._memory_of(choice).items():
                times[memory] += 1
                tensors.setdefault(memory, set()).update(its)
        tied = {m for span in spans for m in span if times[m] > 1 and len(tensors[m]) == 1}
        self.left_alone.update(key for memory in tied for key in tensors[memory])
        return bool(tied)

    def is_kept(self, choice: units.Choice, choices: list[units.Choice]) -> bool:
        """A few weights that a module needs all the time it runs, beside the units in it. Where
        others are in the same memory, they page with these."""
        if not _is_small_span(choice):
            return False
        own = self._memory_of(choice)
        if any(len(tensors) > 1 for tensors in own.values()):
            return False
        return all(own.keys().isdisjoint(self._memory_of(c)) for c in choices if c is not choice)

    # ---- every weight its place on the host ------------------------------------------------------

    def adopt(self, choices: list[units.Choice], model: Model) -> dict[nn.Module, list[Binding]]:
        """Park every weight. By module, its bindings."""
        self.lender.begin(self._extents())
        done: dict[int, Piece] = {}  # by region
        found: dict[nn.Module, list[Binding]] = {}
        # By tensor, which is held so that nothing else is at its address.
        parked_by: dict[int, tuple[Parked, torch.Tensor]] = {}
        for choice in choices:
            self.arena.reserve(self._sizes(choice, done))
            for module in choice.owners:
                name = self.names[module]
                bindings = found[module] = []
                for name_ in places.NAMES:
                    places.take(module, name_)
                for place, key, tensor, buffer in list(self._places(module)):
                    full = f"{name}.{key}" if name else key
                    if not self._pageable(tensor, buffer):
                        continue
                    known = parked_by.get(id(tensor))
                    parked = known[0] if known else self._park(tensor, done)
                    if parked is tensor or id(tensor) in self.tied:
                        parked_by[id(tensor)] = (parked, tensor)
                    if place[key] is not parked:
                        place[key] = parked
                    parked._piece.models.add(model)
                    bindings.append(Binding(module, place, key, full, parked))
                recurrent.take(module)
                bindings += self._in_lists(module, bindings)
        self.bindings = [b for several in found.values() for b in several]
        self.lender.end()
        for module in self.names:
            places.watch_children(module, model)
        return found

    def _in_lists(self, module: nn.Module, bindings: list[Binding]) -> list[Binding]:
        """Lists of a module that hold its weights too, or refer to them (recurrent.py)."""
        more = []
        own = {id(b.parked) for b in bindings}
        for name, value in module.__dict__.items():
            for i, item in enumerate(value if isinstance(value, list) else ()):
                weak = isinstance(item, weakref.ref)
                tensor = item() if weak else item
                if isinstance(tensor, Parked) and id(tensor) in own:
                    more.append(Binding(module, value, i, f"{name}[{i}]", tensor, weak))
        return more

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Where in memory weights are that have no place of their own yet."""
        for module in self.names:
            for _, _, tensor, buffer in self._places(module):
                if isinstance(tensor, Parked) or not self._pageable(tensor, buffer):
                    continue
                if tensor.device.type == "cpu":
                    region, at = self.regions[id(tensor)], tensor.untyped_storage().data_ptr()
                    yield at + region.low, at + region.high

    def _sizes(self, choice: units.Choice, done: dict[int, Piece]) -> list[int]:
        """What of a unit has no place on the host yet. What can stay where it is does."""
        found: dict[int, int] = {}
        for module in choice.owners:
            for _, _, tensor, buffer in self._places(module):
                if not self._pageable(tensor, buffer):
                    continue
                if isinstance(tensor, Parked):
                    if self._is_slow(tensor._piece):
                        found[id(tensor._piece)] = tensor._piece.nbytes
                    continue
                region = self.regions[id(tensor)]
                if id(region) in done:
                    continue
                lent = self.lender.ask(tensor, region.low, region.high)
                if lent is None:
                    found[id(region)] = region.high - region.low
                else:
                    piece = done[id(region)] = Piece(lent[0], self.torch_device)
                    piece.loan = lent[1]
        return list(found.values())

    def _is_slow(self, piece: Piece) -> bool:
        """Whether it is in pageable memory, because it is of another dtype now, or was written to
        where it was mapped. What has been given out stays where it is: whoever has it writes
        there."""
        if piece.loan is not None or piece.given is not None or not piece.nbytes:
            return False
        return self.arena.mover.pinned(piece.source) is None

    def _park(self, tensor: torch.Tensor, done: dict[int, Piece]) -> Parked:
        if isinstance(tensor, Parked):
            piece = tensor._piece
            if self._is_slow(piece) and (place := self.arena.take_pinned(piece.nbytes)) is not None:
                piece.move(place)
            return tensor
        region = self.regions[id(tensor)]
        piece = done.get(id(region))
        if piece is None:
            piece = done[id(region)] = self._piece(tensor, region)
        parked = park(
            piece,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset() - region.low // tensor.dtype.itemsize,
            parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad,
        )
        parked.__dict__.update(tensor.__dict__)
        try:
            # Whoever holds the parameter holds the parked one from now on.
            torch.utils.swap_tensors(tensor, parked)
        except RuntimeError:
            return parked
        return tensor

    def _piece(self, tensor: torch.Tensor, region: Region) -> Piece:
        size = region.high - region.low
        place = self.arena.take(size)
        with torch.no_grad():
            place.copy_(flat(tensor.untyped_storage(), region.low, region.high))
        return Piece(place, self.torch_device)

    # ---- what stays on the GPU -------------------------------------------------------------------

    def keep_the_rest(self, owners: set[nn.Module]) -> None:
        """What is not parked goes to the GPU. That ends what survey() has begun."""
        # Those that become another tensor, which it is, and what is held so that nothing else is at
        # its address: what is in several places is one tensor in all of them.
        others: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, name in list(self.names.items()):
            for place, key, tensor, buffer in list(self._places(module)):
                if module in owners and self._pageable(tensor, buffer):
                    continue
                if isinstance(tensor, Parked):
                    self._bring(place, key, tensor, others)
                else:
                    self._keep(place, key, tensor, f"{name}.{key}" if name else key, others)
            if module not in owners:
                recurrent.give_back(module)
        self.regions, self.tied, self.left_alone = {}, set(), set()

    def _bring(
        self,
        place: Any,
        key: Any,
        parked: Parked,
        others: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """A weight that was parked is a tensor of the GPU."""
        if id(parked) not in others:
            with torch.no_grad():
                plain = torch.empty_like(host_of(parked), device=self.torch_device)
                plain.copy_(host_of(parked))
            plain = _as_it_was(parked, plain)
            try:
                torch.utils.swap_tensors(parked, plain)
                return
            except RuntimeError:
                others[id(parked)] = (plain, parked)
        place[key] = others[id(parked)][0]

    def _keep(
        self,
        place: Any,
        key: Any,
        tensor: torch.Tensor,
        name: str,
        others: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """A tensor that does not page is on the GPU, once and for all."""
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no values (it is on the meta device): load them first")
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
        if id(tensor) not in others:
            moved = tensor.to(self.torch_device)
            if isinstance(tensor, nn.Parameter) and not isinstance(moved, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
            others[id(tensor)] = (moved, tensor)
        place[key] = others[id(tensor)][0]

    # ---- what the model writes -------------------------------------------------------------------

    def save(self, b: Binding, made: torch.Tensor, versions: dict[int, int]) -> bool:
        """If the model itself has written to a weight, which `made` stands for, the host gets its
        values. True: it is a buffer, and stays on the GPU from now on, for it is likely to be
        written again."""
        if versions[id(made)] == made._version:
            return False
        versions[id(made)] = made._version
        with torch.no_grad():
            values, old = made.detach().cpu(), host_of(b.parked)
            if torch.equal(_raw(values), _raw(old)):
                return False
            with b.piece.written():
                host_of(b.parked).copy_(values)
            if b.parked._is_param or not self._alone(b):
                return False
            if b.there() is made:
                self._let_stay(b, made.detach().clone())
            return True

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

    # ---- and back --------------------------------------------------------------------------------

    def _parked(self) -> list[tuple[Any, Any, Parked]]:
        """Where parked tensors are: also those that have no binding, because a plan has failed."""
        found = {
            (id(b.place), b.key): (b.place, b.key, b.parked) for b in self.bindings if not b.weak
        }
        for module in list(self.names):
            for place, key, tensor, _ in self._places(module):
                if isinstance(tensor, Parked):
                    found.setdefault((id(place), key), (place, key, tensor))
        return [entry for entry in found.values() if isinstance(entry[2], Parked)]

    def give_back(self, device: torch.device, model: Model) -> None:
        """Plain tensors again, in the places of all that are parked. If there is no room for them
        nothing is changed. What is another model's, too, stays parked for that one."""
        everywhere = self._parked()
        pieces = {id(parked._piece): parked._piece for _, _, parked in everywhere}
        done = {key: piece.host.to(device, copy=True) for key, piece in pieces.items()}
        for module in list(self.names):
            recurrent.let_go(module)
        others: dict[int, torch.Tensor] = {}  # for parked tensors that cannot become plain ones
        for place, key, parked in everywhere:
            if not isinstance(parked, Parked):
                continue  # it has become one by now
            if id(parked) in others:
                place[key] = others[id(parked)]
                continue
            piece = parked._piece
            plain = piece.view(*geometry(parked), of=done[id(piece)])
            plain = _as_it_was(parked, plain)
            if any(other is not model for other in piece.models):
                place[key] = others[id(parked)] = plain
                continue
            try:
                torch.utils.swap_tensors(parked, plain)
            except RuntimeError:
                place[key] = others[id(parked)] = plain
        for piece in pieces.values():
            piece.models.discard(model)
        self.bindings = []
        for module in list(self.names):
            places.give_back(module)
            recurrent.give_back(module)


def _is_small_span(choice: units.Choice) -> bool:
    return choice.span and choice.bytes <= KEPT_SPAN


def _as_it_was(parked: Parked, plain: torch.Tensor) -> torch.Tensor:
    """A plain tensor with all else that a parked one has."""
    if parked._is_param:
        plain = nn.Parameter(plain, parked.requires_grad)
    for name, value in parked.__dict__.items():
        if name not in ("_piece", "_is_param"):
            setattr(plain, name, value)
    return plain


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in the order of its elements."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
