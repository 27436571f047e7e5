"""What passes have shown, and how much of it is enough: no torch, no GPU, nothing but names."""

from __future__ import annotations


class Patience:
    """How many times in a row something has to be seen before it is acted upon. What was done and
    has to be done again was of little use: each time it takes twice as many."""

    def __init__(self, times: int, most: int | None = None) -> None:
        self._enough = times
        self._most = most  # times that it ever takes
        self._seen = 0

    def is_over(self, seen: bool) -> bool:
        """It has been seen once more, or has not."""
        self._seen = self._seen + 1 if seen else 0
        if self._seen < self._enough:
            return False
        self._seen = 0
        self._enough *= 2
        if self._most is not None:
            self._enough = min(self._enough, self._most)
        return True
