"""Copies between the cards of one process, which PyTorch does by NCCL where it can.

NCCL launches kernels. PyTorch has another way for tensors that NCCL cannot take: ordinary copies
and additions. That way is taken here for all, by the functions below in place of PyTorch's own, so
that torch.cuda.comm and DataParallel run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> list[Tensor]:
    for i, to in enumerate(out):
        if not to.is_cuda:
            raise RuntimeError(
                "Expected all output tensors to be CUDA tensors, but output tensor at index "
                f"{i} has device '{to.device}'"
            )
        if to.shape != tensor.shape:
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{list(tensor.shape)}, but output tensor at index {i} has shape {list(to.shape)}"
            )
    for to in out:
        to.copy_(tensor, non_blocking=True)
    return list(out)


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    if not devices:
        raise RuntimeError("broadcast expects at least one device")
    return [
        tensor
        if tensor.is_cuda and tensor.get_device() == device
        else tensor.to(torch.device("cuda", device), non_blocking=True, copy=True)
        for device in devices
    ]


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    """How the copies are bundled makes no difference to what they give."""
    if any(t.get_device() != devices[0] for t in tensors):
        raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
    copies = [broadcast(t.detach(), devices[1:]) for t in tensors] if devices[1:] else []
    return [list(tensors), *(list(group) for group in zip(*copies, strict=True))]


def _no(_: Any) -> bool:
    return False


def install() -> None:
    torch._C._broadcast = broadcast
    torch._C._broadcast_out = broadcast_out
    torch._C._broadcast_coalesced = broadcast_coalesced
    torch.cuda.nccl.is_available = _no
