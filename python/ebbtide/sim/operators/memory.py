"""CPU tensors over device memory, and CUDA tensors for results that the CPU's kernels made."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CPU = torch.device("cpu")
# An alias owns nothing, so it stays right for as long as it is asked for by the same address and
# shape. Past so many they are all forgotten.
MOST_ALIASES = 8192

_storage_at = torch._C._construct_storage_from_data_pointer
_empty = torch.empty
_empty_strided = torch.empty_strided
_in_inference = torch.is_inference_mode_enabled
_move = ctypes.memmove

Reach = tuple[torch.Tensor, int, int]
_storages: dict[tuple[int, int], Any] = {}
_aliases: dict[tuple[Any, ...], Reach] = {}


def _over(tensor: torch.Tensor, storage: Any) -> torch.Tensor:
    """A new CPU tensor over a CUDA tensor's memory."""
    key = (storage.data_ptr(), storage.nbytes())
    host = _storages.get(key)
    if host is None:
        if len(_storages) >= MOST_ALIASES:
            _storages.clear()
        # One storage for all aliases of one memory: kernels look for overlaps by that.
        host = _storages[key] = _storage_at(key[0], CPU, key[1])
    other = _empty(0, dtype=tensor.dtype, device=CPU)
    other.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())
    # Bits that say "this is a conjugate, or a negative, of what is stored".
    if tensor.is_conj():
        other = other.conj()
    if tensor.is_neg():
        other = torch._neg_view(other)
    return other


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a CUDA tensor: same shape, strides, dtype and bits."""
    return _over(tensor, tensor.untyped_storage())


def reach(tensor: torch.Tensor) -> Reach:
    """An alias, and the memory it reaches over. The alias is kept and given out again: it must not
    get another shape."""
    storage = tensor.untyped_storage()
    key = (
        storage.data_ptr(),
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    found = _aliases.get(key)
    if found is None:
        if len(_aliases) >= MOST_ALIASES:
            _aliases.clear()
        if _in_inference():
            # Made in inference mode it could not be written to outside of it.
            with torch.inference_mode(False):
                found = (_over(tensor, storage), *span(tensor))
        else:
            found = (_over(tensor, storage), *span(tensor))
        if found[2]:
            # Empty tensors have all one address, and yet are not one tensor.
            _aliases[key] = found
    return found


def reach_all(tensors: list[Any], index: int, ranges: list[int], access: int) -> list[Any] | None:
    """The aliases of a list of tensors that are all on one device; `ranges` gets what they reach
    over. None: they are not, or not all there. As reach(), written out: lists are long."""
    made = []
    get = _aliases.get
    for tensor in tensors:
        if tensor is None or tensor.get_device() != index:
            return None
        storage = tensor.untyped_storage()
        found = get(
            (
                storage.data_ptr(),
                storage.nbytes(),
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
                tensor.dtype,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        ) or reach(tensor)
        made.append(found[0])
        if found[2]:
            ranges += (found[1], found[2], access)
    return made


def forget() -> None:
    """No alias is given out again."""
    _aliases.clear()


def lifted(result: torch.Tensor, device: torch.device) -> Reach:
    """A CUDA tensor with a CPU result's contents, from PyTorch's CUDA allocator, and the memory it
    reaches over."""
    if result.is_conj() or result.is_neg():
        result = result.resolve_conj().resolve_neg()
    made = _empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    at = made.data_ptr()
    # The same strides reach over as many bytes, with or without gaps.
    start, size = span(result)
    if size:
        _move(at, start, size)
    return made, at, size


def lift(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with a CPU result's contents."""
    return lifted(result, device)[0]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte and how many bytes it reaches over."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    extent = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        extent += (size - 1) * stride
    return tensor.data_ptr(), extent * tensor.element_size()
