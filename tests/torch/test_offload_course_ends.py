"""offload(): what ends a course, and that Python knows what has been done without it."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import signal
import threading

import pytest
import torch
from offloaded import MIB, WIDTH, Boom, at_rest, layers, square
from on_course import Course, Inside
from torch import nn
from torch.overrides import TorchFunctionMode

import ebbtide
import ebbtide.sim as sim
from ebbtide import _unseen
from ebbtide._offload import share as shares
from ebbtide._offload.model import TRIES, Model

pytestmark = pytest.mark.skipif(
    not _unseen.by_strategy, reason="torch.compile() has to be told: Python sees to all passes"
)


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
    pair.model[9][0].weight = nn.Parameter(weight.clone())
    pair.plain[9][0].weight = nn.Parameter(weight.cuda())


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
    beside(lambda: [pair.same() for _ in range(3)])


def a_priority(pair):
    pair.handle.prioritize()


def a_layer_that_stays(pair):
    pair.handle.pin(pair.model[2])


def a_layer_that_does_not_page(pair):
    pair.handle.exclude(pair.model[0])


def a_pass_in_it(pair):
    with torch.no_grad():
        assert torch.equal(pair.model(pair.inputs), pair.plain(pair.inputs))


def a_pass_of_another_thread(pair):
    beside(lambda: a_pass_in_it(pair))


def the_next_layer_in_another_thread(pair):
    with torch.no_grad():
        expected = pair.plain[7](pair.inputs)
        beside(lambda: same(pair.model[7], pair.inputs, expected))


def same(layer, inputs, expected):
    with torch.no_grad():
        assert torch.equal(layer(inputs), expected)


def beside(run):
    """In another thread."""
    failures = []

    def caught():
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    assert not failures


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
    """What is computed is right, and some time passes go by a course again."""
    pair = Course(free_room)
    change(pair)
    assert not pair.course.running
    assert not pair.goes_by_itself() or change in NOTHING_NEW
    assert pair.same()
    assert pair.settles() or change is a_layer_by_itself


@pytest.mark.parametrize(
    "change",
    [
        a_write_to_a_weight,
        another_weight,
        other_values,
        what_it_is_asked_for,
        more_room,
        another_stream,
        another_thread,
        the_next_layer_in_another_thread,
        a_pass_in_it,
        a_pass_of_another_thread,
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
    runs_more = a_layer_by_itself, another_thread, another_stream, the_next_layer_in_another_thread
    if change not in (*runs_more, a_pass_in_it, a_pass_of_another_thread):
        assert pair.ours.sequence.changes == orders  # Python knows what was before
    assert all(pair.same() for _ in range(4))
    assert pair.settles() or change is a_layer_by_itself


@pytest.mark.parametrize("how", ["stop", "by_hand"])
@pytest.mark.parametrize("where", [0, 6, 12])
def test_python_knows_what_has_been_done_without_it(
    free_room, small_units, monkeypatch, how, where
):
    """Of a pass that it takes over, or sees the end of; and how many there were before."""
    parts = [nn.Sequential(square(), nn.ReLU()) for _ in range(8)]
    parts += [nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, WIDTH), square()]
    parts.insert(where, inside_ := Inside())
    pair = Course(free_room, nn.Sequential(*parts), more=4 * MIB)
    ours, known, end = pair.ours, [], Model._end
    assert any(unit.run for unit in ours.units)

    def seen(model):
        order = [unit.names for unit in model.sequence.now]
        known.append((model.called[:], order, model.slow, model.followed, model.mixed))
        known.append((model.passes - inside_.calls, model.station.refused))
        end(model)

    monkeypatch.setattr(Model, "_end", seen)
    pair.course.stop()
    assert pair.same()
    expected = known[:]
    assert expected[0][2] > 1
    for _ in range(3):
        assert pair.settles()
        known.clear()
        ours.mixed, ours.station.refused = True, 7
        inside_.do = pair.course.stop if how == "stop" else ours.by_hand
        assert pair.same()
        assert known == expected


def test_another_order_is_known_as_it_went(free_room, small_units):
    pair = Course(free_room)
    units, before = pair.ours.sequence.steady(), pair.ours.sequence.changes

    def swap():
        """Of two that have both come by then."""
        for model in (pair.model, pair.plain):
            names = list(model._modules)
            names[9], names[10] = names[10], names[9]
            model._modules = {name: model._modules[name] for name in names}

    swap()
    assert pair.same() and pair.ours.sequence.changes == before + 1
    swap()
    assert pair.same() and pair.ours.sequence.steady() == []
    assert [pair.same() for _ in range(4)] and pair.ours.sequence.steady() == units


def test_a_weight_that_is_read_in_the_middle_of_one_is_looked_at(free_room, small_units):
    """By an operator, for the module that it is of is not called for that."""
    inside_ = Inside()
    pair = Course(free_room, nn.Sequential(*layers(6), inside_, *layers(6)))
    seen = []
    see = pair.ours._see_touched
    pair.ours._see_touched = lambda: (seen.append(len(pair.ours.touched)), see())[1]
    with torch.no_grad():
        expected = pair.plain[9][0].weight.sum()
        inside_.do = lambda: seen.append(torch.equal(pair.model[9][0].weight.sum(), expected))
    before = pair.course.entries
    assert pair.same() and seen == [True, 1]
    assert pair.course.entries > before  # it went on by itself
    assert pair.settles()


@pytest.mark.simulated
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_call_of_the_driver_that_fails_in_one(free_room, small_units, call):
    blocks = (nn.Sequential(square(), square(), square()) for _ in range(8))
    pair = Course(free_room, nn.Sequential(*blocks), more=8 * MIB)
    for nth in range(1, 24):
        assert pair.settles()
        sim.fail(call, nth=nth, code=999)
        with contextlib.suppress(ebbtide.Error):
            pair.same()
        sim.clear_failures()
        assert pair.same() and not pair.course.running


def test_a_unit_that_calls_itself(free_room, small_units):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = square()
            self.times = 1

        def forward(self, h, times=1):
            h = torch.relu(self.layer(h))
            return self(h, times + 1) if times < self.times else h

    pair = Course(free_room, nn.Sequential(*(Again() for _ in range(12))))
    for number, times in ((3, 2), (11, 3), (0, 2)):
        pair.model[number].times = pair.plain[number].times = times
        assert all(pair.same() for _ in range(40))
        pair.model[number].times = pair.plain[number].times = 1
        assert pair.settles()


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


class Struck(TorchFunctionMode):
    """Ctrl-C comes while it is asked, for one of the things that it is asked for."""

    def __init__(self, what, when):
        super().__init__()
        self.what, self.when, self.struck = what, when, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = repr(getattr(func, "__self__", func))
        if not self.struck and self.what in name and self.when():
            self.struck = True
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", ["_version", "data_ptr"])
def test_ctrl_c_is_told_while_somebody_sees_what_pytorch_is_asked_for(free_room, small_units, what):
    pair = Course(free_room)
    mode = Struck(what, lambda: pair.course.running)
    # Whoever is started in the background is told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), torch.no_grad(), mode:
            for _ in range(2 * TRIES):
                pair.model(pair.inputs)
    finally:
        signal.signal(signal.SIGINT, before)
    assert mode.struck
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
