"""offload(): passes when nothing has to be learned any more; if a model fits, without Python."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading

import pytest
import torch
from offloaded import MIB, WIDTH, Boom, at_rest, inside, layers, x
from torch import nn

from ebbtide import _core
from ebbtide._offload import ahead
from ebbtide._offload.model import Model
from ebbtide._offload.station import Station
from ebbtide._offload.unit import Unit


def settled(room, model, inputs, expected):
    """Offloaded, and run until nothing is slow any more."""
    room.offload(model)
    for _ in range(5):
        assert torch.equal(model(inputs), expected)
    assert not inside(model).running.watched
    return inside(model)


@pytest.fixture
def seen(monkeypatch):
    """How often Python has seen a pass begin, end and fail."""
    calls = {"begin": 0, "end": 0, "failed": 0}

    def count(name):
        plain = getattr(Model, name)

        def counted(self, *args):
            calls[name] += 1
            return plain(self, *args)

        monkeypatch.setattr(Model, name, counted)

    for name in calls:
        count(name)
    return calls


@torch.no_grad()
def test_a_settled_pass_is_not_seen(free_room, seen):
    model, inputs = layers(12), x()
    expected = copy.deepcopy(model).cuda()(inputs)
    ours = settled(free_room, model, inputs, expected)
    before = dict(seen)
    assert torch.equal(model(inputs), expected)
    assert seen == before and at_rest(model)
    # Whoever has been given a weight's bytes may write to them, so every pass has to look.
    state = model.state_dict()
    state["3.0.weight"].zero_()
    other = model(inputs)
    assert seen["begin"] == before["begin"] + 1 and not torch.equal(other, expected)
    with torch.enable_grad():
        assert torch.equal(model(inputs), other)
    assert ours.running.depth == 0


@torch.no_grad()
@pytest.mark.parametrize("where", ["root", "unit"])
def test_a_settled_pass_that_raises(free_room, seen, where):
    boom = Boom(layers(12)) if where == "root" else Boom()
    model = boom if where == "root" else nn.Sequential(*layers(6), boom, *layers(6))
    inputs = x()
    expected = copy.deepcopy(model).cuda()(inputs)
    ours = settled(free_room, model, inputs, expected)
    boom.armed = True
    with pytest.raises(KeyError, match="boom"):
        model(inputs)
    boom.armed = False
    assert seen["failed"] == 1 and at_rest(model)
    assert torch.equal(model(inputs), expected)
    assert not ours.tracking


@torch.no_grad()
def test_a_settled_pass_without_memory_is_tried_again_with_all_there_is(free_room):
    model, inputs = layers(12), x()
    expected = copy.deepcopy(model).cuda()(inputs)
    ours = settled(free_room, model, inputs, expected)

    def grow(module, args):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    hook = model[5].register_forward_pre_hook(grow)
    with pytest.raises(torch.OutOfMemoryError):
        model(inputs)
    hook.remove()
    assert ours.tracking and ours.share.cautious and at_rest(model)
    assert torch.equal(model(inputs), expected)


@torch.no_grad()
def test_a_model_that_calls_itself(free_room):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = layers(12)

        def forward(self, h, again=True):
            h = self.part(h)
            return self(h, False) if again else h

    model, inputs = Twice(), x()
    expected = copy.deepcopy(model).cuda()(inputs)
    settled(free_room, model, inputs, expected)
    assert torch.equal(model(inputs), expected) and at_rest(model)


@torch.no_grad()
def test_threads_are_in_runs_of_their_own(free_room, small_units):
    model, inputs = layers(12, 128), x(128)
    expected = copy.deepcopy(model).cuda()(inputs)
    ours = settled(free_room, model, inputs, expected)
    assert any(u.run for u in ours.units)
    both = threading.Barrier(2)
    wrong = []

    def meet(module, args):
        both.wait(20)

    hook = model[1].register_forward_pre_hook(meet)  # while both are in the first run

    @torch.no_grad()
    def work():
        for _ in range(10):
            if not torch.equal(model(inputs), expected):
                wrong.append(True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert not wrong and at_rest(model)
    assert torch.equal(model(inputs), expected)


def test_a_run_is_its_thread_s(free_room):
    calls = _core.Pass()
    assert (calls.depth, calls.gates, calls.run) == (0, 0, None)
    model = layers(2)
    free_room.offload(model)
    mine, another = inside(model).units
    calls.run = mine
    found = []

    def other():
        found.append(calls.run)
        calls.run = another
        found.append(calls.run)
        calls.run = None
        found.append(calls.run)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None, another, None] and calls.run is mine
    calls.run = calls.run
    calls.run = None
    calls.run = None
    assert calls.run is None
    with pytest.raises(TypeError, match="unit"):
        calls.run = object()


def test_a_run_is_of_the_stream_on_which_it_was_entered(free_room):
    calls, stream = _core.Pass(), torch.cuda.Stream()
    model = layers(2)
    free_room.offload(model)
    run, another = inside(model).units
    assert calls.stream == 0 and not calls.strays(run) and not calls.strays(None)
    with torch.cuda.stream(stream):
        calls.run = run
        assert calls.stream == stream.cuda_stream and not calls.strays(run)
    assert calls.strays(run) and not calls.strays(another)
    calls.run = run
    assert calls.stream == 0 and not calls.strays(run)
    calls.run = None
    assert not calls.strays(run)


def test_a_thread_is_in_no_run_of_one_that_is_over(free_room):
    calls = _core.Pass()
    numbers, found = [], []
    model = layers(2)
    free_room.offload(model)

    def leave_it():
        numbers.append(threading.get_ident())
        calls.run = inside(model).units[0]

    def look():
        numbers.append(threading.get_ident())
        found.append(calls.run)

    for work in (leave_it, look):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [None], numbers


# ---- what the processor will need ---------------------------------------------------------------


@torch.no_grad()
def test_a_layer_that_is_gone_does_no_harm_to_the_one_before(free_room):
    model, inputs = layers(12), x()
    settled(free_room, model, inputs, copy.deepcopy(model).cuda()(inputs))
    for module in model:  # other dicts, elsewhere
        module[0].__dict__["_forward_hooks"] = {}
        module[0].__dict__.update({f"more{i}": i for i in range(40)})
    model[7] = nn.Identity()
    gc.collect()
    plain = copy.deepcopy(model).cuda()
    for _ in range(4):
        assert torch.equal(model(inputs), plain(inputs))


def test_every_layer_is_asked_for(free_room):
    model, inputs = layers(12), x()
    with torch.no_grad():
        settled(free_room, model, inputs, copy.deepcopy(model).cuda()(inputs))
    asked = {line for u in inside(model).units for step in u.around for line in step}
    own = model[5][0].__dict__
    for thing in (model[5][0], own, own["_parameters"], own["_forward_hooks"]):
        assert any(at <= id(thing) < at + size for at, size in asked)
    # Its bias, which stays where it is, and another one's weight, which is over the VBAR.
    assert any(at == model[5][0].bias._cdata for at, size in asked)
    unit = next(u for u in inside(model).units if len(u.bindings) > 1)
    assert len(unit.around) == len(unit.bindings) and all(unit.around)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@torch.no_grad()
def test_a_weight_without_memory_of_its_own(free_room, layout):
    """Such weights stay on the GPU."""

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            made = torch.eye(WIDTH)
            made = made.to_sparse() if layout == "coo" else made.to_sparse_csr()
            self.mix = nn.Parameter(made, requires_grad=False)
            self.register_buffer("other", made.clone())
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return self.part(h)

    model, inputs = nn.Sequential(*(Sparse() for _ in range(4))), x()
    expected = nn.Sequential(*(copy.deepcopy(m.part) for m in model)).cuda()(inputs)
    free_room.of = lambda model: 64 * MIB
    free_room.offload(model)
    for _ in range(3):
        assert torch.equal(model(inputs), expected)


def test_addresses_are_pairs_of_numbers():
    assert _core.Ahead([]).ranges == 0
    weight = torch.zeros(WIDTH)
    steps = [ahead.of_module(nn.Linear(2, 2)), [], ahead.of_memory(weight)]
    assert _core.Ahead(steps).ranges == sum(map(len, steps)) > 8
    for wrong in (None, [None], [[1]], [[(1,)]], [[(1, "2")]], [[(-1, 2)], 3]):
        with pytest.raises((TypeError, OverflowError)):
            _core.Ahead(wrong)
    with pytest.raises(TypeError, match="not a dict"):
        _core.table_of([])


# ---- and one that does not fit ------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Units whose tensors were made."""
    units, plain = [], Unit._ahead
    monkeypatch.setattr(Unit, "_ahead", lambda self, *a: units.append(self) or plain(self, *a))
    return units


