"""Tensors over a VBAR's addresses, and PyTorch's streams: what vbar.py needs torch for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ebbtide.vbar import Weight


def current_stream() -> Callable[[int], int]:
    """The function that gives the address of a device's current stream."""
    # Without CUDA there is no stream but the driver's default one.
    found = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if found is None or not torch.cuda.is_available():
        return lambda index: 0
    torch.cuda.init()
    return found


def current_stream_at() -> int:
    """The address of a C function that does the same, ten times as fast; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    try:
        # Loaded already; only its name in this process is asked for.
        library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        found = library.aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def lasts(index: int, stream: int) -> bool:
    """Whether the current stream is one of PyTorch's own, which are never destroyed."""
    # An external stream's id is its address; PyTorch's own have small numbers.
    return torch.cuda.current_stream(index).stream_id != stream


def over(weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a weight's addresses. It keeps the VBAR, and touches nothing."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype, not {dtype!r}")
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or count * dtype.itemsize > weight.nbytes:
        raise ValueError(f"{list(shape)} of {dtype} do not fit into {weight!r}")
    # It is kept, and may be used outside of inference_mode() later.
    with torch.inference_mode(False):
        plain = torch.utils.dlpack.from_dlpack(weight._dlpack())
        # Through the storage, not view(): some dtypes know no view.
        typed = torch.empty(0, dtype=dtype, device=plain.device)
        # Strides too: quantized dtypes do not work them out.
        strides = torch.empty(shape, device="meta").stride()
        return typed.set_(plain.untyped_storage(), 0, shape, strides)


def temporary(weight: Weight, host: torch.Tensor) -> torch.Tensor:
    """The values of `host` where the weight would be, in memory of PyTorch's own."""
    device, host = weight.vbar.device, host.detach()
    if device._beside:
        return host.clone()
    return torch.empty_like(host, device=f"cuda:{device.index}").copy_(host, non_blocking=True)
