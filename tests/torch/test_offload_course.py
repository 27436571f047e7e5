"""offload(): passes that go as the last one went, without Python."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from offloaded import MIB, WIDTH, at_rest, inside, layers, x
from on_course import Course, Inside, seen_by
from torch import nn

import ebbtide
from ebbtide import _unseen
from ebbtide._offload import share as shares
from ebbtide._offload.model import TRIES, Model

pytestmark = pytest.mark.skipif(
    not _unseen.by_strategy, reason="torch.compile() has to be told: Python sees to all passes"
)


# ---- it is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [2, None])
def test_of_passes_that_are_the_same_python_sees_a_few(
    free_room, small_units, monkeypatch, prefetch
):
    """One of so many, in which it is tried what else could stay; and where the ring is looked at,
    those that are measured, and those after them."""
    pair = Course(free_room, prefetch=prefetch)
    seen, ends = [], []
    monkeypatch.setattr(Model, "enter", seen_by(seen, Model.enter))
    monkeypatch.setattr(Model, "_end", seen_by(ends, Model._end))
    passes = 8 * TRIES
    before = pair.handle.stats()
    assert all(pair.same() for _ in range(passes))
    after = pair.handle.stats()
    units = len(pair.ours.units)
    if prefetch:
        assert len(seen) == passes // TRIES * units and len(ends) == passes // TRIES
    else:
        assert 0 < len(seen) < passes * units  # how many depends on the machine
        assert 0 < len(ends) < passes
    # It streams as it did: what is counted tells so, and what has come.
    came = after["streamed"] - before["streamed"]
    assert came > 0 and came % passes == 0 and after["one_by_one"] == 0
    assert after["slow_entries"] - before["slow_entries"] >= passes * units // 2


def test_as_many_bytes_come_as_when_python_sees_to_it(free_room, small_units, monkeypatch):
    came = []
    for by_itself in (True, False):
        with monkeypatch.context() as patch:
            if not by_itself:
                patch.setattr(shares.Share, "calm", lambda *_: 0)
            torch.manual_seed(1)
            pair = Course(free_room, steady=by_itself)
            for _ in range(40):
                assert pair.same()
            before = pair.handle.stats()["streamed"]
            for _ in range(16):
                assert pair.same()
            came.append(pair.handle.stats()["streamed"] - before)
            assert (pair.course.entries > 0) == by_itself
            del pair
            gc.collect()
    assert came[0] == came[1]


def test_runs_of_small_layers_are_left_and_entered(free_room, monkeypatch):
    small = [nn.Linear(128, 128) for _ in range(600)]
    pair = Course(free_room, nn.Sequential(*small), x(128), more=0)
    assert any(unit.run for unit in pair.ours.units)
    entered = []
    monkeypatch.setattr(Model, "enter", seen_by(entered, Model.enter))
    assert all(pair.same() for _ in range(8 * TRIES))
    assert len(entered) == 8 * len(pair.ours.units)


def test_a_run_that_a_pass_ends_in_is_left(free_room, monkeypatch):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(300))
            self.count = 300

        def forward(self, h):
            for layer in self.layers[: self.count]:
                h = layer(h)
            return h

    pair = Course(free_room, First(), x(128))
    pair.model.count = pair.plain.count = 298
    assert pair.settles()
    ends = []
    monkeypatch.setattr(Model, "_end", seen_by(ends, Model._end))
    assert all(pair.same() for _ in range(4 * TRIES)) and len(ends) == 4


@pytest.mark.parametrize("back", [0, 2])
def test_a_run_that_is_not_ended_by_its_last_layer_is_left_on_its_own_stream(free_room, back):
    """Also if another stream has begun with the next one before its end: until there it is used."""

    class Forks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(300))
            self.fork = self.last = 300  # of a run: there the other one begins, there it ends
            self.side = torch.cuda.Stream()

        def forward(self, h):
            for layer in self.layers[: self.fork]:
                h = layer(h)
            self.side.wait_stream(torch.cuda.current_stream())
            early = h
            for layer in self.layers[self.fork : self.last]:
                h = layer(h)
            with torch.cuda.stream(self.side):
                for layer in self.layers[self.last + 1 :]:
                    early = layer(early)
            torch.cuda.current_stream().wait_stream(self.side)
            return h + early

    model, inputs = Forks(), x(128)
    with torch.no_grad():
        plain = Forks().cuda()
        plain.load_state_dict(model.state_dict())
        free_room.how = "little"
        free_room.offload(model, 6 * MIB, prefetch=2)  # two streams have a segment each
        ours = inside(model)
        for _ in range(30):
            assert torch.equal(model(inputs), plain(inputs))
        units = [unit for unit in ours.units if unit.run]
        for unit in units[:-1]:
            last = int(unit.names[-1].rpartition(".")[2])
            model.last = plain.last = last
            model.fork = plain.fork = last - back
            for _ in range(20):
                assert torch.equal(model(inputs), plain(inputs))
            assert at_rest(model)
    assert ours.course.entries


def test_a_model_that_fits_has_none(free_room):
    model = layers(6)
    handle = free_room.offload(model)
    with torch.no_grad():
        for _ in range(40):
            model(x())
    assert not inside(model).course.left and not inside(model).course.entries
    assert handle.stats()["ring"] == 0


def test_autocast_keeps_nothing_and_is_as_it_was(free_room, small_units):
    pair = Course(free_room)
    kept = []
    hook = pair.model[3].register_forward_hook(
        lambda *_: kept.append(torch.is_autocast_cache_enabled())
    )
    assert pair.settles()
    assert kept[-1] is False and torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        assert pair.settles()
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)
    hook.remove()


def test_after_passes_have_overlapped_there_are_some_again(free_room, small_units):
    inside_ = Inside()
    pair = Course(free_room, nn.Sequential(*layers(12), inside_), prefetch=None, steady=False)
    inside_.do = lambda: pair.model(pair.inputs)
    assert pair.same()
    assert pair.ours.station.crowded and pair.ours.timed
    for _ in range(4):
        assert pair.settles()
        before = pair.course.entries
        assert all(pair.same() for _ in range(32))
        assert pair.course.entries - before >= 16 * len(pair.ours.units)


def test_weights_beside_units_are_entered_by_python(free_room, small_units, monkeypatch):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
            self.inner = layers(6)

        def forward(self, h):
            return self.inner(torch.relu(h @ self.weight))

    monkeypatch.setattr("ebbtide._offload.adopt.KEPT_SPAN", 0)
    model = nn.Sequential(*layers(5), Beside(), *layers(5))
    pair = Course(free_room, model, more=4 * MIB, steady=False)
    assert all(pair.same() for _ in range(60))
    assert any(unit.span for unit in pair.ours.units)
    assert not pair.course.entries and not pair.course.left


# ---- it leaves nothing behind -------------------------------------------------------------------


def test_a_model_that_is_deleted_is_gone(free_room, small_units):
    pair = Course(free_room)
    units = [weakref.ref(unit) for unit in pair.ours.units]
    del pair
    gc.collect()
    assert not [unit for unit in units if unit() is not None]


def test_of_a_model_that_is_restored_no_unit_stays(free_room, small_units):
    pair = Course(free_room)
    units = [weakref.ref(unit) for unit in pair.ours.units]
    pair.handle.restore()  # what it had is still looked at
    gc.collect()
    assert not [unit for unit in units if unit() is not None]
    assert not pair.course.left
    with torch.no_grad():
        inputs = pair.inputs.cpu()
        assert torch.equal(pair.model(inputs), pair.plain.cpu()(inputs))


def test_a_course_refuses_what_is_none():
    with pytest.raises(TypeError):
        ebbtide._core.Course(None, threading.RLock())
    device = ebbtide.Device(0)
    mover = ebbtide._core.Mover(device)
    course = ebbtide._core.Course(mover, threading.RLock())
    vbar = ebbtide.VBAR(device, 4 * MIB)
    for units, portions, error in (
        ([], [], ValueError),
        ([1], [1], TypeError),
        ([1], [], ValueError),
        ([None], [-1], (TypeError, OverflowError)),
    ):
        with pytest.raises(error):
            course.lay(units, portions, [], vbar, b"", 1)
        assert not course.left
    assert course.clear() == (0, None)
    with pytest.raises(TypeError):
        ebbtide._core.Pass().course = 1
    mover.close()
    vbar.close()
