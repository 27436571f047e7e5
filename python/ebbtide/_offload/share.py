"""A model's share of the GPU: how much is for weights that stay, how much for those in passing."""

from __future__ import annotations

from collections import deque

from ebbtide import _core
from ebbtide._offload.pace import Need
from ebbtide._offload.station import GRAIN, SLACK, Station
from ebbtide.vbar import VBAR

PEAKS = 16  # how long tensors' needs are remembered: two or three for a pass
LOOKS = 16  # passes of which one is measured, when nothing changes
NEEDS, MOST_NEEDS = 3, 96  # passes whose median says how large the ring should be
# Part of a unit by which it is made larger, or smaller: for less it is not worth it; and for more
# something has changed.
FINE, COARSE = 16, 2
LONGER = 1.02  # passes may take so much longer together with a larger ring that most of them want


class Share:
    """What one model may have, measured again in every pass that is slow."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.largest = 0  # unit
        self.need: int | None = None  # bytes of a ring that are enough, if that is known
        self._needs: list[Need] = []  # pass by pass
        self._enough = NEEDS  # of those
        self._matters = COARSE  # part of a unit by which the last one differs, or does not
        self._grew: bool | None = None  # the ring did, the last time that it was made another
        self.peaks: deque[int] = deque(maxlen=PEAKS)  # what tensors held, pass by pass
        self.small = 0  # bytes of weights that are on the GPU as plain tensors
        self.firm = 0  # bytes that are to stay whatever happens
        self.given_up = 0  # pages that made room for tensors
        self.lowest: int | None = None  # the ring's size, if it did since the last look
        self.fits = False
        self.left = 0  # bytes that tensors did not need
        self.room = 0  # bytes for weights that stay
        self.likely = 0  # about the same, as can be said while a pass is being learned from
        self.idle = 0  # passes that other models have begun since its own last one
        self.cautious = 0  # times that nothing is to stay
        self.clears = False  # and what stays until now is to go
        self._outlook = b""  # what it depends on, at the last look,
        self._seen: object = None  # and what else was found then,
        self._same = 0  # and how many times in a row
        self._passes = 0

    def ring_size(self) -> int:
        """How much of the GPU is to be for weights in passing: if the one that comes has to wait
        for the end of the one before with its last part, then the GPU waits for that part, every
        time. Where that much is not left, or it is not known what is left, little more than one.
        What tensors need one time and not another is not left out: the ring gives way, in the
        middle of a pass."""
        return min(self.whole(), max(self.left // GRAIN * GRAIN, _up(self.largest * 5 // 4)))

    def whole(self) -> int:
        """The ring, if there is room enough."""
        return self.most() if self.need is None else min(self.need, self.most())

    def most(self) -> int:
        """That a ring may have."""
        return _up(self.slots * self.largest)

    def needs(self, need: Need) -> None:
        """What a pass needed. If its weights were late, a little more of a ring matters, too, for
        as long as it is not there."""
        need = need._replace(size=min(_up(need.size), self.most()))
        self._needs.append(need)
        del self._needs[: -self._enough]
        self._matters = FINE if need.late and need.size > self.whole() else COARSE
        for count, part in ((min(self._enough, 4 * NEEDS), self._matters), (self._enough, FINE)):
            if len(self._needs) >= count:
                last = self._needs[-count:]
                size = sorted(need.size for need in last)[count // 2]
                if self._differs(size, part) and self._is_worth_it(size, last):
                    self._change(size, grows=size > self.whole())
                    return

    def _is_worth_it(self, size: int, last: list[Need]) -> bool:
        """A larger ring may be good for most passes, a little, and bad for the others, very: where
        the host is disturbed now and then, say, and it takes long then with any ring."""
        now = self.whole()
        if size < now:
            return True
        return sum(n.time(size) for n in last) <= LONGER * sum(n.time(now) for n in last)

    def _differs(self, size: int, part: int) -> bool:
        return abs(size - self.whole()) >= max(self.largest // part, GRAIN)

    def whole_ring(self) -> None:
        """What there is has turned out to be too little."""
        if self.need is not None:
            self._change(None, grows=True)

    def _change(self, need: int | None, grows: bool) -> None:
        # Each size has its reasons: whoever goes to and fro takes ever longer to do so.
        if self._grew is not grows and self._grew is not None:
            self._enough = min(2 * self._enough, MOST_NEEDS)
        self._grew = grows
        self.need = need
        self._needs = []  # other weights will stay

    def forget_needs(self) -> None:
        """Units are others."""
        self.need = self._grew = None
        self._needs = []
        self._enough = NEEDS

    def _least_ring(self) -> int:
        """That is whole as well: small weights, which are on the GPU all the time, count as a part
        of it."""
        small = _up(self.small) if self.small > GRAIN // 2 else 0
        return self.whole() - small

    def short(self, ring: int) -> int:
        """How many bytes such a ring is short of; of a unit at most."""
        return min(max(self._least_ring() - ring, 0), self.largest)

    def unsteady(self) -> bool:
        """At the begin of a pass: whether it is to be measured. If something was another way
        lately, or another ring might be better; and now and then in any case."""
        self._passes += 1
        if self._passes % LOOKS == 0 or self._same <= PEAKS:
            return True
        return self._differs(self._needs[-1].size, self._matters) if self._needs else False

    def calm(self, ring: int, timed: bool) -> int:
        """At the end of a pass: how many of the next ones, if they are as this one was, need not be
        looked at. `timed`: some are to be measured."""
        if self._same <= PEAKS or self.cautious or self.fits or not 0 < self.ring_size() <= ring:
            return 0
        if timed and self._needs and self._differs(self._needs[-1].size, self._matters):
            return 0
        return LOOKS - 1 - self._passes % LOOKS if timed else LOOKS

    def skip(self, passes: int) -> None:
        """So many have not been looked at."""
        self._passes += passes

    @property
    def outlook(self) -> bytes:
        """What the GPU's room looked like, at the last look."""
        return self._outlook

    def ring_gave_way(self, size: int) -> None:
        """To tensors: it is of that size now."""
        self.lowest = size if self.lowest is None else min(self.lowest, size)

    def out_of_memory(self) -> None:
        """PyTorch had to do without: whoever tries again gets all there is. What stayed goes as
        well: a unit that is used where it is keeps pages that it has but a part of."""
        self.cautious, self.clears = PEAKS, True

    def balance(self, station: Station, vbar: VBAR, learning: bool) -> bool:
        """How much of the GPU is for weights that stay: what PyTorch's tensors, which come first,
        have left of it lately. A weight in use cannot give way to them, so it must not be in their
        place. False: all is as it was."""
        before, passing = others = station.before(vbar)
        if self._knows(station, vbar, learning, others):
            return False
        most, stats = station.device._most - before, vbar.stats()
        size, given_up = stats["bytes"], stats["evictions_for_tensors"]
        slack = min(SLACK, max(size // 64, 2 * GRAIN))  # that would be a lot of a small model
        segments = _core.attached_stats(station.index) or {"segment_bytes": 0, "before": 0}
        tensors = segments["segment_bytes"] + segments["before"]
        # They may have needed more, in between, than they have now.
        if given_up != self.given_up:
            tensors = max(tensors, most - slack - self.ring_size() - stats["watermark"])
            self.given_up = given_up
        if self.lowest is not None:
            tensors = max(tensors, most - self.lowest - stats["watermark"])
            self.lowest = None
        self.peaks.append(tensors)
        # The ring can be made smaller again, so for it the last pass counts; and it comes before
        # weights, whosoever they are: without it a model would stand still.
        self.left = most + before - max(list(self.peaks)[-3:])
        room = most - slack - max(self.peaks)
        fits = room - passing >= size
        self.likely = room if fits else max(room - self._least_ring(), 0)
        unknown = learning and room < size + 4 * self.largest + size // 8
        if self.clears:
            self.clears = False
            vbar.free_memory(size)
        if unknown or self.cautious:
            self.cautious = max(self.cautious - 1, 0)
            self.left = room = 0  # what it takes is not known: nothing stays
        elif not fits:
            room = max(room - max(self.ring_size(), passing), 0)
        station.fit_ring()
        room = max(room, self.firm)
        self.fits = room >= size
        if self.fits and station.ring:
            station.trim()
        # What does not fit is tried all the same, a little beyond: a weight that lies across the
        # end has its room taken by smaller ones behind it. Where little stays anyway, that would be
        # too much.
        room = min(room + self.largest if room > self.largest else room, size)
        self.room = room
        if room != stats["watermark_limit"]:
            vbar.watermark_limit = room
        if room > stats["watermark"]:
            vbar.watermark = room
        return True

    def _knows(self, station: Station, vbar: VBAR, learning: bool, others: tuple[int, int]) -> bool:
        """Whether all has been as it is now so often that what was before is forgotten."""
        outlook = station.mover.outlook(vbar)
        if outlook != self._outlook:
            self._outlook = outlook
            station.see_ring()
        own = self.largest, self.need, self.small, self.firm, self.lowest
        seen = outlook, own, others, learning, station.ring, len(station.active())
        self._same = self._same + 1 if seen == self._seen else 0
        self._seen = seen
        # A ring that others left no room for may be had by now: that is tried, now and then.
        content = station.ring >= self.ring_size() or self._same % PEAKS
        return self._same > PEAKS and not self.cautious and bool(content)


def _up(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
