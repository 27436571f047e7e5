"""Adopting a model: every weight gets its place on the host, and is parked (parked.py).

What cannot page, or should not, is put on the GPU for good: small buffers and those that are seen
to be written, small weights of modules that hold units, tensors that are more than their memory,
and what is excluded.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ebbtide import _core
from ebbtide._offload import host, units
from ebbtide._offload.parked import Parked, Piece, host_of, park
from ebbtide._offload.unit import Binding

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

# Buffers up to this size stay on the GPU: they are written more often than not.
KEPT_BUFFER = 256 << 10
KEPT_SPAN = 32 << 20  # so do weights of modules that hold units, up to this size


class Weights:
    """Where a model's weights are while nobody uses them. It may keep no module: see Model."""

    def __init__(self, mover: _core.Mover, index: int, pinned: int | None) -> None:
        self.mover = mover
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.arena = host.Arena(mover, index, pinned)
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.bindings: list[Binding] = []
        self.excluded: set[str] = set()
        self.staying = WeakTensorKeyDictionary()  # buffers that were seen to be written
        self.warned = False

    def name_of(self, module: nn.Module) -> str:
        if module not in self.names:
            raise ValueError(f"this {type(module).__name__} is no part of the model")
        return self.names[module]

    # ---- what pages ------------------------------------------------------------------------------

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

    def own_bytes(self, module: nn.Module) -> int:
        if self._excluded(self.names[module]):
            return 0
        return sum(
            t.nbytes if not isinstance(t, Parked) else t.numel() * t.dtype.itemsize
            for _, _, t, buffer in self._places(module)
            if self._pageable(t, buffer)
        )

    def is_kept(self, choice: units.Choice, choices: list[units.Choice]) -> bool:
        """A few weights that a module needs all the time it runs, beside the units in it."""
        if not choice.span or choice.bytes > KEPT_SPAN:
            return False
        (module,) = choice.owners
        own = {id(t) for _, _, t, _ in self._places(module)}
        others = [m for c in choices if c is not choice for m in c.owners]
        return not any(id(t) in own for m in others for _, _, t, _ in self._places(m))

    # ---- every weight its place on the host ------------------------------------------------------

    def adopt(self, choices: list[units.Choice], model: Model) -> dict[nn.Module, list[Binding]]:
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
                    parked._piece.model = weakref.ref(model)
                    bindings.append(Binding(module, place, key, full, parked))
                bindings += self._in_lists(module, bindings)
        self.bindings = [b for several in found.values() for b in several]
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

    # ---- what stays on the GPU -------------------------------------------------------------------

    def keep_the_rest(self, owners: set[nn.Module]) -> None:
        for module, name in list(self.names.items()):
            for place, key, tensor, buffer in list(self._places(module)):
                kept = module not in owners
                if kept or not self._pageable(tensor, buffer) or self._excluded(name):
                    self._keep(place, key, tensor, f"{name}.{key}" if name else key)

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

    # ---- what the model writes -------------------------------------------------------------------

    def save(self, b: Binding) -> bool:
        """If the model itself has written to a weight, the host gets its values. True: it is a
        buffer, and stays on the GPU from now on, for it is likely to be written again."""
        made = b.place[b.key]
        since = getattr(made, "_ebbtide_version", None)  # None: somebody else's
        if since is None or since == made._version:
            return False
        made._ebbtide_version = made._version
        with torch.no_grad():
            values, old = made.detach().cpu(), host_of(b.parked)
            if torch.equal(_raw(values), _raw(old)):
                return False
            b.piece.before_write()
            host_of(b.parked).copy_(values)
            b.piece.changed()
            if b.parked._is_param or not self._alone(b):
                return False
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

    def give_back(self, device: torch.device) -> None:
        """Plain tensors again, in the places of all that are parked."""
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
        self.bindings = []


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)
