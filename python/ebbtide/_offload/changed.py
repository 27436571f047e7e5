"""What somebody puts into a module: whether its model has to be planned anew for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide._offload.gates import Gate
from ebbtide._offload.parked import Parked
from ebbtide._offload.station import Station

if TYPE_CHECKING:
    from ebbtide._offload.model import Model


def models() -> list[Model]:
    """All that there are."""
    return [model for station in Station.all() for model in station.models]


def matters(old: Any, new: Any, of: Sequence[Model]) -> bool:
    """Whether it does that a buffer is another one, to one of these models: if that one paged, or
    this one will, or has to be brought to the GPU."""
    if isinstance(old, Parked) or isinstance(new, Parked):
        return True
    if new is None or not of:
        return False
    if not isinstance(new, torch.Tensor) or all(new.device != m.torch_device for m in of):
        return True
    return all(model.weights._pageable(new, buffer=True) for model in of)


def is_made(model: Model, new: Any) -> bool:
    """Whether a large buffer is what a pass has just made. It is likely to be made again, so it
    stays where it is, like one that is written."""
    if not isinstance(new, torch.Tensor) or isinstance(new, Parked):
        return False
    if new.device != model.torch_device or not (model.running.depth or model._busy()):
        return False
    return model.weights._pageable(new, buffer=True)


def weighs(module: nn.Module | None) -> bool:
    """Whether there are tensors in it, or ways into units."""
    for part in () if module is None else module.modules():
        for place in (part._parameters, part._buffers):
            # Ours would look whose unit is entered; those of torch.jit's modules are no dicts.
            tensors = dict.values(place) if isinstance(place, dict) else place.values()
            if any(tensor is not None for tensor in tensors):
                return True
        if isinstance(part.__dict__.get("forward"), Gate):
            return True
    return False
