"""A unit of an offloaded model, with its tensors: over its place in the VBAR, or in the ring.

What of it is quick is _core's: going in and out where all of it is resident.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide import _core
from ebbtide._offload import ahead, host, units
from ebbtide._offload.memory import read_as
from ebbtide._offload.parked import Parked, Piece
from ebbtide.vbar import VBAR

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

VIEWS = 16  # places in the ring for which a unit's tensors are kept: as many as _core.h has SPOTS
COMPILE_BY = torch._C._dynamo.eval_frame.set_eval_frame
# Weights that lie side by side are one, up to this part of a unit: one that finds no room in the
# ring, or would go across its end, waits for the unit before, and the GPU waits for it.
GROUPS = 64


class Binding:
    """A place in a module that holds a weight."""

    __slots__ = ("key", "module", "name", "parked", "piece", "place", "weak")

    def __init__(
        self,
        module: nn.Module,
        place: Any,
        key: Any,
        name: str,
        parked: Parked,
        weak: bool = False,
    ) -> None:
        self.module = weakref.ref(module)
        self.place = place  # the dict or list
        self.key = key
        self.name = name
        self.parked = parked
        self.piece = parked._piece
        self.weak = weak  # a weak reference to it is there

    def of(self, tensor: Any) -> Any:
        """What goes into the place, of a tensor."""
        return weakref.ref(tensor) if self.weak else tensor

    def there(self) -> Any:
        """What is in the place now, or None."""
        if isinstance(self.place, list):
            return self.place[self.key] if self.key < len(self.place) else None
        return self.place.get(self.key)


class Group:
    """Weights that lie side by side, on the host as in the VBAR: they come together."""

    __slots__ = ("bytes", "host", "offset", "pinned")

    def __init__(self, piece: Piece, offset: int, mover: _core.Mover) -> None:
        self.offset = offset  # in the VBAR
        self.bytes = piece.nbytes
        self.host = piece.source
        self.pinned = mover.pinned(self.host)  # as one, from where to where

    def join(self, piece: Piece, offset: int, most: int, mover: _core.Mover) -> bool:
        """Take one more in, if it comes next, is not too much, and one copy can read both."""
        at = offset - self.offset
        if piece.source - self.host != at or not 0 <= at - self.bytes < host.ALIGNMENT:
            return False
        if at + piece.nbytes > most:
            return False
        if self.pinned is None:
            if mover.pinned(piece.source) is not None:
                return False
        elif self.host + at + piece.nbytes > self.pinned[1]:
            return False
        self.bytes = at + piece.nbytes
        return True


class Tensors:
    """What goes into a unit's places while it runs."""

    __slots__ = ("ahead", "bases", "passing", "reals", "versions")

    def __init__(
        self,
        bases: list[torch.Tensor],
        reals: list[Any],
        passing: dict[int, torch.Tensor],
        ahead: _core.Ahead,
    ) -> None:
        # All tensors are views of these: whoever writes to one of them changes a version.
        self.bases = bases
        self.reals = reals  # by binding
        self.passing = passing  # by parked tensor
        self.ahead = ahead
        self.versions = [base._version for base in bases]

    def written(self) -> bool:
        now = [base._version for base in self.bases]
        changed, self.versions = now != self.versions, now
        return changed


