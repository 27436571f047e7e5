"""offload(): the ring where it cannot be had, and where a unit's way into it, or out, fails."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import sim

MIB = 1 << 20
WIDTH = 2048
UNIT = 4 * WIDTH * WIDTH  # 16 MiB
UNEVEN = [[WIDTH // 4] * 4, [WIDTH * 5 // 8]] * 6  # 16 MiB in four pieces, 10 in one


class Block(nn.Module):
    """One unit, of some weights of as many rows each."""

    def __init__(self, *rows):
        super().__init__()
        for number, count in enumerate(rows):
            weight = nn.Parameter(torch.randn(count, WIDTH) / WIDTH**0.5)
            self.register_parameter(f"weight{number}", weight)
        self.count = len(rows)
        self.writes = False
        self.also = []  # what it calls

    def forward(self, h):
        for other in self.also:
            other(h)
        if self.writes:
            for number in range(self.count):
                getattr(self, f"weight{number}").mul_(1)
        parts = [h @ getattr(self, f"weight{i}").t() for i in range(self.count)]
        return torch.tanh(h + torch.cat(parts, dim=-1).sum())


class Streaming:
    """A model of which nothing stays resident."""

    def __init__(self, room, size, blocks, **options):
        self.x = torch.randn(1, WIDTH, device="cuda")
        self.model = nn.Sequential(*(Block(*rows) for rows in blocks))
        with torch.no_grad():
            self.expected = copy.deepcopy(self.model).cuda()(self.x)
        room.of = lambda model: size
        self.handle = room.offload(self.model, **options)
        self.ours = self.model.forward.model

    def run(self, passes=1):
        with torch.no_grad():
            for _ in range(passes):
                assert torch.equal(self.model(self.x), self.expected)
        assert all(u.depth == 0 and u.bare == 0 for u in self.ours.units)
        self.at_rest()

    def at_rest(self):
        self.ours.drop_loads()
        assert self.ours.mover.stats()["cargoes_out"] == 0


def test_a_ring_that_could_not_be_had_is_tried_for_again(free_room):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH]] * 10, prefetch=2)
    with ebbtide.Device(0) as device, ebbtide.VBAR(device, UNIT // 2) as other:
        streaming.ours.station.set_ring(0)
        weight = other.alloc(UNIT // 2)
        assert weight.fault()  # somebody else's, in use
        streaming.run(20)
        assert UNIT <= streaming.handle.stats()["ring"] < 2 * UNIT
        weight.unpin()
    streaming.run(20)
    assert streaming.handle.stats()["ring"] == 2 * UNIT


def test_a_larger_ring_is_refused_while_a_unit_is_waited_for(free_room):
    streaming = Streaming(free_room, 2 * MIB + 2 * UNIT, UNEVEN, prefetch=2)
    with ebbtide.Device(0) as device, ebbtide.VBAR(device, UNIT) as other:
        streaming.ours.station.set_ring(0)
        weight = other.alloc(UNIT)
        assert weight.fault()  # somebody else's, in use
        streaming.run(24)
        assert streaming.handle.stats()["ring"] == UNIT
        assert streaming.handle.stats()["one_by_one"] == 0
        weight.unpin()


def test_a_unit_fits_a_ring_of_its_size(free_room):
    """Where the one before it has left the head in the middle."""
    streaming = Streaming(free_room, 2 * MIB + UNIT, UNEVEN, prefetch=2)
    streaming.run(8)
    stats = streaming.handle.stats()
    assert stats["ring"] == UNIT
    assert stats["one_by_one"] == 0


def test_a_ring_that_is_too_small_for_a_unit_is_whole_again_at_once(free_room):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10, prefetch=2)
    streaming.run(3)
    streaming.ours.share.need = UNIT // 2
    streaming.run()
    stats = streaming.handle.stats()
    assert stats["ring"] == 2 * UNIT
    assert stats["one_by_one"] == 0


def test_two_passes_at_once_have_a_whole_ring(free_room):
    streaming = Streaming(free_room, 8 * MIB + 6 * UNIT, [[WIDTH // 4] * 4] * 10, prefetch=2)
    streaming.run(3)
    share, station = streaming.ours.share, streaming.ours.station
    share.need = UNIT
    streaming.run()
    assert streaming.handle.stats()["ring"] == UNIT and not station.crowded

    def once_more(*_):
        hook.remove()
        streaming.model(streaming.x)

    hook = streaming.model[4].register_forward_pre_hook(once_more)
    streaming.run()
    assert station.crowded and share.need is None
    streaming.run()
    assert streaming.handle.stats()["ring"] == 2 * UNIT
    assert streaming.handle.stats()["one_by_one"] == 0


def test_a_ring_is_whole_again_before_the_pass_is_over(free_room):
    """If passes go on side by side, then there is no time between them."""
    blocks = [[WIDTH // 4] * 4] * 10
    both = []
    for _ in range(2):
        with ebbtide.Device(0) as card:
            card.limit = "1GiB"  # for a plain one
        both.append(Streaming(free_room, 4 * MIB + 4 * UNIT, blocks, prefetch=2))
    for one in both:
        one.run(3)
        one.ours.share.need = UNIT
    both[0].run()
    assert both[0].handle.stats()["ring"] == UNIT
    before = both[1].handle.stats()["one_by_one"]
    for block, other in zip(both[0].model[:5], both[1].model[:5], strict=True):
        block.also.append(other.forward)
    both[0].run()
    assert both[0].handle.stats()["ring"] == 2 * UNIT
    assert both[1].handle.stats()["one_by_one"] == before + 1


def test_a_pass_that_does_not_end_leaves_no_marks(free_room, monkeypatch):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10)
    monkeypatch.setattr(ebbtide._offload.timing, "MOST", 6)
    timing, mover = streaming.ours.timing, streaming.ours.mover
    on, most = [], []

    def look(*_):
        mark = mover.mark(True)
        on.append(timing.on)
        most.append(mark)
        mover.unmark(mark)

    streaming.model[9].register_forward_pre_hook(look)
    streaming.model[5].register_forward_pre_hook(look)
    streaming.run(6)
    assert any(on[::2]) and not any(on[1::2])
    assert max(most[::2]) > 10 and set(most[1::2]) == {1}


def test_a_mark_that_cannot_be_set_measures_nothing_and_harms_nobody(free_room, monkeypatch):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10)
    timing = streaming.ours.timing

    class Failing:
        def __getattr__(self, name):
            return getattr(streaming.ours.mover, name)

        def mark(self, own):
            raise ebbtide.Busy

    monkeypatch.setattr(timing, "_mover", Failing())
    streaming.ours.station.link.known = True  # what is sent is sent by the real one
    found = []
    look = timing.look
    monkeypatch.setattr(timing, "look", lambda *sizes: found.append(look(*sizes)))
    streaming.run(6)
    assert found and not any(found)


def test_a_model_that_is_deleted_gives_its_marks_back(free_room):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10)
    mover = streaming.ours.mover
    streaming.run(4)
    first = mover.mark(True)
    mover.unmark(first)
    assert first > 1  # others are set: a pass is being measured, or waits to be read
    del streaming
    gc.collect()
    assert mover.mark(True) == 1
    mover.close()


def test_a_unit_that_is_interrupted_on_its_way_in_is_not_in_use(free_room, monkeypatch):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH]] * 10)
    streaming.run(3)
    unit = streaming.ours.units[3]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unit, "at", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            streaming.model(streaming.x)
    streaming.run(3)


def test_a_unit_that_is_interrupted_while_it_is_measured_is_not_in_use(free_room, monkeypatch):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10)
    streaming.run(3)
    timing = streaming.ours.timing

    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("waits", "enters"):
        timing.forget()  # so that the next pass is measured
        with monkeypatch.context() as patch:
            patch.setattr(timing, name, interrupted)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                streaming.model(streaming.x)
        streaming.run(2)


def settles(streaming):
    """Also after what went wrong."""
    streaming.run(10)
    before = streaming.handle.stats()["one_by_one"]
    streaming.run(10)
    stats = streaming.handle.stats()
    assert stats["one_by_one"] == before
    assert stats["ring"] == 2 * UNIT


@pytest.mark.simulated
@pytest.mark.parametrize("nth", [1, 3, 5, 8])
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_call_of_the_driver_that_fails_once(free_room, call, nth):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 6, prefetch=2)
    streaming.run(20)
    sim.fail(call, nth=nth, code=999)
    with contextlib.suppress(ebbtide.Error), torch.no_grad():
        streaming.model(streaming.x)
    sim.clear_failures()
    settles(streaming)


def test_a_pass_that_is_interrupted_while_the_next_units_are_sent_for(free_room, monkeypatch):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 6, prefetch=2)
    for nth in range(8):
        streaming.run(3)
        streaming.at_rest()
        calls = []

        def interrupted(*args, real=streaming.ours.station.fetch, calls=calls, nth=nth, **options):
            calls.append(args)
            if len(calls) == nth:
                raise KeyboardInterrupt
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(streaming.ours.station, "fetch", interrupted)
            with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
                streaming.model(streaming.x)
    settles(streaming)


def test_marks_that_are_gone_measure_nothing(free_room):
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10)
    streaming.run(4)
    timing, mover = streaming.ours.timing, streaming.ours.mover
    assert timing._last
    for mark in range(1, 100):
        mover.unmark(mark)
    streaming.run(4)


def test_a_unit_in_another_one_has_room_beside_it(free_room):
    """Though it is not known that it will be, and the ring is as one of them needs it."""
    streaming = Streaming(free_room, 4 * MIB + 3 * UNIT, [[WIDTH // 4] * 4] * 10, prefetch=2)
    streaming.run(3)
    streaming.ours.share.need = UNIT
    streaming.run()
    assert streaming.handle.stats()["ring"] == UNIT
    streaming.model[2].also.append(streaming.model[7].forward)
    streaming.run(3)
    before = streaming.handle.stats()["one_by_one"]
    streaming.run(3)
    stats = streaming.handle.stats()
    assert stats["ring"] == 2 * UNIT
    assert stats["one_by_one"] == before


def test_units_in_others_take_the_place_of_what_was_sent_for(free_room):
    """Which comes in vain: it has to make room, behind the unit in use."""
    streaming = Streaming(free_room, 4 * MIB + 2 * UNIT, [[WIDTH // 4] * 4] * 10, prefetch=2)
    streaming.run(3)
    for number in range(5):
        streaming.model[number].also.append(streaming.model[number + 5].forward)
    streaming.run(3)
    stats = streaming.handle.stats()
    assert stats["ring"] == 2 * UNIT
    assert stats["one_by_one"] == 0


def test_weights_that_cannot_be_saved_do_not_keep_their_unit_in_use(free_room, monkeypatch):
    streaming = Streaming(free_room, 8 * MIB + 6 * UNIT, [[WIDTH // 4] * 4] * 10)
    streaming.run(12)
    ours = streaming.ours
    assert any(0 < u.resident < u.bytes for u in ours.units)

    def full(*_):
        raise MemoryError

    for block in streaming.model:
        block.writes = True
        with monkeypatch.context() as patch:
            patch.setattr(ours.weights, "save", full)
            with pytest.raises(MemoryError), torch.no_grad():
                streaming.model(streaming.x)
        block.writes = False
        streaming.at_rest()
    streaming.run(3)


def test_a_unit_that_is_found_resident_needs_nothing_of_what_was_sent_for(free_room):
    """Pages that were about to go, and stay after all, are not seen to be there in between."""
    streaming = Streaming(free_room, 256 * MIB, [[WIDTH // 4] * 4] * 4)
    streaming.run(4)
    ours = streaming.ours
    station, unit = ours.station, ours.units[1]
    assert unit.resident == unit.bytes
    assert station.set_ring(UNIT // 4)
    unit.forget(0)
    unit.forget(1)
    unit.settled = True
    early = ebbtide._core.Load(1)
    assert not early.advance(station.mover, unit, True) and early.cargoes == 1
    unit.settled = False
    unit.load = ebbtide._core.Load(UNIT)
    assert unit.load.advance(station.mover, unit, True) and not unit.load.cargoes
    ours.tracking = True
    with torch.no_grad():
        assert torch.equal(streaming.model(streaming.x), streaming.expected)
    hook = streaming.model[0].register_forward_pre_hook(lambda *_: setattr(unit, "load", early))
    ours.tracking = True
    with torch.no_grad():
        assert torch.equal(streaming.model(streaming.x), streaming.expected)
    hook.remove()
    streaming.run(2)


@pytest.mark.parametrize("share", [0.6, 0.36, 0.1, 0.05, 0.0])
def test_runs_of_small_layers_come_to_a_few_places_again_and_again(free_room, share):
    """To make tensors over a new one takes the host longer than to compute with them."""
    width, count = 128, 1000
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    size = 4 * width * width * count
    with torch.no_grad():
        x = torch.randn(1, width, device="cuda")
        expected = copy.deepcopy(model).cuda()(x)
    free_room.of = lambda model: size // 2
    handle = free_room.offload(model)
    ours = model.forward.model

    def run(passes):
        with torch.no_grad():
            for _ in range(passes):
                assert torch.equal(model(x), expected)
        return [dict(u.views) for u in ours.units]

    run(2)
    more = int(share * size) + 2 * handle.stats()["largest_unit"] + 5 * MIB
    with free_room.device() as device:
        device.limit = free_room.limit - size // 2 + more
    known = run(50)
    assert all(u.small for u in ours.units) and len(ours.units) > 10 and any(known)
    again = run(20)
    for before, now in zip(known, again, strict=True):
        assert before.keys() == now.keys()
        assert all(now[key] is before[key] for key in now)
