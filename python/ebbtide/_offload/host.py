"""The host's side: memory that the GPU copies from at the link's speed.

Weights are packed into pinned memory, unit by unit, so that a unit is one copy; each original is
let go of as soon as it is packed, so a model is in RAM once, and a unit more. What is pinned
already, or a file that is mapped, is left where it is.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ebbtide import _core
from ebbtide._offload.memory import flat

ALIGNMENT = 512


# What could not be given back when it was let go of, because a graph was being captured, and what
# is to be held until it is. The model may be gone by then, so it is nobody's.
_later: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []


def _give_back(function: Callable[..., Any], arguments: tuple[Any, ...], held: Any = None) -> None:
    """Give pinned memory back, now or at the next occasion. The garbage collector may call this in
    any thread, at any time."""
    _later.append((function, arguments, held))
    tidy()


def tidy() -> None:
    """Give back what could not be given back before."""
    waiting = _later[:]
    del _later[: len(waiting)]
    for i, (function, arguments, _) in enumerate(waiting):
        try:
            function(*arguments)
        except _core.Gone:
            pass
        except _core.Error:
            _later.extend(waiting[i:])
            return


class Arena:
    """Pinned memory, taken from the front. Blocks live as long as a tensor over them does."""

    def __init__(self, mover: _core.Mover, most: int | None = None) -> None:
        self.mover = mover
        self.most = most  # bytes that may be pinned; None: as many as it takes
        self.budget = [0]  # of which so many are
        self.block: torch.Tensor | None = None
        self.pinned = False  # that block is
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

    def take_pinned(self, size: int) -> torch.Tensor | None:
        """The next bytes, if they are pinned."""
        if self.block is None or self.used + size > self.block.numel():
            self.reserve([size])
        return self.take(size) if self.pinned else None

    def may_pin(self, size: int) -> bool:
        return self.most is None or self.budget[0] + size <= self.most

    def _new(self, size: int) -> torch.Tensor:
        self.pinned = False
        tidy()
        if not self.may_pin(size):
            return torch.empty(size, dtype=torch.uint8)
        try:
            address = self.mover.pin(size)
        except (_core.Error, MemoryError):
            return torch.empty(size, dtype=torch.uint8)  # slower, and it works
        self.pinned = True
        memory = (ctypes.c_char * size).from_address(address)
        args = self.mover.unpin, (address,), Expense(self.budget, size)
        weakref.finalize(memory, _give_back, *args).atexit = False
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
        if len(fields) < 6 or not int(fields[4]) or not fields[5].startswith("/"):
            continue
        if fields[5].startswith("/dev/") and not fields[5].startswith("/dev/shm/"):
            continue  # a driver's: pinned memory may look like that
        start, end = (int(x, 16) for x in fields[0].split("-"))
        found.append((start, end))
    return found


class Mapped:
    """A file that is mapped, and where in it a model's weights are."""

    __slots__ = ("end", "expense", "high", "low", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.low, self.high = end, start  # of weights
        self.expense: Expense | None = None

    @property
    def bytes(self) -> int:
        """That are pinned, about."""
        return max(self.high - self.low, 0)


class Expense:
    """A part of the budget, for as long as somebody holds this."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: list[int], size: int) -> None:
        self._budget, self._bytes = budget, size
        budget[0] += size

    def __del__(self) -> None:
        self._budget[0] -= self._bytes


class Loan:
    """Memory of somebody else, which the GPU may copy from as long as this is held."""

    def __init__(
        self, mover: _core.Mover, tensor: torch.Tensor, source: int, expense: Expense
    ) -> None:
        self.expense = expense  # of the file, for all that it lends
        address = tensor.data_ptr()
        # How far from the memory itself the GPU finds it: of a file that is mapped privately the
        # same pages are mapped once more.
        self.shift = source - address
        # It stays mapped until it has been given back: another file may come to lie there.
        args = mover.give_back, (address, tensor.nbytes), tensor.untyped_storage()
        weakref.finalize(self, _give_back, *args).atexit = False


class Lender:
    """What of memory that others have is left where it is."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.files: list[Mapped] = []

    def begin(self, weights: Iterable[tuple[int, int]]) -> None:
        """These are all that may be asked for, by their addresses. What was looked up before may
        not be so any more."""
        tidy()
        self.files = [Mapped(*where) for where in _files()]
        for low, high in weights:
            file = self._file(low)
            if file is not None:
                file.low, file.high = min(file.low, low), max(file.high, high)

    def end(self) -> None:
        self.files = []  # and what they cost is for those who hold loans to know

    def _file(self, address: int) -> Mapped | None:
        at = bisect.bisect(self.files, address, key=lambda file: file.start) - 1
        return self.files[at] if at >= 0 and address < self.files[at].end else None

    def ask(
        self, tensor: torch.Tensor, low: int, high: int
    ) -> tuple[torch.Tensor, Loan | None] | None:
        """These bytes of a tensor's storage, if the GPU can copy from them where they are; and what
        is to be held as long as it does."""
        if tensor.device.type != "cpu":
            return None
        part = flat(tensor.untyped_storage(), low, high)
        file = self._file(part.data_ptr())
        # A file may be pinned because another weight of it is borrowed: that is no weight's own.
        if file is None:
            return (part, None) if tensor.is_pinned() else None
        if part.nbytes < mmap.PAGESIZE or not (file.expense or self.arena.may_pin(file.bytes)):
            return None
        source = self.arena.mover.borrow(part.data_ptr(), part.nbytes, file.low, file.high)
        if source is None:
            return None
        if file.expense is None:
            file.expense = Expense(self.arena.budget, file.bytes)
        return part, Loan(self.arena.mover, part, source, file.expense)