@torch.no_grad()
def test_the_same_tensors_serve_again_after_some_passes(free_room, monkeypatch, made):
    """Units that do not go into the ring a whole number of times, and yet find their places."""
    monkeypatch.setattr("ebbtide._offload.units.FEW_PARTS", 6)
    monkeypatch.setattr("ebbtide._offload.units.RUN_PARTS", 6)
    model, inputs = layers(100), x()
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 44 * MIB
    free_room.offload(model)
    for _ in range(16):
        made.clear()
        assert torch.equal(model(inputs), expected)
    assert inside(model).slow and not made


@torch.no_grad()
def test_the_ring_is_two_whole_units_where_there_is_room(free_room):
    """Small weights, which stay, do not come off it: units would be elsewhere in every pass."""
    model, inputs = nn.Sequential(*(nn.Linear(256, 256) for _ in range(1100))), x(256)
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 160 * MIB
    free_room.offload(model)
    for _ in range(4):
        assert torch.equal(model(inputs), expected)
    ours = inside(model)
    assert ours.slow and ours.share.small > MIB
    assert ours.station.ring == -(-2 * ours.share.largest // (2 * MIB)) * 2 * MIB


@torch.no_grad()
def test_units_that_come_to_ever_new_places_do_not_for_ever(free_room, monkeypatch, made):
    """What comes in a pass is four rings and 2 MiB: each time all units are 2 MiB further on."""
    monkeypatch.setattr("ebbtide._offload.units.LOT", 80)
    monkeypatch.setattr("ebbtide._offload.model.MOST", 0.3)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(1000)))
    inputs = x(256)
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 128 * MIB
    free_room.offload(model)
    for _ in range(24):
        made.clear()
        assert torch.equal(model(inputs), expected)
    ours = inside(model)
    coming = sum(u.bytes - u.resident for u in ours.units)
    assert ours.runs_stay and coming % ours.station.ring == 2 * MIB
    assert not made


