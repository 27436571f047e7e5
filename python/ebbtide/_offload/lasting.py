"""Tensors that outlive the use of a unit.

What a module finds in its places while it runs is over memory that is somebody else's when the
unit is left. Some of it goes on: a table of positions is given away by its rows, functional_call()
puts weights back where they were. A result becomes a copy; what is put into a module is the weight
itself again, parked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide._offload.parked import Parked, _extent, park
from ebbtide._offload.station import Station
from ebbtide._offload.unit import Unit


def copied(value: Any, held: Callable[[Any], bool]) -> Any:
    """A result of which every tensor that is held is a copy. Lists and dicts stay the same ones."""
    if isinstance(value, torch.Tensor):
        return _copy(value) if held(value) else value
    if isinstance(value, (list, dict)) and held(value):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            if held(item):
                value[key] = copied(item, held)
    elif isinstance(value, tuple) and held(value):
        items = [copied(item, held) for item in value]
        make = getattr(value, "_make", type(value))  # a named one takes them one by one
        return make(items)
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides: what is computed with it may depend on them, to the bit."""
    first, end = _extent(tensor)
    flat = tensor.as_strided((end - first,), (1,), first).clone()
    return flat.as_strided(tensor.size(), tensor.stride(), 0)


def settled(value: Any) -> Any:
    """What is put into a module: if it is over a weight's memory, then that weight, or a view of
    it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Parked) or not value.is_cuda:
        return value
    try:
        at = value.data_ptr()
    except RuntimeError:
        return value  # more than its memory
    for station in list(Station._all.values()):
        for model in list(station.models):
            if not model.keep.knows(at):
                continue
            with model.lock:
                for unit in model.units:
                    if unit.covers(at):
                        model.save_written(unit)  # from now on the host is asked
                        return _parked(value, at, unit)
    return value


def _parked(value: torch.Tensor, at: int, unit: Unit) -> torch.Tensor:
    for b, made in unit.now():
        if made is value:
            return b.parked
        start = made.data_ptr() - b.parked.storage_offset() * b.parked.dtype.itemsize
        offset, odd = divmod(at - start, value.dtype.itemsize)
        if not 0 <= at - start < b.piece.nbytes or odd:
            continue
        return park(
            b.piece,
            value.dtype,
            value.size(),
            value.stride(),
            offset,
            parameter=isinstance(value, torch.nn.Parameter),
            requires_grad=value.requires_grad,
        )
    return value.clone()
