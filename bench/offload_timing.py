"""Time that is the GPU's or the host's, taken so that two of them can be compared."""

from __future__ import annotations

import gc
import math
import operator
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch


def empty() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # PyTorch keeps them for good otherwise
    torch.cuda.empty_cache()


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def timed(function: Callable[[], Any], steps: int = 1) -> float:
    """Milliseconds of one of several steps in a row, by the GPU's clock.

    Two go before: what is brought ahead of a step is brought during the ones before it, and so the
    clock must neither start with everything there nor stop while something is still to come.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(2):
        function()
    start.record()
    for _ in range(steps):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


SHORT = 100  # milliseconds; shorter steps are mostly the host's
LONG_ONES, SHORT_ONES = 2, 4  # so many steps in a row are measured: one of them says less


class Spin:
    """A little of Python, and of looking at memory that is in no cache: models of many layers are
    both."""

    FAR, SOME = 1 << 20, 1 << 14

    def __init__(self) -> None:
        self.far = list(range(1 << 20, (1 << 20) + self.FAR))  # numbers with memory of their own
        random.Random(0).shuffle(self.far)
        self.at = 0

    def __call__(self) -> float:
        """How long that takes, on the processor that it is on."""
        took = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(self.SOME):
                pass
            sum(self.far[self.at : self.at + self.SOME])
            took.append(time.perf_counter() - start)
            self.at = (self.at + self.SOME) % self.FAR
        return min(took)


class Core:
    """A processor to measure on. Short steps are the host's, and on a shared machine any of its
    processors may be half as fast, for a fraction of a second or for minutes, because of a
    neighbour. So one that is quick is taken; and what was measured while it was disturbed is
    measured again, some times. What tells is a loop before and after, not what is measured."""

    best: ClassVar[float] = math.inf  # so long it has taken on one that was quiet, at some time
    spin: ClassVar[Spin | None] = None

    def __init__(self, tries: int = 1) -> None:
        """0: it does not matter."""
        self.tries = tries
        can = tries and hasattr(os, "sched_setaffinity")
        self.all = sorted(os.sched_getaffinity(0)) if can else []
        if self.all and Core.spin is None:
            Core.spin = Spin()

    def take(self) -> None:
        """The quickest there is now, if this one is not quiet."""
        if self.is_quiet():
            return
        speeds = {}
        for number in self.all:
            os.sched_setaffinity(0, {number})
            speeds[number] = self.spin()
        number = min(speeds, key=speeds.__getitem__)
        os.sched_setaffinity(0, {number})
        Core.best = min(Core.best, speeds[number])

    def is_quiet(self) -> bool:
        return self.spin is None or not self.all or self.spin() < 1.15 * self.best < math.inf

    def timed(self, function: Callable[[], Any], steps: int) -> tuple[float, bool]:
        """Milliseconds of a step, and whether nobody disturbed it. If all tries were disturbed, the
        shortest: to be disturbed makes a step longer, whichever model's it is."""
        found = []
        for _ in range(max(self.tries, 1)):
            self.take()
            took = timed(function, steps)
            if self.is_quiet():
                return took, True
            found.append(took)
        return min(found), False

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.all:
            os.sched_setaffinity(0, self.all)


class Turns:
    """Measurements that are taken in turn, round by round. The last two are those to be compared:
    they change places every round, so that what gets slower or faster meanwhile does so for both,
    and each comes as often after what makes the GPU hot, or lets it cool. Of the rounds in which
    the host was not disturbed, if there are four, medians: of times, and of the ratios of what was
    measured in the same round. What is compared with nothing is measured before them: as often as
    there are rounds at least, or once where steps are long."""

    LEAST, MOST = 4, 100  # rounds

    def __init__(
        self,
        functions: dict[str, Callable[[], Any]],
        seconds: float,
        rounds: int = 0,
        alone: Sequence[str] = (),
    ) -> None:
        """For some seconds, or just so many rounds. `alone`: what is compared with nothing."""
        turns = [(name, f) for name, f in functions.items() if name not in alone]
        step = 0 if rounds == 1 else timed(turns[-1][1])
        least, most = (rounds, rounds) if rounds else (self.LEAST, self.MOST)
        quiet, others = [], []
        start = time.perf_counter()
        tries, steps = (4, SHORT_ONES) if step < SHORT else (1, LONG_ONES)
        if rounds == 1:
            tries, steps = 0, 1
        with Core(tries) as core:
            once = {
                name: statistics.median(
                    core.timed(functions[name], steps)[0]
                    for _ in range(1 if step >= SHORT else least)
                )
                for name in alone
            }
            while (count := len(quiet) + len(others)) < least or (
                count < most and time.perf_counter() - start < seconds
            ):
                order = turns[:-2] + (turns[-2:] if count % 2 else turns[:-3:-1])
                found = {name: core.timed(f, steps) for name, f in order}
                calm = all(undisturbed for _, undisturbed in found.values())
                took = {name: took for name, (took, _) in found.items()}
                (quiet if calm else others).append({**once, **took})
        self.disturbed = len(others)
        self.rounds = quiet if len(quiet) >= self.LEAST else quiet + others

    def median(self, value: str | Callable[[dict[str, float]], float]) -> float:
        of = value if callable(value) else operator.itemgetter(value)
        return statistics.median(of(round_) for round_ in self.rounds)

    def spread(self, value: Callable[[dict[str, float]], float]) -> str:
        values = [value(round_) for round_ in self.rounds]
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        words = f"{middle:.1f} %, half of {len(values)} rounds from {low:.1f} to {high:.1f}"
        return f"{words}; {self.disturbed} more were disturbed"


