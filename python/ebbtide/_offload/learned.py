"""What passes have shown, and how much of it is enough: no torch, no GPU, nothing but names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

LONG = 96  # passes
STOPS = 3  # passes that end early at the same place, after which that is where they end
ROUNDS = 4  # times that a pass may call all there is
SLOWEST = 16  # times as slow, who has made room for nothing


def length(called: Sequence[str], name: str, count: int) -> int:
    """Where no call of the root tells when a pass is over: how much of what has been called was
    one, now that this is called; 0 if it goes on. It does until its beginning comes again, or, if
    that was for once, most of it has gone round twice and begins once more. A model has so many
    names: if a pass goes on and on, it is over some time in any case."""
    if not called:
        return 0
    if name == called[0] or len(called) >= ROUNDS * count + 64:
        return len(called)
    if name not in called:
        return 0
    last = len(called) - 1 - called[::-1].index(name)
    size = len(called) - last
    if last < size or 2 * size <= len(set(called)):
        return 0  # something in it that runs several times
    return last if called[last - size : last] == called[last:] else 0


class Patience:
    """How many times in a row something has to be seen before it is acted upon. What was done and
    has to be done again was of little use: each time it takes twice as many. After a long time
    without, that is forgotten."""

    def __init__(self, times: int) -> None:
        self._times = self._enough = times
        self._seen = self._unseen = 0

    def is_over(self, seen: bool) -> bool:
        """It has been seen once more, or has not."""
        if not seen:
            self.skip(1)
            return False
        self._unseen = 0
        self._seen += 1
        if self._seen < self._enough:
            return False
        self._seen = 0
        self._enough *= 2
        return True

    def skip(self, times: int) -> None:
        """It has not been seen, so many times."""
        if times:
            self._seen = 0
            self._unseen += times
            if self._unseen >= LONG:
                self._enough = self._times


class Absence:
    """How long a model has not run, and what that has cost the others: would they have had less to
    stream, in its place? To come back takes its own weights once. If they have streamed twice as
    much, then it makes room. If it comes back before that was of use, it is slower to do so the
    next time."""

    def __init__(self) -> None:
        self._passes = 0  # of others
        self._missed = 0  # bytes that came in these for which there is room in its place
        self._gave = 0  # after so many passes it made room
        self._worth = 1

    def goes_on(self, streamed: int, held: int) -> bool:
        """Another pass of others, for which so much had to come: whether it is to make room."""
        self._passes += 1
        self._missed += min(streamed, held)
        return 0 < 2 * self._worth * held <= self._missed

    def gave_way(self) -> None:
        self._missed, self._gave = 0, self._gave or self._passes

    def ends(self) -> None:
        """It runs."""
        if self._gave:
            short = self._passes < 2 * self._gave
            self._worth = min(2 * self._worth, SLOWEST) if short else max(self._worth // 2, 1)
        self._passes = self._missed = self._gave = 0


class Stops:
    """Passes that an exception ends. One shows nothing. But whoever wants what a layer in the
    middle gives may end them all like that: then what has run is what runs."""

    def __init__(self) -> None:
        self._called: list[str] = []  # until the last one was over
        self._times = 0  # that it was just so, in a row
        self._now = False  # this pass is one

    def is_usual(self, called: list[str]) -> bool:
        """A pass is over by an exception, after these calls: whether it has been that way before,
        again and again."""
        self._times = self._times + 1 if called == self._called else 1
        self._called, self._now = called[:], True
        return self._times >= STOPS

    def end(self) -> bool:
        """A pass is over: whether it was by an exception."""
        now, self._now = self._now, False
        if not now:
            self._times = 0
        return now


def is_known(called: Iterable[str], known: Set[str]) -> bool:
    """Whether all that was called, or what it is in, is among these."""
    for name in set(called) - known:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name not in known:
            return False
    return True
