"""offload(): which weights stay, and how large a ring the others take. Numbers alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ebbtide._offload import pace
from ebbtide._offload.order import share_out, spread
from ebbtide._offload.pace import Need, Step, time_of
from ebbtide._offload.share import MOST_NEEDS, NEEDS, Share
from ebbtide._offload.timing import PASSES, Link, Timing

MIB = 1 << 20
RATE = 50.0 * MIB  # bytes a millisecond
UNIT = 100 * MIB


def best_ring(*given):
    return pace.best_ring(*given).size


def steps(count, busy, size=UNIT, pieces=4, after=0.0):
    return [Step(size, size // pieces, busy, after)] * count


@pytest.mark.parametrize(
    "units",
    [
        [[10, 10, 10, 10, 30, 30, 30]] * 32,
        [[20] * 8, [40] * 4, [10] * 8] * 20,
        [[64], *[[10, 10, 10, 10, 30, 30, 30]] * 8, [64]],
    ],
)
def test_every_prefix_has_about_as_much_of_every_unit(units):
    order = share_out(units, 8)
    assert sorted(order) == [(u, p) for u, parts in enumerate(units) for p in range(len(parts))]
    there = [0] * len(units)
    whole = [sum(parts) for parts in units]
    for unit, part in order:
        there[unit] += units[unit][part]
        shares = [a / b for a, b in zip(there, whole, strict=True) if b > 64]  # of several parts
        assert max(shares) - min(shares) <= 30 / 130 + 1 / 8


def test_what_is_on_one_level_is_spread():
    units = [[10, 10, 10, 10]] * 16
    order = share_out(units, 4)
    for level in range(4):
        on_it = order[16 * level : 16 * level + 16]
        assert [unit for unit, _ in on_it] == spread([40] * 16)
        assert {part for _, part in on_it} == {level}
    assert spread([40] * 16)[:3] == [7, 3, 11]  # the middle, and those of its halves


def test_a_pass_takes_what_the_link_needs_if_the_ring_has_room():
    for size, busy in ((2 * UNIT, 0.2), (2 * UNIT, 1.4), (UNIT + UNIT // 4 + 10 * MIB, 0.2)):
        assert time_of(steps(10, busy), RATE, size) == pytest.approx(10 * UNIT / RATE)


def test_a_piece_that_does_not_fit_before_the_end_of_the_ring_costs_room():
    long = steps(10, 1.9)
    assert time_of(long, RATE, 2 * UNIT) > 10 * UNIT / RATE * 1.05
    assert time_of(long, RATE, 2 * UNIT + UNIT // 4) == pytest.approx(10 * UNIT / RATE)


def test_a_pass_takes_what_the_gpu_needs_if_that_is_more():
    assert time_of(steps(10, 2.5), RATE, 2 * UNIT + UNIT // 4) == pytest.approx(25)
    assert time_of(steps(10, 2.0, after=0.5), RATE, 2 * UNIT + UNIT // 4) == pytest.approx(25)


def test_a_pass_takes_both_if_the_ring_has_room_for_one_unit():
    assert time_of(steps(10, 1.5), RATE, UNIT) == pytest.approx(10 * (UNIT / RATE + 1.5))


@pytest.mark.parametrize("pieces", [1, 4, 10])
def test_a_ring_is_no_larger_than_it_has_to_be_where_the_link_is_slow(pieces):
    given = steps(20, 0.05, pieces=pieces)
    best = best_ring(given, RATE, 2 * UNIT, 2 * UNIT)
    assert UNIT <= best <= UNIT + (pieces > 1) * UNIT // pieces + UNIT // 4
    less = best_ring(steps(20, 0.01, UNIT // 2, pieces), RATE, 2 * UNIT, 2 * UNIT)
    assert less <= best - UNIT // 4


@pytest.mark.parametrize("part", [0.3, 0.75, 1.0])
def test_units_of_one_piece_have_two_places_if_one_computes_while_the_other_comes(part):
    link = UNIT / RATE
    given = steps(10, part * link, pieces=1)
    assert time_of(given, RATE, 2 * UNIT) == pytest.approx(10 * link)
    assert time_of(given, RATE, 2 * UNIT - 1) == pytest.approx(10 * link * (1 + part))
    assert best_ring(given, RATE, 2 * UNIT, 2 * UNIT) == 2 * UNIT
    assert best_ring(given, RATE, UNIT, 2 * UNIT) == 2 * UNIT


def test_a_ring_is_two_units_where_the_gpu_is_slow():
    assert best_ring(steps(20, 4.0), RATE, 2 * UNIT, 2 * UNIT) == 2 * UNIT
    assert best_ring(steps(20, 4.0), RATE, UNIT + UNIT // 4, 2 * UNIT) == 2 * UNIT


@pytest.mark.parametrize("part", [1.5, 2, 2.25, 2.5, 3])
def test_what_comes_beside_a_slow_gpu_is_no_reason_for_a_small_ring(part):
    """It costs nothing there that less stays, and a pass that waits may do so for what is not
    reckoned with: pieces of several sizes, say, of which the ring holds less than it has room."""
    given = steps(20, 4.0, pieces=16)
    assert best_ring(given, RATE, int(part * UNIT), 3 * UNIT) == 3 * UNIT


def test_a_ring_is_in_between_where_both_are():
    sizes = [best_ring(steps(20, busy), RATE, 2 * UNIT, 2 * UNIT) for busy in (0.1, 0.7, 1.4, 3)]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2


def test_a_ring_has_room_for_every_unit():
    """Also around its end, where a piece that does not fit leaves something empty."""
    given = [*steps(20, 0.05, UNIT // 4), Step(UNIT, UNIT // 4, 0.05, 0.0)]
    assert best_ring(given, RATE, 2 * UNIT, 2 * UNIT) >= UNIT + UNIT // 4
    given = [*steps(20, 0.05, UNIT // 4), Step(UNIT, UNIT, 0.05, 0.0)]
    assert best_ring(given, RATE, 2 * UNIT, 2 * UNIT) >= UNIT


# ---- what comes of it ----------------------------------------------------------------------------


def need(size, late=False):
    """Of a pass that takes as long with any ring."""
    return Need(size, late, ((size, 1.0),))


def share_of_a_model():
    share = Share(2)
    share.largest = UNIT
    share.left = 10 * UNIT
    assert share.ring_size() == 2 * UNIT
    return share


def test_the_ring_follows_what_most_passes_need():
    share = share_of_a_model()
    for size in (UNIT, 2 * UNIT):
        share.needs(need(size))
        assert share.ring_size() == 2 * UNIT
    share.needs(need(UNIT))
    assert share.ring_size() == UNIT
    for _ in range(10):  # one that is long now and then is nothing new
        for size in (2 * UNIT, UNIT, UNIT):
            share.needs(need(size))
    assert share.ring_size() == UNIT


def test_a_ring_is_not_made_anew_for_little():
    share = share_of_a_model()
    for _ in range(10):
        share.needs(need(2 * UNIT - UNIT // 20))
    assert share.ring_size() == 2 * UNIT


def test_a_ring_does_not_go_to_and_fro():
    share = share_of_a_model()
    changes, before = 0, share.ring_size()
    less = 2 * UNIT - 24 * MIB
    for _ in range(4 * MOST_NEEDS):
        # Each size makes the other seem better.
        share.needs(need(less if before > less else 2 * UNIT))
        changes += share.ring_size() != before
        before = share.ring_size()
    assert 2 <= changes <= 9


def test_a_ring_does_not_go_to_and_fro_by_large_steps_either():
    share = share_of_a_model()
    changes, before = 0, share.ring_size()
    for _ in range(40 * NEEDS):
        share.needs(need(UNIT if before > UNIT else 2 * UNIT))
        changes += share.ring_size() != before
        before = share.ring_size()
    assert 2 <= changes <= 13


def test_a_ring_that_was_too_small_is_whole_at_once():
    share = share_of_a_model()
    for _ in range(NEEDS):
        share.needs(need(UNIT))
    assert share.ring_size() == UNIT
    share.whole_ring()
    assert share.ring_size() == 2 * UNIT
    share.forget_needs()
    for _ in range(NEEDS):
        share.needs(need(UNIT))
    assert share.ring_size() == UNIT


def test_a_ring_follows_a_change_at_once_that_went_to_and_fro_before():
    share = share_of_a_model()
    for _ in range(3 * MOST_NEEDS):
        share.needs(need(UNIT if share.ring_size() > UNIT else UNIT + UNIT // 4))
    for _ in range(4 * NEEDS):
        share.needs(need(2 * UNIT))
    assert share.ring_size() == 2 * UNIT


def test_a_ring_grows_by_a_little_if_weights_are_late():
    share = share_of_a_model()
    for late in (False, True):
        share.forget_needs()
        share.need = 2 * UNIT - UNIT // 4
        share._enough = MOST_NEEDS  # it went to and fro
        for _ in range(4 * NEEDS):
            share.needs(need(2 * UNIT, late))
        assert (share.ring_size() == 2 * UNIT) is late


def test_passes_are_measured_for_as_long_as_weights_are_late():
    share = share_of_a_model()
    share.need, share._same = 2 * UNIT - UNIT // 4, 1000
    share.needs(need(2 * UNIT))
    assert [share.unsteady() for _ in range(4)] == [False] * 4
    share.needs(need(2 * UNIT, late=True))
    assert [share.unsteady() for _ in range(4)] == [True] * 4


def test_a_ring_stays_small_on_a_host_that_is_disturbed():
    """There is little to be had for a ring then; when the host is quiet, there is much."""
    share = share_of_a_model()
    share.slots = 3
    # Of every unit a part comes, of one half, and the host takes long for it or not.
    quiet, disturbed = (
        [*steps(60, busy, UNIT // 8), *steps(1, busy, UNIT // 2, pieces=8)] for busy in (0.05, 0.3)
    )

    def see(given):
        ring = share.ring_size()
        share.needs(pace.best_ring(given, RATE, ring, share.most(), given is disturbed))

    for _ in range(NEEDS):
        see(quiet)
    small = share.ring_size()
    assert small < UNIT
    for _ in range(50):
        for given in (disturbed, quiet, disturbed):
            see(given)
            assert share.ring_size() == small
    for _ in range(4 * NEEDS):  # that it is so all the time is another thing
        see(disturbed)
    assert share.ring_size() > 2 * UNIT


class Marks:
    """A mover whose marks are milliseconds."""

    def __init__(self):
        self.at = [None]

    def mark(self, own):
        self.at.append(self.now)
        return len(self.at) - 1

    def between(self, first, last):
        return self.at[last] - self.at[first]

    def unmark(self, mark):
        pass


def passes(link, waits, takes, count):
    """What is found out of some in which one unit is waited for, and then computes."""
    marks = Marks()
    timing = Timing(marks, link)
    unit = SimpleNamespace(groups=[SimpleNamespace(bytes=UNIT)])
    load = SimpleNamespace(staged=[1])
    for _ in range(count):
        timing.begin()
        timeline = (0.0, timing.waits), (waits, timing.enters), (waits + takes, timing.leaves)
        for marks.now, step in timeline:
            step(*([unit, load] if step == timing.enters else [unit]))
        timing.end()
        yield timing.look(2 * UNIT, 2 * UNIT, 2 * UNIT)
        assert not timing.on


@pytest.mark.parametrize(("waits", "known"), [(0.0, False), (5.0, True)])
def test_a_pass_in_which_the_gpu_waits_for_nothing_says_nothing_of_the_link(waits, known):
    """What is sent then waits for room in the ring, and seems to be slow."""
    link = Link()
    link.saw(UNIT, 20.0)
    assert all(found is not None for found in passes(link, waits, 15.0, 2 * PASSES))
    assert link.known is known


@pytest.mark.parametrize(
    ("waits", "takes", "late"), [(5.0, 15.0, False), (5.0, 25.0, True), (0.2, 25.0, False)]
)
def test_weights_are_late_if_the_gpu_has_enough_to_compute_and_waits_all_the_same(
    waits, takes, late
):
    link = Link()
    link.saw(UNIT, 20.0)
    assert [found.late for found in passes(link, waits, takes, 2)] == [late] * 2
