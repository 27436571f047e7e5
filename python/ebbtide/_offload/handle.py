"""offload(), and the handle it gives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide import _attach, _core
from ebbtide._offload import changed
from ebbtide._offload.gates import not_pickled
from ebbtide._offload.model import Model
from ebbtide._offload.parked import Parked
from ebbtide.sizes import parse
from ebbtide.vbar import Device

LEAST = 2 << 20  # bytes of VRAM: a page


def offload(
    model: nn.Module,
    device: int | str | torch.device = "cuda",
    *,
    limit: int | str | None = None,
    order: Sequence[str] | None = None,
    prefetch: int | None = None,
    host: int | str | None = None,
) -> Offloaded:
    """Keep a model's weights in RAM and page them to the GPU as it runs.

    Go on using `model` itself, with inputs on the GPU, as if it were there. Weights stay resident
    as far as there is room, and the others are streamed while the model runs. For inference: a
    backward raises.

    `limit` is the VRAM that this process may use on that GPU, weights and activations together (all
    there is, if none is given; a later limit replaces an earlier one; it goes with the last model).
    `order` names modules in the order in which they run, to skip learning it from the first pass.
    `prefetch` is how many units of weights may be on their way or temporarily in use at once
    (chosen by measurement, at most two). `host` is how much RAM may be pinned (all that the weights
    need).
    """
    if isinstance(model, Offloaded):
        raise TypeError("this is the handle of a model that is offloaded already")
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload() takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(prefetch, int | None) or isinstance(prefetch, bool):
        raise TypeError(f"prefetch is how many units may come, not {prefetch!r}")
    if prefetch is not None and prefetch < 1:
        raise ValueError("at least one unit of weights must be able to come: prefetch >= 1")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "PyTorch shows no GPU. Where there is none, a simulated one does: "
            "ebbtide run --sim 8GiB program.py"
        )
    index = _index_of(device)
    size = _limit_of(limit)
    pinned = None if host is None else parse(host, "host")
    names = _order_of(order, model)
    _refuse_twice(model)
    _refuse_kinds(model)
    torch.cuda.init()
    opened = Device(index)
    attached = _attach.is_attached()
    made = Model(model, index, order=names, prefetch=prefetch, pinned=pinned)
    before = opened.limit  # from here on that of other models does not go
    try:
        if not attached:
            _attach.attach()
        over = _set_limit(opened, size)
        with made.lock:  # others may run meanwhile, and share the ring
            made.plan()
            made.leave_gpu()  # its own weights may have been what was over the limit
        if over and _set_limit(opened, size):
            raise ValueError(_too_much(opened, index, limit))
    except BaseException:
        if size is not None:
            _set_limit(opened, before)
        with made.lock:
            made.undo()
        if not attached and _attach.is_attached():
            _attach.detach()
        raise
    if size is not None:
        made.station.limited(size, before)
    made.done()
    return Offloaded(made)


def _index_of(device: int | str | torch.device) -> int:
    """The GPU's number."""
    target = _device_of(device)
    if target.type != "cuda":
        raise ValueError(
            f"device={device!r}: weights are brought to a GPU, so it must be a CUDA device"
        )
    return torch.cuda.current_device() if target.index is None else target.index


