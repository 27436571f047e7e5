"""Where in its memory a tensor is, and the bytes that are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

LARGEST_ITEM = 16  # bytes of an element

Tensor = TypeVar("Tensor", bound=torch.Tensor)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where, in elements of its storage, a tensor begins and ends."""
    first = tensor.storage_offset()
    if tensor.numel() == 0:
        return first, first
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + reach + 1


def flat(storage: torch.UntypedStorage, low: int, high: int) -> torch.Tensor:
    """A storage's bytes from one to another: a tensor with a version of its own."""
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, low, (high - low,), (1,))


def read_as(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """Its bytes are its values' conjugates, or negatives: PyTorch puts it off to compute those."""
    tensor = torch._conj(tensor) if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


def is_its_bytes(tensor: torch.Tensor) -> bool:
    """And neither their conjugates nor their negatives."""
    return not (tensor.is_conj() or tensor.is_neg())


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """What is made meanwhile outlives whatever mode it is made in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Region:
    """A part of a storage, in bytes: of one tensor, or of several that overlap."""

    __slots__ = ("high", "low", "several")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.several = False


def regions(tensors: Iterable[Tensor], storage_of: Callable[[Tensor], Any]) -> dict[int, Region]:
    """By tensor, the region that it is in. Tensors of one storage that do not overlap (those of a
    file are often of one) are as good as of two."""
    by_storage: dict[Any, list[tuple[int, int, torch.Tensor]]] = {}
    for tensor in tensors:
        item, (first, end) = tensor.dtype.itemsize, extent(tensor)
        by_storage.setdefault(storage_of(tensor), []).append((first * item, end * item, tensor))
    found: dict[int, Region] = {}
    for extents in by_storage.values():
        extents.sort(key=lambda extent: extent[:2])
        region = None
        for low, high, tensor in extents:
            if region is None or low >= region.high:
                region = Region(low, high)
            else:
                region.several = True
                region.high = max(region.high, high)
                # Where dtypes differ, an element of one may begin inside of one of the other.
                region.low = region.low // LARGEST_ITEM * LARGEST_ITEM
            found[id(tensor)] = region
    return found
