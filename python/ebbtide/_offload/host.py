"""The host's side: memory that the GPU copies from at the link's speed.

Weights are packed into pinned memory, unit by unit, so that a unit is one copy; each original is
let go of as soon as it is packed, so a model is in RAM once, and a block more. What is pinned
already, or a file that is mapped, is left where it is.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ebbtide import _core

ALIGNMENT = 512
BLOCK = 1 << 30  # how much is pinned at once, if units are no larger


def _free(mover: _core.Mover, index: int, address: int) -> None:
    # Copies that still read it would read what is somebody else's by then.
    torch.cuda.synchronize(index)
    mover.unpin(address)


class Arena:
    """Pinned memory, taken from the front. Blocks live as long as a tensor over them does."""

    def __init__(self, mover: _core.Mover, index: int, most: int | None = None) -> None:
        self.mover = mover
        self.most = most  # bytes to pin; None: as many as it takes
        self.index = index
        self.block: torch.Tensor | None = None
        self.used = 0

    def reserve(self, upcoming: Sequence[int]) -> None:
        """Make sure that the next regions, in this order, lie in one block where they can."""
        need = sum(_up(size) for size in upcoming)
        if not need:
            return
        if self.block is None or self.used + need > self.block.numel():
            self.block = self._new(need)
            self.used = 0

    def take(self, size: int) -> torch.Tensor:
        """The next bytes."""
        if self.block is None or self.used + size > self.block.numel():
            self.reserve([size])
        assert self.block is not None
        part = self.block[self.used : self.used + size]
        self.used += _up(size)
        return part

    def _new(self, size: int) -> torch.Tensor:
        if self.most is not None:
            if size > self.most:
                return torch.empty(size, dtype=torch.uint8)
            self.most -= size
        try:
            address = self.mover.pin(size)
        except (_core.Error, MemoryError):
            return torch.empty(size, dtype=torch.uint8)  # slower, and it works
        memory = (ctypes.c_char * size).from_address(address)
        finalizer = weakref.finalize(memory, _free, self.mover, self.index, address)
        finalizer.atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _files() -> list[tuple[int, int]]:
    """Where in memory files are mapped, in rising order."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and int(fields[4]):
            start, end = (int(x, 16) for x in fields[0].split("-"))
            found.append((start, end))
    return found


class Loan:
    """Memory of somebody else, which the GPU may copy from as long as this is held."""

    def __init__(self, mover: _core.Mover, index: int, tensor: torch.Tensor, source: int) -> None:
        address = tensor.data_ptr()
        # How far from the memory itself the GPU finds it: of a file that is mapped privately the
        # same pages are mapped once more.
        self.shift = source - address
        # It stays mapped until it has been given back: another file may come to lie there.
        args = mover, index, address, tensor.nbytes, tensor.untyped_storage()
        weakref.finalize(self, _return, *args).atexit = False


def _return(mover: _core.Mover, index: int, address: int, size: int, _: Any) -> None:
    torch.cuda.synchronize(index)
    mover.give_back(address, size)


class Lender:
    """What of memory that others have is left where it is."""

    def __init__(self, mover: _core.Mover, index: int) -> None:
        self.mover = mover
        self.index = index
        self.files: list[tuple[int, int]] | None = None

    def begin(self) -> None:
        """What was looked up before may not be so any more."""
        self.files = None

    def _mapped(self, address: int) -> bool:
        if self.files is None:
            self.files = _files()
        at = bisect.bisect(self.files, (address, sys.maxsize)) - 1
        return at >= 0 and address < self.files[at][1]

    def ask(
        self, tensor: torch.Tensor, low: int, high: int
    ) -> tuple[torch.Tensor, Loan | None] | None:
        """These bytes of a tensor's storage, if the GPU can copy from them where they are; and what
        is to be held as long as it does."""
        if tensor.device.type != "cpu":
            return None
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, low, (high - low,), (1,))
        # A file may be pinned because another weight of it is borrowed: that is no weight's own.
        if not self._mapped(flat.data_ptr()):
            return (flat, None) if tensor.is_pinned() else None
        if flat.nbytes < mmap.PAGESIZE:
            return None
        source = self.mover.borrow(flat.data_ptr(), flat.nbytes)
        return None if source is None else (flat, Loan(self.mover, self.index, flat, source))
