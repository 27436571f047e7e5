"""Tensors that outlive the use of a unit.

What a module finds in its places while it runs is over memory that is somebody else's when the
unit is left. Some of it goes on: a table of positions is given away by its rows, functional_call()
puts weights back where they were. A result becomes a copy; what is put into a module is the weight
itself again, parked.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ebbtide._offload.memory import extent
from ebbtide._offload.parked import Parked, park
from ebbtide._offload.station import Station
from ebbtide._offload.unit import Unit

# Kinds of objects that are no results, or have more in them than a result has.
_OPAQUE = (torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def parts(value: Any) -> list[Any]:
    """What is in a result that is neither a tensor nor a tuple, list or dict."""
    if isinstance(value, (set, frozenset, deque)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(_attributes(value).values())


def _attributes(value: Any) -> dict[str, Any]:
    """Of a dataclass, a namespace, or another object that holds tensors."""
    if isinstance(value, _OPAQUE):
        return {}
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    found = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
    return {**getattr(value, "__dict__", {}), **found}


def copied(value: Any, held: Callable[[Any], bool]) -> Any:
    """A result of which every tensor that is held is a copy. What can be changed stays the same."""
    if isinstance(value, torch.Tensor):
        return _copy(value) if held(value) else value
    if not held(value):
        return value
    if isinstance(value, (list, deque, dict)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = copied(item, held)
    elif isinstance(value, tuple):
        items = [copied(item, held) for item in value]
        make = getattr(value, "_make", type(value))  # a named one takes them one by one
        return make(items)
    elif isinstance(value, (set, frozenset)):
        return type(value)(copied(item, held) for item in value)
    elif isinstance(value, types.MappingProxyType):
        return types.MappingProxyType({key: copied(item, held) for key, item in value.items()})
    else:
        for name, item in _attributes(value).items():
            if held(item):
                object.__setattr__(value, name, copied(item, held))  # it may be frozen
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides: what is computed with it may depend on them, to the bit."""
    first, end = extent(tensor)
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
    for station in Station.all():
        for model in station.models:
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
            value.is_conj(),
            value.is_neg(),
            parameter=isinstance(value, torch.nn.Parameter),
            requires_grad=value.requires_grad,
        )
    return value.clone()
