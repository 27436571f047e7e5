"""A unit of an offloaded model, with its tensors: over its place in the VBAR, or in the ring.

What of it is quick is _core's: going in and out where all of it is resident.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide import _core
from ebbtide._offload import units
from ebbtide._offload.parked import Parked
from ebbtide._offload.station import Load, chunks
from ebbtide.vbar import VBAR

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

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

    def reals(self, mover: _core.Mover, staged: list[int]) -> list[Any]:
        """For each swap the tensor over its place in the ring; None: the VBAR's own."""
        reals: list[Any] = []
        for b in self.bindings:
            number = self.numbers[id(b.piece)]
            address = staged[number]
            if not address:
                reals.append(None)
                continue
            key = (id(b), address)
            made = self.views.get(key)
            if made is None:
                if len(self.views) >= VIEWS * len(self.bindings):
                    self.views.clear()
                flat = over(mover, address, b.piece.nbytes)
                made = self.views[key] = real(b.parked, flat)
            reals.append(made)
        return reals

    def discard(self, mover: _core.Mover) -> None:
        """What is on its way comes for nothing."""
        load, self.load = self.load, None
        if load is not None:
            load.drop(mover)


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
