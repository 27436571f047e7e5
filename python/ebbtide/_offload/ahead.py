"""What the processor will need, layer by layer: the addresses of it (_core_ahead.c says why).

Where CPython and PyTorch have things is their own affair, and other versions may have them
elsewhere. Then other lines are asked for, which helps nobody and harms nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ebbtide import _core

Range = tuple[int, int]  # an address, and bytes

BEFORE = 32  # what the garbage collector has in front of an object
MOST = 1536  # bytes of a dict's table
TENSOR = 208  # bytes of what a tensor is in C++,
GRADIENTS, OF_GRADIENTS = 24, 160  # where in it is what says that it wants gradients; its bytes
# Where nn.Module's __call__ looks whether there is a hook.
HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")


def of_module(module: nn.Module) -> list[Range]:
    """A call of it, and a look into its parameters."""
    own = module.__dict__
    found = [_object(module, 16), *_dict(own)]
    if isinstance(parameters := own.get("_parameters"), dict):  # torch.jit has others
        found += _dict(parameters)
    found += [_object(own[name], 32) for name in HOOKS if name in own]
    return found


def of_tensor(tensor: Any) -> list[Range]:
    """An operator's look at it."""
    if not isinstance(tensor, torch.Tensor):
        return []
    found = [_object(tensor, 80), (tensor._cdata, TENSOR)]
    if tensor.requires_grad:  # every operator asks for that
        found.append((ctypes.c_size_t.from_address(tensor._cdata + GRADIENTS).value, OF_GRADIENTS))
    return found


def of_memory(tensor: torch.Tensor) -> list[Range]:
    """The same, with what says where its memory is, if it is one piece of memory."""
    found = of_tensor(tensor)
    with contextlib.suppress(RuntimeError):
        found.append((tensor.untyped_storage()._cdata, 64))
    return found


def _object(thing: Any, size: int) -> Range:
    return id(thing) - BEFORE, BEFORE + size


def _dict(thing: dict[Any, Any]) -> Iterable[Range]:
    head = thing.__class__.__basicsize__
    size = sys.getsizeof(thing) - head
    return _object(thing, head), (_core.table_of(thing), min(max(size, 64), MOST))