class Unit(_core.Unit):
    """A unit with its names."""

    def __init__(
        self,
        choice: units.Choice,
        vbar: VBAR,
        bindings: list[Binding],
        offsets: dict[int, int],
        tied: set[int],
        mover: _core.Mover,
    ) -> None:
        pieces = {id(b.piece): b.piece for b in bindings}
        ordered = sorted(pieces.values(), key=lambda p: offsets[id(p)])
        # What its copies read, whatever becomes of the pieces before it is planned anew.
        self.sources = [(p.host, p.loan) for p in ordered]
        self.groups: list[Group] = []
        self.numbers: dict[int, int] = {}  # by piece: its group
        self.offsets = {key: offsets[key] for key in pieces}
        most = sum(p.nbytes for p in ordered) // GROUPS
        alone = True
        for piece in ordered:
            at = offsets[id(piece)]
            if alone or id(piece) in tied or not self.groups[-1].join(piece, at, most, mover):
                self.groups.append(Group(piece, at, mover))
            alone = id(piece) in tied  # what others have, too, is for itself
            self.numbers[id(piece)] = len(self.groups) - 1
        low, high = self.groups[0].offset, self.groups[-1].offset + self.groups[-1].bytes
        base = over(vbar, vbar.address + low, high - low)
        found = {}
        for b in bindings:
            at = offsets[id(b.piece)] - low
            found[id(b.parked)] = (b.parked, base[at : at + b.piece.nbytes])
        self.versions: dict[int, int] = {}  # by tensor, when it was last looked at
        self.own = self._reals(found)  # by parked tensor, the one over the VBAR
        swaps = []
        for b in bindings:
            goes_in = b.of(self.own[id(b.parked)])
            swaps.append((b.place, b.key, b.of(b.parked), goes_in, self.numbers[id(b.piece)]))
        pieces_ = [(g.offset, g.bytes, g.host) for g in self.groups]
        self.around = _around(choice, bindings)
        super().__init__(vbar, pieces_, swaps, COMPILE_BY, self._ahead(bindings, {}))
        # All its tensors are views of one: whoever writes to one of them changes its version.
        self.base, self.version = base, base._version
        self.model: weakref.ref[Model] | None = None
        self.name = choice.name
        self.names = choice.names  # of its members
        self.span = choice.span
        self.run = len(choice.members) > 1
        self.small = choice.is_small
        self.others_stay = False  # most like it stay, as a whole
        self.bytes = sum(g.bytes for g in self.groups)
        self.bindings = bindings
        self.load: _core.Load | None = None
        self.shared: list[tuple[int, weakref.ref[Unit], int]] = []  # what others have, too
        self.settled = False  # what is not resident will not be, as far as is known
        self.bare = 0  # entered without its weights: they come one by one
        self.views: dict[bytes, Tensors] = {}
        self.tensors: Tensors | None = None  # of the ring, while they are in its places

    def _written(self) -> None:
        """Called on the way out, before its tensors are parked: one of them was written to."""
        self.version = self.base._version
        model = self.model and self.model()
        if model is not None:
            model.save_written(self)

    def at(self, mover: _core.Mover, load: _core.Load) -> Tensors:
        """Its tensors over their places in the ring; None for those that are the VBAR's own."""
        key = load.key
        made = self.views.get(key)
        if made is not None:
            return made
        bases, places = self._over(mover, load.staged)
        found = {}
        for b in self.bindings:
            number = self.numbers[id(b.piece)]
            if number in places:
                base, at = places[number]
                at += self.offsets[id(b.piece)] - self.groups[number].offset
                found[id(b.parked)] = (b.parked, base[at : at + b.piece.nbytes])
        passing = self._reals(found)
        goes_in = [
            b.of(passing[id(b.parked)]) if id(b.parked) in passing else None for b in self.bindings
        ]
        if len(self.views) >= VIEWS:
            self.views.clear()
        made = Tensors(bases, goes_in, passing, self._ahead(self.bindings, passing))
        self.views[key] = made
        return made

    def _reals(self, found: dict[int, tuple[Parked, torch.Tensor]]) -> dict[int, torch.Tensor]:
        made = reals(found)
        self.versions.update({id(tensor): tensor._version for tensor in made.values()})
        return made

    def _over(
        self, mover: _core.Mover, staged: list[int]
    ) -> tuple[list[torch.Tensor], dict[int, tuple[torch.Tensor, int]]]:
        """Bytes of the ring, as few tensors as can be; and in which of them, and where, the groups
        are that are there."""
        runs: list[list[int]] = []  # first, end, and groups that lie side by side
        for number, (address, group) in enumerate(zip(staged, self.groups, strict=True)):
            if not address:
                continue
            if not runs or not 0 <= address - runs[-1][1] < host.ALIGNMENT:
                runs.append([address, address])
            runs[-1][1] = address + group.bytes
            runs[-1].append(number)
        bases, places = [], {}
        for first, end, *numbers in runs:
            base = over(mover, first, end - first)
            bases.append(base)
            places.update({number: (base, staged[number] - first) for number in numbers})
        return bases, places

    def _ahead(self, bindings: list[Binding], passing: dict[int, torch.Tensor]) -> _core.Ahead:
        """What the processor will need, by binding."""
        steps = []
        for b, around in zip(bindings, self.around, strict=True):
            real = passing.get(id(b.parked), self.own[id(b.parked)])
            steps.append(around + ahead.of_tensor(real))
        return _core.Ahead(steps)

    def now(self) -> Iterator[tuple[Binding, torch.Tensor]]:
        """While somebody is in: each weight, and what stands for it."""
        passing = self.tensors.passing if self.tensors is not None else {}
        for b in self.bindings:
            if not b.weak:
                yield b, passing.get(id(b.parked), self.own[id(b.parked)])

    def wants(self, parked: Parked, grad: bool) -> None:
        """Whether a weight is to have a gradient has changed."""
        for made in (self.own, *(tensors.passing for tensors in self.views.values())):
            if id(parked) in made:
                made[id(parked)].requires_grad_(grad)

    def discard(self, mover: _core.Mover) -> None:
        """What is on its way comes for nothing."""
        model = self.model and self.model()
        if model is not None and model.resting is self:
            model.end_rest()
        load, self.load = self.load, None
        if load is not None:
            load.drop(mover)


