"""CPU tensors over device memory, and CUDA tensors for results that the CPU's kernels made."""

from __future__ import annotations

import ctypes

import torch

CPU = torch.device("cpu")

_storage_at = torch._C._construct_storage_from_data_pointer
_empty = torch.empty
_empty_strided = torch.empty_strided
_move = ctypes.memmove


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a CUDA tensor: same shape, strides, dtype and bits."""
    storage = tensor.untyped_storage()
    other = _empty(0, dtype=tensor.dtype)
    other.set_(
        _storage_at(storage.data_ptr(), CPU, storage.nbytes()),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )
    # Bits that say "this is a conjugate, or a negative, of what is stored".
    if tensor.is_conj():
        other = other.conj()
    if tensor.is_neg():
        other = torch._neg_view(other)
    return other


def lift(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with a CPU result's contents, from PyTorch's CUDA allocator."""
    if result.is_conj() or result.is_neg():
        result = result.resolve_conj().resolve_neg()
    lifted = _empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    count = result.numel()
    if count == 0:
        return lifted
    size = count * result.element_size()
    if result.is_contiguous() or result.untyped_storage().nbytes() == size:
        _move(lifted.data_ptr(), result.data_ptr(), size)  # no gaps, whatever the strides
    else:
        alias(lifted).copy_(result)
    return lifted


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte and how many bytes it reaches over."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    reach = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        reach += (size - 1) * stride
    return tensor.data_ptr(), reach * tensor.element_size()
