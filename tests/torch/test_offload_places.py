"""offload(): the dicts in which modules have their weights, and what is put into them and taken out
of them while a model runs."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, around, room_for, square, x
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, prune

import ebbtide
from ebbtide._offload.handle import is_parked

SMALL = 64 << 10


class Part(nn.Module):
    """Two layers that are one unit."""

    def __init__(self, before=lambda part, h: None):
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH // 2)
        self.up = nn.Linear(WIDTH // 2, WIDTH)
        self.before = before

    def forward(self, h):
        self.before(self, h)
        return self.up(self.down(h))


def parked_again(model):
    return all(is_parked(p) or p.nbytes <= SMALL for p in model.parameters())


# ---- reading ------------------------------------------------------------------------------------


def every_way(places, key):
    """What each way of reading a dict gives for a key."""
    yield places[key]
    yield places.get(key)
    yield places.copy()[key]
    yield dict(places)[key]
    yield {**places}[key]
    yield (places | {})[key]
    yield ({} | places)[key]
    yield dict(places.items())[key]
    yield dict(zip(places, places.values(), strict=True))[key]
    yield dict(zip(places.keys(), places.values(), strict=True))[key]
    yield places.setdefault(key, None)
    yield copy.copy(places)[key]


def test_a_dict_gives_real_tensors_inside_and_parked_ones_outside(room):
    class Reads(Part):
        def forward(self, h):
            for value in every_way(self.down._parameters, "weight"):
                assert not is_parked(value)
                h = h + F.linear(F.linear(h, value), self.up._parameters["weight"])
            names = [name for name, _ in self.named_parameters()]
            assert names == ["down.weight", "down.bias", "up.weight", "up.bias"]
            assert not any(is_parked(p) for p in self.parameters())
            return h

    model = around(Reads())
    room.same(model, x(), passes=6, more=room_for(2, 8))
    places = model[2].down._parameters
    assert all(value is places["weight"] for value in every_way(places, "weight"))
    assert is_parked(places["weight"]) and list(reversed(places)) == ["bias", "weight"]
    assert places.get("nothing") is None and places.get("nothing", 3) == 3
    assert "weight" in places and "nothing" not in places and len(places) == 2
    with pytest.raises(KeyError):
        places["nothing"]
    with pytest.raises(KeyError):
        places.pop("nothing")
    assert type(places.copy()) is type(copy.copy(places)) is type(copy.deepcopy(places)) is dict
    again = pickle.loads(pickle.dumps(places))
    assert type(again) is dict and torch.equal(again["weight"].cuda(), places["weight"])
    assert len(type(places).fromkeys("ab", 1)) == 2


def test_a_pass_that_raises_leaves_parked_tensors(room):
    def fails(part, h):
        assert not is_parked(part.down.weight)
        if part.armed:
            raise KeyError("armed")

    part = Part(fails)
    part.armed = False
    pair = Pair(room, around(part))
    for _ in range(3):
        part.armed = True
        with pytest.raises(KeyError, match="armed"), torch.no_grad():
            pair.model(pair.inputs)
        assert parked_again(pair.model)
        part.armed = False
        assert pair.same()


def test_a_forward_that_is_a_generator(room):
    class Yields(Part):
        def forward(self, h):
            yield self.up(self.down(h))
            yield F.linear(F.linear(h, self.down.weight), self.up.weight)

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.last = Yields(), square()

        def forward(self, h):
            for each in self.part(h):
                h = h + self.last(each)
            return h

    room.same(around(Takes()), x(), passes=6, more=room_for(2, 8))


def test_an_ensemble_of_its_own_layers(room):
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Part() for _ in range(3)])

        def forward(self, h):
            state = stack_module_state(list(self.parts))
            base = copy.deepcopy(self.parts[0]).to("meta")
            each = torch.func.vmap(
                lambda p, b, h: functional_call(base, (p, b), (h,)), in_dims=(0, 0, None)
            )
            return each(*state, h).sum(0) + parameters_to_vector(self.parts[1].parameters())[:WIDTH]

    room.same(around(Ensemble(), 14), x(), more=room_for(24, 60))


# ---- writing ------------------------------------------------------------------------------------


def functional(part, h):
    functional_call(part.down, {n: p * 2.0 for n, p in part.down.named_parameters()}, (h,))


def put_back(part, h):
    places = part.down._parameters
    everything = dict(places.items())
    places.clear()
    places.update(everything)
    places["weight"] = places.pop("weight")
    places |= dict([places.popitem()])
    part.down.weight = part.down.weight
    weight = part.down.weight
    del part.down.weight
    part.down.register_parameter("weight", weight)


def same_memory(part, h):
    part.down.weight = nn.Parameter(part.down.weight.detach())
    part.up._parameters["weight"] = nn.Parameter(part.up.weight.data)


def buffer_of_a_weight(part, h):
    if not hasattr(part, "rows"):
        part.register_buffer("rows", part.down.weight.detach()[3:7])
    assert torch.equal(part.rows, part.down.weight[3:7])


def new_ones(part, h):
    part.down.weight = nn.Parameter(part.down.weight.detach() * 1.5)
    part.up._parameters["weight"] = nn.Parameter(part.up.weight.detach() * 0.5)


def more_of_them(part, h):
    count = len(part._parameters)
    part.register_parameter(f"more{count}", nn.Parameter(torch.ones(WIDTH, WIDTH).cuda() * count))
    part.up.bias = nn.Parameter(part._parameters[f"more{count}"].detach()[0] / 4)


def written_and_put_back(part, h):
    part.down.weight.mul_(1.01)
    expected = part.down.weight * 1
    weight = part.down._parameters.pop("weight")
    assert torch.equal(weight, expected)
    part.down._parameters["weight"] = weight


def written_and_given_another_name(part, h):
    part.down.weight.mul_(1.01)
    part.down.weight = nn.Parameter(part.down.weight.detach())
    part.down.weight.add_(0.01)


def loaded(part, h):
    part.load_state_dict({n: t * 1.01 for n, t in part.state_dict().items()}, assign=True)


def copied(part, h):
    deep = copy.deepcopy(part.down)
    assert torch.equal(deep(h), part.down(h)) and type(deep._parameters) is dict


def told_again(part, h):
    part.to(h.device).to(h.dtype).requires_grad_(False).eval().zero_grad()


WAYS = [
    functional,
    put_back,
    same_memory,
    buffer_of_a_weight,
    new_ones,
    more_of_them,
    written_and_put_back,
    written_and_given_another_name,
    loaded,
    copied,
    told_again,
]


STEADY = {buffer_of_a_weight: "", copied: "", told_again: ""}  # in each pass all is as it was


@pytest.mark.parametrize("way", WAYS)
def test_what_a_pass_does_to_its_own_weights(room, way):
    model = around(Part(way))
    more = 30 * MIB if way is more_of_them else room_for(2, 30)
    room.same(model, x(), passes=5, more=more, no_course=STEADY.get(way, "weights are others"))
    with torch.no_grad():
        model(x())
    assert all(is_parked(p) or p.nbytes <= SMALL for p in model[0].parameters())
    if way in (functional, put_back, same_memory, buffer_of_a_weight):
        assert parked_again(model)


def test_a_weight_that_is_tied_in_forward_is_tied(room):
    class Ties(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Linear(WIDTH, WIDTH // 4) for _ in range(2))
            self.up = nn.Linear(WIDTH // 4, WIDTH)

        def forward(self, h):
            self.other.weight = self.one.weight
            assert self.other.weight is self.one.weight
            return self.up(self.one(h) + self.other(h))

    model = around(Ties())
    room.same(
        model, x(), passes=5, more=room_for(2, 8), no_course="a weight is another one in each pass"
    )
    assert model[2].other.weight is model[2].one.weight and parked_again(model)
    outside = nn.Linear(1, 1)
    model[2].one.register_forward_hook(lambda one, *_: setattr(outside, "weight", one.weight))
    with torch.no_grad():
        model(x())
    assert outside.weight is model[2].one.weight


class Forgets(nn.Module):
    """Writes to a buffer, and gives up a weight."""

    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)
        self.lost = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)
        self.register_buffer("count", torch.zeros(WIDTH, WIDTH))

    def forward(self, h):
        self.count.add_(1)
        if "lost" in self._parameters:
            h = F.linear(h, self.lost)
            del self.lost
        return F.linear(h, self.kept) + self.count[0]


def test_a_weight_that_is_deleted_in_forward(room):
    room.same(around(Forgets()), x(), passes=5, more=room_for(2, 8))


def test_weights_that_are_pruned(room):
    pair = Pair(room, around(square()))
    assert pair.each(lambda m: prune.l1_unstructured(m[1][0], "weight", 0.3))
    assert pair.each(lambda m: prune.remove(m[1][0], "weight"))
    pair.back()


def test_lists_and_dicts_of_parameters(room):
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 20 for _ in range(3)])
            self.dict = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "b": torch.randn(3)})

        def forward(self, h):
            for weight in self.list:
                h = F.linear(h, weight)
            for weight in (*self.dict.values(), *self.parameters()):
                h = h + weight.flatten()[0]
            return h

    def change(model):
        ones = torch.ones(WIDTH, WIDTH).cuda()
        model[2].list.append(ones / 64)
        model[2].dict["c"] = nn.Parameter(ones)
        model[2].list[0] = nn.Parameter(ones / 32)
        model[2].dict.pop("a")

    pair = Pair(room, around(Lists()), more=8 * MIB)
    assert pair.each(change)
    pair.back()


def test_threads_that_change_a_model_and_that_run_it(room):
    pair = Pair(room, around(square()), more=room_for(4, 60))
    with torch.no_grad():
        expected = pair.plain(pair.inputs)
    torch.cuda.synchronize()
    errors = []

    def runs():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                assert torch.equal(pair.model(pair.inputs), expected)
            torch.cuda.current_stream().synchronize()

    def changes():
        for _ in range(20):
            for module in pair.model.modules():
                if "weight" in module._parameters:
                    module._parameters["weight"] = module._parameters["weight"]
                    module.weight = module.weight
                    assert len(list(module.named_parameters())) == 2

    def guarded(work):
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in (runs, runs, changes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pair.same() and parked_again(pair.model)


# ---- what outlives the use of a unit ------------------------------------------------------------


class Rows(nn.Module):
    """A table that is given away by its rows."""

    def __init__(self, rows, wrap=lambda part: part):
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, WIDTH))
        self.wrap = wrap

    def forward(self, h):
        return self.wrap(self.table[2 : 2 + h.shape[0]])


class Adds(nn.Module):
    """Rows are taken first, and added last."""

    def __init__(self, wrap=lambda part: part, unwrap=lambda part: part):
        super().__init__()
        self.rows, self.unwrap = Rows(1024, wrap), unwrap
        self.rest = nn.Sequential(*(square() for _ in range(6)))

    def forward(self, h):
        rows = self.rows(h)
        return self.rest(h) + self.unwrap(rows)


def add_all(part):
    return part["a"][0] + part["a"][1][0] + part["b"].expand(1, WIDTH)


def nested():
    return Adds(
        lambda t: {"a": [t, (t.t().t(), None, 1)], "b": t[:, :1].expand(1, 7)[:, :1]}, add_all
    )


@pytest.mark.parametrize(
    "build", [Adds, lambda: around(Adds()), nested], ids=["", "inside", "nested"]
)
def test_a_result_that_is_part_of_a_weight_stays_what_it_is(room, build):
    room.same(build(), x(), passes=5, more=room_for(2, 8))


def test_a_result_that_is_part_of_a_weight_has_its_strides(free_room):
    model, inputs = Adds(), x()
    free_room.offload(model)
    ours = model.forward.model
    with torch.no_grad():
        for _ in range(4):
            model(inputs)
        assert not ours.tracking
        given = model.rows(inputs)
        for wrap in (lambda t: t[:, ::2], lambda t: t.t(), lambda t: t[:, :1].expand(1, 7)):
            model.rows.wrap = wrap
            made = model.rows(inputs)
            assert made.stride() == wrap(model.rows.table[2:3]).stride()
            assert torch.equal(made, wrap(given)) and not ours.keep.knows(made.data_ptr())
        kept = []
        model.rows.wrap = lambda t: kept.append(t) or kept
        assert model.rows(inputs) is kept


@pytest.mark.parametrize("told", [False, True])
def test_results_inside_of_a_run_of_small_layers(room, told):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            small = (nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(120))
            self.parts = nn.ModuleList(small)
            self.rows = nn.ModuleList([Rows(64) for _ in range(4)])

        def forward(self, h):
            rows = []
            for i, part in enumerate(self.parts):
                h = part(h)
                if i % 30 == 11:
                    rows.append(self.rows[i // 30](h))
            return h + sum(rows)

    order = [f"parts.{i}" for i in range(120)]
    for i in reversed(range(4)):
        order.insert(30 * i + 12, f"rows.{i}")
    model = Many()
    room.same(model, x(), passes=6, more=room_for(2, 8), order=order if told else None)
    # Of a run of many, only its ends and these have a gate.
    gates = [n for n, m in model.named_modules() if "forward" in m.__dict__]
    assert len([n for n in gates if n.startswith("rows")]) >= 2
    assert len(gates) < 30


def test_nothing_is_left_when_a_unit_outlives_its_model(room):
    model = around(Part(functional))
    room.offload(model, 30 * MIB)
    with torch.no_grad():
        for _ in range(3):
            model(x())
    ours = weakref.ref(model.forward.model)
    unit = ours().units[2]
    gc.disable()
    try:
        del model
        assert ours() is None
        with ebbtide.Device(0) as device:
            assert device.stats()["vbars"] == 1
            assert not is_parked(unit.bindings[0].there()) or unit.depth == 0
            del unit
            assert (device.stats()["vbars"], device.stats()["pinned"]) == (0, 0)
    finally:
        gc.enable()