def _around(choice: units.Choice, bindings: list[Binding]) -> list[list[ahead.Range]]:
    """Of each binding what is called before it is looked up, and after the one before: the module
    that it is in, and others that have no weights which come and go."""
    firsts: dict[nn.Module, int] = {}
    for number, b in enumerate(bindings):
        module = b.module()
        if module is not None:
            firsts.setdefault(module, number)
    found: list[list[ahead.Range]] = [[] for _ in bindings]
    waiting: list[ahead.Range] = []
    for module in (m for member in choice.members for m in member.modules()):
        waiting += ahead.of_module(module)
        for kept in module._parameters.values():
            if kept is not None and not isinstance(kept, Parked):
                waiting += ahead.of_memory(kept)
        if module in firsts:
            found[firsts[module]] += waiting
            waiting = []
    return found


def over(owner: Any, address: int, size: int) -> torch.Tensor:
    """Bytes at an address on the GPU."""
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(owner._dlpack(address, size))


def reals(found: dict[int, tuple[Parked, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """The tensors that stand for parked ones, each over its bytes. They are made in a row, so that
    they lie side by side in memory: a processor that uses one layer after another waits less."""
    with torch.inference_mode(False):
        views = {key: _view(parked, flat) for key, (parked, flat) in found.items()}
        # With the same requires_grad: some operators choose their kernels by it, gradients or not.
        made = {
            key: nn.Parameter(view, requires_grad=found[key][0].requires_grad)
            if found[key][0]._is_param
            else view.detach().requires_grad_(found[key][0].requires_grad)
            for key, view in views.items()
        }
        # Whatever is an attribute of the one is of all: quantizers keep their scales there.
        for key, (parked, _) in found.items():
            made[key].__dict__ = parked.__dict__
        return made


def _view(parked: Parked, flat: torch.Tensor) -> torch.Tensor:
    item = parked.dtype.itemsize
    whole = flat[: flat.numel() // item * item].view(parked.dtype)
    offset = whole.storage_offset() + parked.storage_offset()
    view = whole.as_strided(parked.size(), parked.stride(), offset).detach()
    return read_as(view, parked.is_conj(), parked.is_neg())