@torch.no_grad()
def test_of_a_small_model_stays_what_fits(free_room):
    """Which is less than a large page."""
    model, inputs = layers(64), x()  # 64 MiB, and biases
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 30 * MIB
    handle = free_room.offload(model)
    for _ in range(12):
        assert torch.equal(model(inputs), expected)
    assert inside(model).slow and handle.stats()["resident"] > 16 * MIB


@torch.no_grad()
def test_weights_that_change_are_filled_again_where_they_are(free_room):
    model, inputs = layers(16), x()
    free_room.of = lambda model: 14 * MIB
    handle = free_room.offload(model)
    handle.pin(model[3])
    for _ in range(12):
        model(inputs)
    assert inside(model).settled and handle.residency()["3"] == 1
    model[3][0].weight.mul_(2)
    plain = copy.deepcopy(model).cuda()
    expected = plain(inputs)
    for _ in range(2):
        assert torch.equal(model(inputs), expected)
    assert handle.residency()["3"] == 1


@torch.no_grad()
def test_many_small_layers_come_in_one_part_where_many_of_them_stay(free_room, monkeypatch):
    monkeypatch.setattr("ebbtide._offload.units.RUN_PARTS", 12)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(400)))  # 56 MiB
    inputs = x(192)
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 38 * MIB
    free_room.offload(model)
    for _ in range(20):
        assert torch.equal(model(inputs), expected)
    ours = inside(model)
    assert not ours.runs_stay
    coming = [u for u in ours.units if u.small and u.resident < u.bytes]
    assert coming and all(u.bytes - u.resident <= ours.station.ring // 3 for u in coming)
    before = ours.mover.stats()
    for _ in range(4):
        assert torch.equal(model(inputs), expected)
    now = ours.mover.stats()
    rounds = sum(u.bytes - u.resident for u in coming) // ours.station.ring + 1  # one is in two
    assert 0 < now["cargoes"] - before["cargoes"] <= 4 * (len(coming) + rounds)


@torch.no_grad()
def test_pytorch_is_not_asked_in_every_pass_what_it_could_give_back(free_room, monkeypatch):
    asked = []
    plain = torch.cuda.memory_stats_as_nested_dict
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda *a: asked.append(1) or plain(*a)
    )
    model, inputs = layers(16), x()
    free_room.of = lambda model: 9 * MIB
    free_room.offload(model)
    for _ in range(12):
        model(inputs)
    small = [torch.empty(256 << 10, dtype=torch.uint8, device="cuda") for _ in range(2)]
    model(inputs)
    asked.clear()
    for _ in range(18):
        model(inputs)
    assert inside(model).slow and len(asked) == 2
    small += [torch.empty(256 << 10, dtype=torch.uint8, device="cuda") for _ in range(7)]
    model(inputs)
    assert len(asked) == 3  # it holds more now