# ---- two on a host that is disturbed -------------------------------------------------------------

on_mark: Callable[[], None] | None = None


def mark() -> None:
    """Models call it between layers."""
    if on_mark:
        on_mark()


class Singer:
    """One of two threads, which take turns."""

    other: Singer

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.turn = threading.Semaphore(0)
        self.alone = False  # the other one is through
        self.parts: list[float] = []  # seconds, of each turn
        self.began = 0.0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.sing)

    @torch.no_grad()
    def sing(self) -> None:
        self.turn.acquire()
        self.began = time.perf_counter()
        try:
            self.function()
        except BaseException as failure:
            self.failure = failure
        self.parts.append(time.perf_counter() - self.began)
        self.other.alone = True
        self.other.turn.release()

    def pause(self) -> None:
        self.parts.append(time.perf_counter() - self.began)
        if not self.alone:
            self.other.turn.release()
            self.turn.acquire()
        self.began = time.perf_counter()


class Duet:
    """How much of the host's time one model takes, and how much another one. They run in turns of a
    few layers, about a millisecond, on one processor, so that whoever disturbs it disturbs both.
    What the GPU does meanwhile does not matter, as long as it is not what the host waits for."""

    ROUNDS = 24

    def __init__(self, first: Callable[[], Any], second: Callable[[], Any]) -> None:
        found: tuple[list[list[float]], ...] = ([], [])
        with Core() as core:
            for number in range(self.ROUNDS + 2):
                core.take()
                turns = [first, second] if number % 2 else [second, first]
                parts = self._sing(*turns)
                if number >= 2:
                    for to, its in zip(found, parts if number % 2 else parts[::-1], strict=True):
                        to.append(its)
        self.first, self.second = (
            sum(statistics.median(part) for part in zip(*rounds, strict=True)) * 1e3
            for rounds in found
        )

    @staticmethod
    def _sing(*functions: Callable[[], Any]) -> list[list[float]]:
        global on_mark
        one, other = singers = [Singer(function) for function in functions]
        one.other, other.other = other, one
        by_thread = {singer.thread: singer for singer in singers}
        torch.cuda.synchronize()

        def pause() -> None:
            by_thread[threading.current_thread()].pause()

        on_mark = pause
        try:
            for singer in singers:
                singer.thread.start()
            one.turn.release()
            for singer in singers:
                singer.thread.join()
        finally:
            on_mark = None
        torch.cuda.synchronize()
        for singer in singers:
            if singer.failure:
                raise singer.failure
        return [singer.parts for singer in singers]


# ---- the link ------------------------------------------------------------------------------------


class Link:
    """A bare loop of large copies from pinned memory, on a stream of its own."""

    def __init__(self, size: int = 512 << 20) -> None:
        self.size = size
        self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self.host.fill_(1)
        self.target = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()
        rates = []
        for _ in range(5):
            rates.append(self.size / timed(self._copy, 4) * 1e3)
        self.rate = max(rates)

    def _copy(self) -> None:
        self.target.copy_(self.host, non_blocking=True)

    def beside(self, function: Callable[[], Any], size: int) -> Callable[[], Any]:
        """The function, and beside it copies of so many bytes."""

        copies = self.only(size)

        def both() -> Any:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                copies()
            return function()

        return both

    def only(self, size: int) -> Callable[[], Any]:
        """Copies of so many bytes."""

        def copies() -> None:
            left = size
            while left > 0:
                part = min(left, self.size)
                self.target[:part].copy_(self.host[:part], non_blocking=True)
                left -= part

        return copies