def _device_of(device: int | str | torch.device) -> torch.device:
    """One that there is."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(f"device={device!r} is neither a GPU's number nor a device's name")
    try:
        target = None if isinstance(device, int) else torch.device(device)
        if target is not None and target.type != "cuda":
            torch.empty(0, device=target)  # PyTorch has names for more than it can use
            return target
    except (AssertionError, ImportError, RuntimeError):
        raise ValueError(
            f"device={device!r} is no device of PyTorch's here{_or_limit(device)}"
        ) from None
    index, count = device if target is None else target.index, torch.cuda.device_count()
    if index is not None and not 0 <= index < count:
        raise ValueError(
            f"device={device!r}: there is no GPU {index}, PyTorch shows {count}{_or_limit(device)}"
        )
    return torch.device("cuda", index) if target is None else target


def _or_limit(device: Any) -> str:
    """It may have been meant as one."""
    try:
        return f". For a limit, write limit={device!r}" if parse(device) >= LEAST else ""
    except ValueError:
        return ""


def _limit_of(limit: int | str | None) -> int | None:
    if limit is None:
        return None
    size = parse(limit, "limit")
    if not LEAST <= size < 1 << 63:
        raise ValueError(
            f"limit={limit!r} is {size} bytes of VRAM, which no model can use: write '8GiB', or "
            "a number of bytes"
        )
    return size


def _order_of(order: Sequence[str] | None, model: nn.Module) -> list[str] | None:
    if order is None:
        return None
    if isinstance(order, str) or not isinstance(order, Iterable):
        raise TypeError(f"order is a list of modules' names, not {order!r}")
    names, known = list(order), {name for name, _ in model.named_modules()}
    for name in names:
        if isinstance(name, nn.Module):
            raise TypeError("order takes modules' names ('layers.0'), not the modules")
        if name not in known:
            raise ValueError(f"the model has no module {name!r} that an order could name")
    return names


def _set_limit(device: Device, size: int | None) -> bool:
    """Whether more is in use than that, which cannot go now."""
    try:
        if size is not None:
            device.limit = size
    except _core.Busy:
        return True
    return False


def _too_much(device: Device, index: int, limit: int | str | None) -> str:
    """What it is that a limit has no room for."""
    stats, tensors = device.stats(), torch.cuda.memory_reserved(index)
    held = [f"PyTorch holds {tensors >> 20} MiB of GPU {index} for other tensors"]
    advice = "free them, or raise the limit"
    if stats["pinned"]:
        held.append(f"{stats['pinned'] >> 20} MiB of weights are in use")
        advice = "let passes end, free tensors, or raise the limit"
    if stats["for_graphs"]:
        held.append(f"{stats['for_graphs'] >> 20} MiB of weights are kept for CUDA graphs")
        advice = (
            "call graphs_gone() of the models' handles when the graphs have been deleted, free "
            "tensors, or raise the limit"
        )
    return f"{' and '.join(held)}, which is too much for limit={limit!r}: {advice}"


def _refuse_twice(model: nn.Module) -> None:
    for other in [m for m in changed.models() if m.gates]:
        parts = other.parts()
        if model in parts:
            raise ValueError("this model, or one that it is part of, is offloaded already")
        for part in model.modules():
            if part in parts:
                name = type(part).__name__
                raise ValueError(f"a part of this model, a {name}, is offloaded already")
        if any(part in other.weights.names for part in model.modules()):
            other.let_go()  # it was taken out of that one


def _refuse_kinds(model: nn.Module) -> None:
    """What has no forward() that could be gone around, or no values yet."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        if module is model or changed.weighs(module):
            raise TypeError(
                f"{name or 'the model'} is compiled by torch.jit, which keeps where weights are: "
                "offload the model that it was made of"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet (it is lazy): run the model once before")
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no values (it is on the meta device): load them first")


class Offloaded:
    """The handle of an offloaded model. Call the model, not this. It does not keep the model: when
    that is deleted, everything of it is given back, but what captured graphs use: see
    graphs_gone()."""

    def __init__(self, model: Model) -> None:
        self._ref = weakref.ref(model)
        self._graphs = model.graphs

    def _model(self) -> Model:
        found = self._ref()
        if found is None or not found.gates:
            raise _core.Gone("the model was deleted, or restored")
        return found

    __reduce_ex__ = not_pickled

    def __copy__(self) -> Offloaded:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Offloaded:
        return self

    def __repr__(self) -> str:
        try:
            stats = self.stats()
        except _core.Gone:
            return "<ebbtide.Offloaded: gone>"
        resident = min(stats["resident"], stats["bytes"])  # in pages, it may be a little more
        return (
            f"<ebbtide.Offloaded: {resident >> 20} of {stats['bytes'] >> 20} MiB "
            f"resident, {stats['units']} units>"
        )

    def stats(self) -> dict[str, int]:
        """Bytes and counts; docs/offload.md explains each. `ring` is of all models on the GPU."""
        return self._model().stats()

    def residency(self) -> dict[str, float]:
        """Of each unit, in the order in which they run, the part that is resident."""
        return {u.name: u.resident / u.bytes for u in self._model().units if u.bytes}

    def prioritize(self) -> None:
        """Make it the most important model of its GPU."""
        self._model().prioritize()

    def pin(self, module: nn.Module) -> None:
        """Keep a module's weights resident before all others."""
        self._model().pin(module)

    def exclude(self, module: nn.Module) -> None:
        """Put a module's weights on the GPU, as plain tensors, and leave them alone."""
        self._model().exclude(module)

    def graphs_gone(self) -> None:
        """No captured graph uses its weights any more: until then, those that one uses stay, also
        when the model is deleted or restored."""
        model = self._ref()
        if model is not None:
            model.graphs_gone()
        self._graphs.gone()

    def restore(self, device: str | torch.device = "cpu") -> nn.Module:
        """Make it a plain model again, with its weights on `device`."""
        return self._model().restore(_device_of(device))


def is_parked(tensor: Any) -> bool:
    """Whether a tensor is a weight at rest."""
    return isinstance(tensor, Parked)
