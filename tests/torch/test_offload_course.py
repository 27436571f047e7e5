"""offload(): passes that go as the last one went, without Python; and what ends that."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref

import pytest
import torch
from offloaded import MIB, WIDTH, Boom, at_rest, inside, layers, square, x
from torch import nn

import ebbtide
from ebbtide import _unseen
from ebbtide._offload import share as shares
from ebbtide._offload.model import TRIES, Model

pytestmark = pytest.mark.skipif(
    not _unseen.by_strategy, reason="torch.compile() has to be told: Python sees to all passes"
)


class Course:
    """An offloaded model whose passes go by a course, beside the plain one. Its ring is not looked
    at, unless that is said: how large it should be depends on how busy this machine is."""

    def __init__(self, room, model=None, inputs=None, more=2 * MIB, steady=True, prefetch=2):
        self.model = layers(12) if model is None else model
        self.inputs = x() if inputs is None else inputs
        with torch.no_grad():
            self.plain = copy.deepcopy(self.model).cuda()
            self.room = room
            room.how = "little"
            self.handle = room.offload(self.model, more, prefetch=prefetch)
            self.ours = inside(self.model)
            if steady:
                assert self.settles()

    def settles(self):
        """After some passes one goes by a course, and the next one may."""
        return any(self.goes_by_itself() and self.course.left for _ in range(50 * TRIES))

    @property
    def course(self):
        return self.ours.course

    def same(self, inputs=None):
        with torch.no_grad():
            given = self.inputs if inputs is None else inputs
            assert torch.equal(self.model(given), self.plain(given))
        return at_rest(self.model)

    def has_the_same(self):
        ours, plain = self.model.state_dict(), self.plain.state_dict()
        return all(torch.equal(ours[name].cpu(), plain[name].cpu()) for name in ours)

    def goes_by_itself(self):
        """The next pass does, all of it."""
        before = self.course.entries, self.ours.slow_entries
        assert self.same()
        return self.course.entries > before[0] and self.ours.slow_entries == before[1]

    def ends(self, change):
        """Something ends it, in a pass or between two; what is computed is right, and some time
        passes go by a course again."""
        change(self)
        assert not self.course.running
        assert not self.goes_by_itself() or change in NOTHING_NEW
        assert self.same()
        return self.settles()


# ---- it is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [2, None])
def test_of_passes_that_are_the_same_python_sees_a_few(
    free_room, small_units, monkeypatch, prefetch
):
    """One of so many, in which it is tried what else could stay; and where the ring is looked at,
    those that are measured, and those after them."""
    pair = Course(free_room, prefetch=prefetch)
    seen = []
    monkeypatch.setattr(Model, "enter", seen_by(seen, Model.enter))
    passes = 8 * TRIES
    before = pair.handle.stats()
    assert all(pair.same() for _ in range(passes))
    after = pair.handle.stats()
    units = len(pair.ours.units)
    if prefetch:
        assert len(seen) == passes // TRIES * units
    else:
        assert 0 < len(seen) < passes * units  # how many depends on the machine
    # It streams as it did: what is counted tells so, and what has come.
    came = after["streamed"] - before["streamed"]
    assert came > 0 and came % passes == 0 and after["one_by_one"] == 0
    assert after["slow_entries"] - before["slow_entries"] >= passes * units // 2


def seen_by(seen, method):
    def wrapped(*arguments):
        seen.append(arguments)
        return method(*arguments)

    return wrapped


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


def test_a_run_that_is_not_ended_by_its_last_layer_is_left_on_its_own_stream(free_room):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(600))
            self.last = 600  # of a run, which is left out
            self.side = torch.cuda.Stream()

        def forward(self, h):
            for layer in self.layers[: self.last]:
                h = layer(h)
            side = self.side
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for layer in self.layers[self.last + 1 :]:
                    h = layer(h)
            torch.cuda.current_stream().wait_stream(side)
            return h

    model = Skips()
    inputs = x(128)
    with torch.no_grad():
        plain = Skips().cuda()
        plain.load_state_dict(model.state_dict())
        free_room.how = "little"
        free_room.offload(model, 4 * MIB, prefetch=2)  # two streams have a segment each
        ours = inside(model)
        for _ in range(30):
            assert torch.equal(model(inputs), plain(inputs))
        units = [unit for unit in ours.units if unit.run]
        for unit in units[:-1]:
            model.last = plain.last = int(unit.names[-1].rpartition(".")[2])
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


# ---- what ends it -------------------------------------------------------------------------------


def another_order(pair):
    def backwards(model):
        model._modules = dict(reversed(model._modules.items()))

    backwards(pair.model)
    backwards(pair.plain)


def a_layer_by_itself(pair):
    with torch.no_grad():
        assert torch.equal(pair.model[3](pair.inputs), pair.plain[3](pair.inputs))


def other_values(pair):
    values = pair.plain.state_dict().items()
    state = {name: torch.randn(t.shape) / WIDTH**0.5 for name, t in values}
    pair.model.load_state_dict(state)
    pair.plain.load_state_dict(state)


def another_weight(pair):
    weight = torch.randn(WIDTH, WIDTH)
    pair.model[5][0].weight = nn.Parameter(weight.clone())
    pair.plain[5][0].weight = nn.Parameter(weight.cuda())


def what_it_is_asked_for(pair):
    assert pair.has_the_same()


def a_write_to_a_weight(pair):
    with torch.no_grad():
        pair.model[4][0].weight[3] = 1.0
        pair.plain[4][0].weight[3] = 1.0


def more_room(pair):
    pair.room.device().limit = pair.room.limit + 4 * MIB


def more_tensors(pair):
    held = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
    assert pair.same()
    del held
    torch.cuda.empty_cache()


def gradients(pair):
    given = pair.inputs.clone().requires_grad_()
    with torch.enable_grad():
        result = pair.model(given)
        with pytest.raises(RuntimeError, match="no backward"):
            result.sum().backward()
    assert at_rest(pair.model)


def another_stream(pair):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert pair.same()
    torch.cuda.current_stream().wait_stream(stream)


def another_thread(pair):
    failures = []

    def run():
        try:
            assert all(pair.same() for _ in range(3))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures


def a_priority(pair):
    pair.handle.prioritize()


def a_layer_that_stays(pair):
    pair.handle.pin(pair.model[2])


def a_layer_that_does_not_page(pair):
    pair.handle.exclude(pair.model[0])


def another_dtype(pair):
    for model in (pair.model, pair.plain):
        model.bfloat16()
    pair.inputs = pair.inputs.bfloat16()
    assert pair.same()
    for model in (pair.model, pair.plain):
        model.float()
    pair.inputs = pair.inputs.float()


def nothing_in_the_ring(pair):
    pair.ours.station.set_ring(0)


NOTHING_NEW = a_write_to_a_weight, gradients, another_thread  # for the pass that comes after it


@pytest.mark.parametrize(
    "change",
    [
        another_order,
        a_layer_by_itself,
        other_values,
        another_weight,
        what_it_is_asked_for,
        a_write_to_a_weight,
        more_room,
        more_tensors,
        gradients,
        another_stream,
        another_thread,
        a_priority,
        a_layer_that_stays,
        a_layer_that_does_not_page,
        another_dtype,
        nothing_in_the_ring,
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_between_two_passes(free_room, small_units, change):
    pair = Course(free_room)
    assert pair.ends(change) or change is a_layer_by_itself


class Inside(nn.Module):
    """Calls something, once, in the middle of the model."""

    def __init__(self):
        super().__init__()
        self.do = None

    def forward(self, h):
        do, self.do = self.do, None
        if do is not None:
            do()
        return h


@pytest.mark.parametrize(
    "change",
    [
        a_write_to_a_weight,
        other_values,
        what_it_is_asked_for,
        more_room,
        another_stream,
        another_thread,
        a_priority,
        a_layer_that_stays,
        a_layer_by_itself,
        nothing_in_the_ring,
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_in_the_middle_of_one(free_room, small_units, change):
    inside_ = Inside()
    pair = Course(free_room, nn.Sequential(*layers(6), inside_, *layers(6)))
    calm = pair.same
    seen = []

    def do():
        seen.append(pair.course.running)
        if change in (another_stream, another_thread, more_tensors):
            pair.same = lambda: torch.equal(pair.model[0](pair.inputs), pair.plain[0](pair.inputs))
        change(pair)
        pair.same = calm

    inside_.do = do
    orders = pair.ours.sequence.changes
    with torch.no_grad():
        got = pair.model(pair.inputs)
        if change is other_values:
            assert torch.isfinite(got).all()  # before it some layers had other values
        else:
            assert torch.equal(got, pair.plain(pair.inputs)) or change is a_write_to_a_weight
    assert seen == [True] and not pair.course.running
    if change not in (a_layer_by_itself, another_thread, another_stream):  # which run a layer
        assert pair.ours.sequence.changes == orders  # Python knows what was before
    assert all(pair.same() for _ in range(4))
    assert pair.settles() or change is a_layer_by_itself


@pytest.mark.parametrize("where", ["before a unit", "in one"])
def test_ctrl_c_is_told_while_a_stream_is_met(free_room, small_units, monkeypatch, where):
    """Python looks at each stream once: when a unit is entered on it, or left."""
    inside_ = Inside()
    model = layers(12)
    model[3].append(inside_)
    if where == "before a unit":
        model[3] = nn.Sequential(square(), nn.ReLU())
        model.insert(3, inside_)
    pair = Course(free_room, model)
    stream, default, struck = torch.cuda.Stream(), torch.cuda.current_stream(), []

    def meet(*_):
        struck.append(pair.course.running)
        raise KeyboardInterrupt

    inside_.do = lambda: torch.cuda.set_stream(stream)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(ebbtide.Device, "_meet_stream", meet)
        stream.wait_stream(default)
        try:
            with pytest.raises(KeyboardInterrupt):
                pair.model(pair.inputs)
        finally:
            torch.cuda.set_stream(default)
            default.wait_stream(stream)
    assert struck[0] is False  # Python had it by then
    assert pair.same() and pair.settles()


@pytest.mark.parametrize("where", [0, 3, 11])
def test_a_pass_that_raises(free_room, small_units, where):
    boom = Boom()
    parts = list(layers(12))
    parts[where] = nn.Sequential(square(), boom)
    pair = Course(free_room, nn.Sequential(*parts))
    for _ in range(3):
        boom.armed = True
        with torch.no_grad(), pytest.raises(KeyError, match="boom"):
            pair.model(pair.inputs)
        assert at_rest(pair.model) and not pair.course.running
        assert torch.is_autocast_cache_enabled()
        boom.armed = False
        assert pair.settles()


def test_a_unit_that_is_called_once_more(free_room, small_units):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(12)
            self.again = []

        def forward(self, h):
            for number, layer in enumerate(self.layers):
                h = layer(h)
                if number in self.again:
                    h = layer(h)
            return h

    pair = Course(free_room, Twice())
    for again in ([3], [0, 11], [5]):
        pair.model.again = pair.plain.again = again
        assert pair.same() and not pair.course.running
        assert pair.settles()


def test_another_model_ends_it_and_is_gone_again(free_room, small_units):
    pair = Course(free_room)
    other = layers(4)
    with torch.no_grad():
        expected = copy.deepcopy(other).cuda()(pair.inputs)
        handle = ebbtide.offload(other)
        for _ in range(20):
            assert pair.same() and torch.equal(other(pair.inputs), expected)
        assert not pair.course.left and not pair.course.running
    del other, handle
    gc.collect()
    assert pair.settles()


def test_threads_that_run_one_model_at_once(free_room, small_units):
    pair = Course(free_room, more=8 * MIB)
    with torch.no_grad():
        expected = pair.plain(pair.inputs)
    for _ in range(3):
        failures, start = [], threading.Barrier(3)

        def run(start=start, failures=failures):
            try:
                start.wait()
                with torch.no_grad():
                    for _ in range(10):
                        assert torch.equal(pair.model(pair.inputs), expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and not pair.course.running and at_rest(pair.model)


def test_a_buffer_that_layers_write_is_written(free_room, small_units):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = square()
            self.register_buffer("sums", torch.zeros(WIDTH, WIDTH // 2))

        def forward(self, h):
            h = torch.relu(self.layer(h))
            self.sums += h[:, : WIDTH // 2]
            return h

    pair = Course(free_room, nn.Sequential(*(Counts() for _ in range(8))), more=8 * MIB)
    for _ in range(12):
        assert pair.same()
    assert pair.has_the_same()


def test_a_weight_that_a_forward_writes_is_written(free_room, small_units):
    class Drifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
            self.drifts = False

        def forward(self, h):
            if self.drifts:
                self.weight[0] += 1.0
            return torch.relu(h @ self.weight)

    pair = Course(free_room, nn.Sequential(*(Drifts() for _ in range(12))))
    for number in (0, 4, 11):
        assert pair.settles()
        for drifts in (True, False):
            pair.model[number].drifts = pair.plain[number].drifts = drifts
            assert pair.same() and pair.same()
    assert pair.has_the_same()


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


# ---- anything, at any time ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens(free_room, small_units, monkeypatch, seed):
    monkeypatch.setattr(shares, "PEAKS", 1)  # a course is laid as soon as can be
    chance = random.Random(seed)
    inside_ = Inside()
    pair = Course(free_room, nn.Sequential(*layers(6), inside_, *layers(6)), steady=False)
    between = [
        other_values,
        another_weight,
        a_write_to_a_weight,
        more_room,
        more_tensors,
        gradients,
    ]
    between += [another_stream, another_thread, a_priority, nothing_in_the_ring, another_order]
    between += [a_layer_that_stays, another_dtype]
    for _ in range(60):
        if chance.random() < 0.2:
            chance.choice(between)(pair)
        if chance.random() < 0.1:
            inside_.do = lambda: pair.ours.station.set_ring(chance.choice([0, 2, 4]) * MIB)
        assert pair.same()
    assert pair.course.entries
