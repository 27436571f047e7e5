"""copy_: PyTorch's own where it moves bytes, ours where it would launch a kernel.

PyTorch's own carries the semantics of pinned memory, non_blocking and several devices, and comes
back
here by itself for the parts that need a kernel (another dtype, other strides).
"""

from __future__ import annotations

import torch

from ebbtide import _sim
from ebbtide.sim.operators.memory import alias, span

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


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if self.device != source.device or _moves_bytes(self, source):
        return native_copy_(self, source, non_blocking)
    index = self.device.index
    stream = _stream_of(index)
    _sim.catch_up(index, stream)
    alias(self).copy_(alias(source))
    to, from_ = span(self), span(source)
    if to[1] and from_[1]:
        _sim.touched(stream, "aten::copy_", 0.0, *from_, 1, *to, 2)
    return self


OPERATORS = {"aten::copy_": copy_}
