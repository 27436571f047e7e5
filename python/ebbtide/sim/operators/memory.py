"""CPU tensors over device memory, and CUDA tensors for results that the CPU's kernels made."""

from __future__ import annotations

import ctypes
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ebbtide import _sim

Ranges = _sim.Ranges
forget = _sim.forget  # no alias is given out again
CPU = torch.device("cpu")
MOST_STORAGES = 8192  # that are kept; past so many they are all forgotten

_storage_at = torch._C._construct_storage_from_data_pointer
_empty = torch.empty
_in_inference = torch.is_inference_mode_enabled

_storages: dict[tuple[int, int], Any] = {}


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """A new CPU tensor over a CUDA tensor's memory."""
    key = storage_of(tensor)
    host = _storages.get(key)
    if host is None:
        if len(_storages) >= MOST_STORAGES:
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


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and size of a tensor's storage. Not by untyped_storage(), where it can be helped:
    autograd adds gradients up in place only where Python has not seen the storage."""
    if tensor.numel() == 0:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    size = ctypes.c_int64()
    if _storage_size(ctypes.byref(ctypes.c_void_p(tensor._cdata)), ctypes.byref(size)):
        raise RuntimeError("PyTorch does not say how large a tensor's storage is")
    return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size(), size.value


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a CUDA tensor: same shape, strides, dtype and bits."""
    if _in_inference():
        # Made in inference mode it could not be written to outside of it.
        with torch.inference_mode(False):
            return _over(tensor)
    return _over(tensor)


def lift(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with a CPU result's contents, from PyTorch's CUDA allocator."""
    made = _sim.lift(result, device, Ranges(), 0)
    if made is None:
        raise NotImplementedError(
            f"a result of {result.dtype} and {result.layout} cannot come to the simulated GPU"
        )
    return made


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


# ---- what _tensors.c and _seen.c are told of this PyTorch ----------------------------------------

_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_storage_size = _library.aoti_torch_get_storage_size
# In the order of the struct there.
_FUNCTIONS = (
    "layout",
    "data_ptr",
    "storage_size",
    "storage_offset",
    "dim",
    "sizes",
    "strides",
    "dtype",
    "device_type",
    "device_index",
)


def _reached(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    return alias(tensor), *span(tensor)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def _bind() -> None:
    addresses = []
    for name in _FUNCTIONS:
        function = getattr(_library, f"aoti_torch_get_{name}", None)
        addresses.append(ctypes.cast(function, ctypes.c_void_p).value if function else 0)
    if 0 in addresses[1:]:
        raise ImportError("this PyTorch's C interface lacks a function")
    sample = torch.empty(0, device=CPU)
    _sim.bind(
        tuple(addresses),
        sample,
        sample._cdata,
        torch._C.TensorBase,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
        _reached,
        torch.empty_strided,
        _resolved,
        torch.strided,
        torch._C._cuda_getCurrentRawStream,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
            with suppress(RuntimeError):  # no tensor can have it
                _sim.know(torch.empty(0, dtype=dtype, device=CPU), dtype, dtype.itemsize)


def _learn() -> bool:
    """Show _seen.c where a tensor's C++ object has what; whether it knows now. Each of the others
    differs in one thing that an alias depends on."""
    sizes, strides, offset = (2, 3, 2, 3, 2), (1000, 101, 37, 11, 3), 17
    base = torch.empty(5003, device=CPU)
    sample = base.as_strided(sizes, strides, offset)
    others = (
        base.as_strided((1, *sizes[1:]), strides, offset),
        base.as_strided(sizes, (999, *strides[1:]), offset),
        base.as_strided(sizes, strides, offset + 1),
        base.view(torch.int32).as_strided(sizes, strides, offset),
        torch._neg_view(sample),
        torch.empty(5003, device="meta").as_strided(sizes, strides, offset),
    )
    storage = base.untyped_storage()
    keys = torch._C._dispatch_keys(sample).raw_repr()
    address, size = storage.data_ptr(), storage.nbytes()
    return _sim.learn(sample, storage._cdata, keys, address, size, others)


_bind()
recognises = _learn()  # else PyTorch is asked each time