@torch.no_grad()
def test_where_nothing_changes_a_model_s_share_is_not_thought_over(free_room, monkeypatch):
    fitted = []
    plain = Station.fit_ring
    monkeypatch.setattr(Station, "fit_ring", lambda self: fitted.append(1) or plain(self))
    model, inputs = layers(16), x()
    free_room.of = lambda model: 12 * MIB
    handle = free_room.offload(model)
    expected = copy.deepcopy(model).cuda()(inputs)
    for _ in range(24):
        model(inputs)
    fitted.clear()
    for _ in range(4):
        assert torch.equal(model(inputs), expected)
    assert not fitted and inside(model).slow
    resident = handle.stats()["resident"]
    with free_room.device() as device:
        device.limit = free_room.limit + 4 * MIB
        for _ in range(2):
            assert torch.equal(model(inputs), expected)
        assert fitted and handle.stats()["resident"] > resident
        with contextlib.suppress(_core.Busy):
            device.limit = free_room.limit - 2 * MIB
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
        assert device.stats()["held"] <= free_room.limit - 2 * MIB


def test_a_load_is_told_what_it_belongs_to():
    load = _core.Load(1)
    assert (load.whole, load.used, load.cargoes, load.staged, load.key) == (False, 0, 0, [], b"")
    for wrong in (lambda: _core.Load(), lambda: _core.Load(most=1), lambda: _core.Load("1")):
        with pytest.raises(TypeError):
            wrong()
    for method in (load.use, load.done, load.drop):
        with pytest.raises(TypeError, match="Mover"):
            method(None)
    with pytest.raises(TypeError):
        load.advance(None, None, True)


@torch.no_grad()
def test_runs_of_small_layers_stay_as_a_whole_where_most_of_the_model_does(free_room, monkeypatch):
    monkeypatch.setattr("ebbtide._offload.units.RUN_PARTS", 12)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(800)))  # 112 MiB
    inputs = x(192)
    expected = copy.deepcopy(model).cuda()(inputs)
    free_room.of = lambda model: 104 * MIB
    free_room.offload(model)
    ours = inside(model)

    def partly():
        for _ in range(20):
            assert torch.equal(model(inputs), expected)
        assert all(u.small for u in ours.units[:-1])
        return [u for u in ours.units if 0 < u.resident < u.bytes]

    assert len(partly()) <= 1 and ours.runs_stay
    some = sum(u.resident == u.bytes for u in ours.units)
    assert len(ours.units) / 3 < some < len(ours.units)
    planned = []
    plain = Model.plan
    monkeypatch.setattr(Model, "plan", lambda self: planned.append(1) or plain(self))
    with free_room.device() as device:
        with contextlib.suppress(_core.Busy):
            device.limit = free_room.limit - 48 * MIB
        assert len(partly()) >= len(ours.units) / 3 and not ours.runs_stay
        device.limit = free_room.limit
        assert len(partly()) <= 1 and ours.runs_stay
    assert len(planned) == 2
