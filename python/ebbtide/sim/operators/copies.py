"""copy_: PyTorch's own where it moves bytes, ours where it would launch a kernel.

PyTorch's own carries the semantics of pinned memory, non_blocking and several devices, and comes
back
here by itself for the parts that need a kernel (another dtype, other strides).
"""

from __future__ import annotations

import torch

from ebbtide import _sim
from ebbtide.sim.operators.capture import capture_copy
from ebbtide.sim.operators.memory import Ranges, alias, span
from ebbtide.sim.operators.plan import READ, WRITE

_stream_of = torch._C._cuda_getCurrentRawStream
_copy = torch.ops.aten.copy_.default.redispatch
# copy_ is one function for all backends, found by key; another backend's entry is that function
# too,
# and nobody registers another for it.
_ANOTHER_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)


def native_copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    return _copy(_ANOTHER_BACKEND, self, source, non_blocking)


def _moves_bytes(self: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        self.dtype == source.dtype
        and self.is_contiguous()
        and source.is_contiguous()
        and self.size() == source.size()
        and self.is_conj() == source.is_conj()
        and self.is_neg() == source.is_neg()
    )


def _between_devices(self: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Another dtype or other strides on another device: in steps that each are one or the other."""
    staged = torch.empty(source.size(), dtype=self.dtype, device=source.device)
    staged.copy_(source)
    target = self if self.is_contiguous() else torch.empty_like(staged, device=self.device)
    native_copy_(target, staged, non_blocking)
    if target is not self:
        self.copy_(target)


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if self.device != source.device:
        if self.is_cuda and source.is_cuda and not _moves_bytes(self, source):
            _between_devices(self, source.expand_as(self), non_blocking)
            return self
        return native_copy_(self, source, non_blocking)
    if _moves_bytes(self, source):
        return native_copy_(self, source, non_blocking)
    index = self.device.index
    stream = _stream_of(index)
    ranges = Ranges()
    ranges.add(*span(source), READ)
    ranges.add(*span(self), WRITE)
    if _sim.catch_up(index, stream):
        capture_copy(index, stream, self, source, ranges)
        return self
    alias(self).copy_(alias(source))
    _sim.touched(index, stream, "aten::copy_", 0.0, ranges)
    return self


OPERATORS = {"aten::copy_": copy_}
