"""offload(), and the handle it gives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ebbtide import _attach, _core
from ebbtide._offload.model import Model
from ebbtide._offload.parked import Parked
from ebbtide._offload.station import Station
from ebbtide.sizes import parse
from ebbtide.vbar import Device


def offload(
    model: nn.Module,
    device: int | str | torch.device = "cuda",
    *,
    limit: int | str | None = None,
    order: Sequence[str] | None = None,
    prefetch: int | None = None,
    host: int | str | None = None,
) -> Offloaded:
    """Let a model's weights come to the GPU and go by themselves.

    Everything else is as if the model were on the GPU: call it with inputs that are there. Weights
    stay resident as far as there is room, and the others are streamed while the model runs.

    `limit` is the VRAM that this process may use, weights, activations and all (as much as there
    is, if none is given). `order` names modules in the order in which they run, where the first
    pass shall not be asked for it; `prefetch` is how many units of weights may be on their way or
    in passing use at once (as many as it takes, two at most); `host` how much memory may be pinned
    on the host (all that the weights need).
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
        raise RuntimeError("PyTorch shows no GPU: there is nothing to offload from")
    if not isinstance(device, int | str | torch.device):
        raise TypeError(f"device is a GPU's number or name, not {device!r}")
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"a model is offloaded from a GPU, not from {target}")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU {index}: PyTorch shows {torch.cuda.device_count()}")
    _refuse_twice(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no values (it is on the meta device): load them first")
    size = None if limit is None else parse(limit)
    if size is not None and size <= 0:
        raise ValueError(f"a model needs some VRAM: limit={limit!r}")
    pinned = None if host is None else parse(host)
    if isinstance(order, str):
        raise TypeError(f"order is a list of modules' names, not {order!r}")
    names = {name for name, _ in model.named_modules()}
    for name in order or ():
        if name not in names:
            raise ValueError(f"the model has no module {name!r} that an order could name")
    torch.cuda.init()
    opened = Device(index)
    before = opened.limit
    try:
        if not _attach.is_attached():
            _attach.attach(limit=size)
        if size is not None:
            opened.limit = size
        made = Model(model, index, order=order, prefetch=prefetch, pinned=pinned)
    except BaseException:
        if size is not None:
            opened.limit = before
        raise
    return Offloaded(made)


def _refuse_twice(model: nn.Module) -> None:
    others = [m for station in list(Station._all.values()) for m in list(station.models)]
    for other in [m for m in others if m.gates]:
        parts = other.parts()
        if model in parts:
            raise ValueError("this model, or one that it is part of, is offloaded already")
        for part in model.modules():
            if part in parts:
                name = type(part).__name__
                raise ValueError(f"a part of this model, a {name}, is offloaded already")
        if any(part in other.weights.names for part in model.modules()):
            other.let_go()  # it was taken out of that one


class Offloaded:
    """The handle of an offloaded model. It does not keep the model: when that is deleted,
    everything of it is given back."""

    def __init__(self, model: Model) -> None:
        self._ref = weakref.ref(model)

    def _model(self) -> Model:
        found = self._ref()
        if found is None:
            raise _core.Gone("the model was deleted, or restored")
        return found

    def __repr__(self) -> str:
        model = self._ref()
        if model is None:
            return "<ebbtide.Offloaded: gone>"
        stats = self.stats()
        return (
            f"<ebbtide.Offloaded: {stats['resident'] >> 20} of {stats['bytes'] >> 20} MiB "
            f"resident, {stats['units']} units>"
        )

    def stats(self) -> dict[str, int]:
        """What it has, in bytes and counts."""
        return self._model().stats()

    def residency(self) -> dict[str, float]:
        """Of each unit, in the order in which they run, the part that is resident."""
        return {u.name: u.resident / u.bytes for u in self._model().units if u.bytes}

    def prioritize(self) -> None:
        """Make it the most important model of its GPU."""
        model = self._model()
        if model.vbar is not None:
            model.vbar.prioritize()
        model.tracking = True

    def pin(self, module: nn.Module) -> None:
        """Keep a module's weights resident before all others."""
        self._model().pin(module)

    def exclude(self, module: nn.Module) -> None:
        """Put a module's weights on the GPU, as plain tensors, and leave them alone."""
        self._model().exclude(module)

    def graphs_gone(self) -> None:
        """No captured graph uses its weights any more: until then, those that one uses stay."""
        model = self._model()
        if model.vbar is not None:
            model.vbar.graphs_gone()

    def restore(self, device: str | torch.device = "cpu") -> nn.Module:
        """Make it a plain model again, with its weights on `device`."""
        return self._model().restore(torch.device(device))


def is_parked(tensor: Any) -> bool:
    """Whether a tensor is a weight at rest."""
    return isinstance(tensor, Parked)
