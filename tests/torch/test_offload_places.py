"""offload(): the dicts in which modules have their weights, what is put into them and taken out of
them while a model runs, and weights that are parts of others."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, prune

import ebbtide
from ebbtide._offload.handle import is_parked

MIB = 1 << 20
SMALL = 64 << 10
WIDTH = 512  # a square of it is 1 MiB


def square():
    return nn.Linear(WIDTH, WIDTH)


def around(part, count=2):
    """A part of a model, with layers before and behind it."""
    before = (nn.Sequential(square(), nn.ReLU()) for _ in range(count))
    behind = (nn.Sequential(square(), nn.ReLU()) for _ in range(count))
    return nn.Sequential(*before, part, *behind)


def x(width=WIDTH):
    return torch.randn(1, width, device="cuda")


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


class Pair:
    """An offloaded model, and the same one as a plain model on the GPU."""

    def __init__(self, room, model, inputs=None, more=30 * MIB):
        self.model = model
        self.plain = copy.deepcopy(model).cuda()
        self.inputs = x() if inputs is None else inputs
        self.handle = room.offload(model, more)
        self.same()

    def both(self):
        return self.model, self.plain

    @torch.no_grad()
    def each(self, change):
        for model in self.both():
            change(model)
        return self.same()

    @torch.no_grad()
    def same(self):
        inputs = self.inputs.to(next(self.plain.parameters()).dtype)
        expected = self.plain(inputs)
        for _ in range(3):
            assert torch.equal(self.model(inputs), expected)
        ours, plain = self.model.state_dict(), self.plain.state_dict()
        assert list(ours) == list(plain)
        assert [n for n in ours if not torch.equal(ours[n].cpu(), plain[n].cpu())] == []
        return True

    def back(self):
        """It is a plain model again."""
        self.handle.restore()
        self.plain.cpu()
        self.inputs = self.inputs.cpu()
        assert self.same() and is_plain(self.model)


def is_plain(model):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all("forward" not in m.__dict__ for m in model.modules())
    return all(type(m._parameters) is type(m._buffers) is dict for m in model.modules())


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
    room.same(model, x(), passes=6, more=8 * MIB)
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

    room.same(around(Takes()), x(), passes=6, more=8 * MIB)


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

    room.same(around(Ensemble()), x(), more=60 * MIB)


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


@pytest.mark.parametrize("way", WAYS)
def test_what_a_pass_does_to_its_own_weights(room, way):
    model = around(Part(way))
    room.same(model, x(), passes=5, more=30 * MIB)
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
    room.same(model, x(), passes=5, more=8 * MIB)
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
    room.same(around(Forgets()), x(), passes=5, more=8 * MIB)


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

    pair = Pair(room, around(Lists()))
    assert pair.each(change)
    pair.back()


def test_threads_that_change_a_model_and_that_run_it(room):
    pair = Pair(room, around(square()), more=60 * MIB)
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
    room.same(build(), x(), passes=5, more=8 * MIB)


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
            small = (nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)) for _ in range(30))
            self.parts = nn.ModuleList(small)
            self.rows = nn.ModuleList([Rows(64) for _ in range(4)])

        def forward(self, h):
            rows = []
            for i, part in enumerate(self.parts):
                h = part(h)
                if i % 8 == 1:
                    rows.append(self.rows[i // 8](h))
            return h + sum(rows)

    order = [f"parts.{i}" for i in range(30)]
    for i in reversed(range(4)):
        order.insert(8 * i + 2, f"rows.{i}")
    model = Many()
    room.same(model, x(), passes=6, more=8 * MIB, order=order if told else None)
    # Of a run, only its ends and these have a gate.
    gates = [n for n, m in model.named_modules() if "forward" in m.__dict__]
    assert len([n for n in gates if n.startswith("rows")]) >= 2
    assert len(gates) < 25


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


# ---- weights that are referred to, tied, or left alone ------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_somebody_refers_to_weakly_stay_tied(room, when):
    model = around(square())
    model[1][0].weight = model[4][0].weight
    refs = [weakref.ref(p) for p in model.parameters()] if when == "before" else []
    pair = Pair(room, model)
    assert model[1][0].weight is model[4][0].weight
    refs += [weakref.ref(p) for p in model.parameters()]
    pair.handle.exclude(model[0])
    assert pair.same() and type(model[0][0].weight) is nn.Parameter
    pair.back()
    assert model[1][0].weight is model[4][0].weight and refs


@pytest.mark.parametrize("which", [1, 4])
def test_a_tied_weight_is_left_alone_in_all_its_places(room, which):
    model = around(square())
    model[1][0].weight = model[4][0].weight
    model[1][0].weight.mark = "a"
    pair = Pair(room, model)
    pair.handle.exclude(model[which])
    assert pair.same()
    weight = model[1][0].weight
    assert type(weight) is nn.Parameter and weight is model[4][0].weight and weight.mark == "a"
    assert pair.each(lambda m: m[1][0].weight.mul_(2))
    pair.back()


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.up = nn.LSTM(WIDTH, WIDTH // 8), nn.Linear(WIDTH // 8, WIDTH)

    def forward(self, h):
        self.inner.flatten_parameters()
        assert not any(is_parked(w) for w in self.inner._flat_weights)
        return self.up(self.inner(h)[0])


def test_the_list_of_a_recurrent_layer_is_its_weights(room):
    model = around(Recurs())
    inner = model[2].inner
    weights = list(inner.parameters())

    def listed():
        own = [inner._parameters[name] for name in inner._flat_weights_names]
        assert all(a is b for a, b in zip(inner._flat_weights, own, strict=True))
        return all(a() is b for a, b in zip(inner._flat_weight_refs, own, strict=True))

    pair = Pair(room, model)
    assert listed() and all(a is b for a, b in zip(weights, inner.parameters(), strict=True))
    state = {n: torch.randn_like(t) / 20 for n, t in pair.plain[2].inner.state_dict().items()}
    assert pair.each(lambda m: m[2].inner.load_state_dict(state)) and listed()
    for change in (nn.Module.half, nn.Module.float):
        assert pair.each(change) and listed()
    given = {n: p.detach() * 2 for n, p in pair.plain[2].inner.named_parameters()}
    hidden = x()
    with torch.no_grad():
        both = [functional_call(m[2].inner, given, (hidden,))[0] for m in pair.both()]
    assert torch.equal(*both)
    assert pair.same() and listed()
    deep = copy.deepcopy(inner)
    with torch.no_grad():
        assert torch.equal(deep(hidden)[0], pair.plain[2].inner(hidden)[0])
    pair.handle.exclude(model[2])
    assert pair.same() and listed() and not any(is_parked(w) for w in inner.parameters())
    pair.back()
    assert listed() and "flatten_parameters" not in inner.__dict__


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_part_that_was_taken_out_is_offloaded_by_itself(room, how):
    pair = Pair(room, around(nn.Sequential(square(), square())))
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(pair.model[2])
    out, plain = (model[2] for model in pair.both())
    for model in pair.both():
        if how == "replaced":
            model[2] = nn.Identity()
        else:
            del model[2]
    handle = ebbtide.offload(out)
    for _ in range(2):
        with torch.no_grad():
            assert all(torch.equal(out(pair.inputs), plain(pair.inputs)) for _ in range(3))
        assert pair.same()
    handle.restore()
    assert pair.same() and is_plain(out)
    pair.back()


# ---- small weights ------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.layer, self.behind = nn.LayerNorm(WIDTH), square(), nn.LayerNorm(WIDTH)
        self.behind.weight = self.before.weight

    def forward(self, h):
        return self.behind(self.layer(self.before(h)))


def test_whatever_is_done_to_small_weights(room):
    model = nn.Sequential(*(Normed() for _ in range(6)))
    for part in model[1:]:
        part.before.bias = model[0].before.bias
    pair = Pair(room, model)
    small = [p for p in model.parameters() if p.nbytes <= SMALL]
    assert all(type(p) is nn.Parameter and p.is_cuda for p in small)
    assert model[2].behind.weight is model[2].before.weight

    def given(value):
        return torch.full((WIDTH,), value, device="cuda")

    def replace(m):
        m[2].before.weight = m[2].behind.weight = nn.Parameter(given(0.5))
        m[2].before._parameters["bias"] = nn.Parameter(given(0.25))

    assert pair.each(lambda m: m[0].before.weight.mul_(2))
    assert pair.each(lambda m: m[0].before.bias.data.add_(1))
    assert pair.each(lambda m: setattr(m[2].before.weight, "data", given(3.0)))
    assert pair.each(replace)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    assert pair.each(lambda m: m[1].before.weight.zero_())
    assert pair.each(lambda m: m.load_state_dict(state))
    on_cpu = {n: t.cpu() for n, t in state.items()}
    model.load_state_dict(on_cpu, assign=True)
    assert pair.each(lambda m: m.load_state_dict(state))
    pair.handle.exclude(model[2])
    pair.handle.pin(model[4])
    assert pair.same()
    assert pair.each(nn.Module.half) and pair.each(nn.Module.float)
    deep = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(deep(pair.inputs), pair.plain(pair.inputs))
    model[3].cpu()
    assert pair.same()
    model.cpu()
    pair.plain.cpu()
    pair.inputs = pair.inputs.cpu()
    assert pair.same() and is_plain(model)


def test_models_of_small_weights(room):
    many = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)) for _ in range(40)), square()
    )
    pair = Pair(room, many)
    assert pair.handle.stats()["bytes"] > 40 * 2 * 16 * WIDTH * 4
    pair.back()
    only = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    pair = Pair(room, only, x(64))
    assert pair.handle.stats()["bytes"] > 40 * 64 * 64 * 4
    pair.back()


def test_small_weights_that_are_rows_of_a_large_one(room):
    model = around(square())
    large = model[4][0].weight
    model[1][0].bias = nn.Parameter(large.detach()[3])
    model[0][0].bias = nn.Parameter(large.detach()[:, 3])
    pair = Pair(room, model)
    with torch.no_grad():
        model[4][0].weight.mul_(2)
    assert torch.equal(model[1][0].bias, large[3]) and torch.equal(model[0][0].bias, large[:, 3])
    pair.plain.load_state_dict(model.state_dict())
    assert pair.same()
    pair.back()
    assert model[1][0].bias.data_ptr() == large[3].data_ptr()


# ---- parts of a storage -------------------------------------------------------------------------


def overlapping(kind, flat):
    """Two weights of one storage, of numbers of two bytes."""
    size = WIDTH * WIDTH
    if kind in ("int16", "uint8", "int64"):
        as_other = flat.view(getattr(torch, kind))
        return flat[8 : 8 + size].view(WIDTH, WIDTH), as_other[11 : 11 + as_other.numel() // 2]
    if kind == "expanded":
        return flat[8 : 8 + WIDTH].expand(WIDTH, WIDTH), flat[7:8].expand(size)
    if kind == "strided":
        return flat.as_strided((WIDTH, WIDTH), (1, 1), 8), flat[:5]
    assert kind == "beside"
    return flat[8 : 8 + size].view(WIDTH, WIDTH), flat[size + 9 : size + 18]


class Two(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = (nn.Parameter(t, requires_grad=False) for t in (one, other))

    def forward(self, h):
        h = F.linear(h.to(self.one.dtype), self.one).float()
        return (h + self.other.float().sum()).clamp(-1, 1)


KINDS = ["int16", "uint8", "int64", "expanded", "strided", "beside"]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_overlap_as_other_numbers(free_room, kind, pinned):
    flat = torch.randn(WIDTH * WIDTH + 1024).bfloat16()
    flat = flat.pin_memory() if pinned else flat
    model = around(Two(*overlapping(kind, flat)))
    free_room.how = "half"
    pair = Pair(free_room, model)
    for name, by in (("one", 2), ("other", 0)) if kind not in ("expanded", "strided") else ():
        with torch.no_grad():
            getattr(model[2], name).mul_(by)
            # The plain one's have a storage each.
            pair.plain.load_state_dict(model.state_dict())
        assert pair.same()
    pair.back()


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_slices_of_a_mapped_file_that_are_written(room, how, tmp_path):
    values, size = torch.randn(3 * WIDTH * WIDTH) / 20, WIDTH * WIDTH
    if how == "torch":
        torch.save(values, tmp_path / "weights.pt")
        mapped = torch.load(tmp_path / "weights.pt", mmap=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({"all": values}, tmp_path / "weights.safetensors")
        mapped = safetensors.load_file(tmp_path / "weights.safetensors")["all"]
    model = around(square())
    for i, at in ((0, 0), (1, size), (4, size + size // 2)):
        model[i][0].weight = nn.Parameter(mapped[at : at + size].view(WIDTH, WIDTH))
    pair = Pair(room, model)
    for i in (0, 1, 4):
        with torch.no_grad():
            model[i][0].weight.mul_(2)
            pair.plain.load_state_dict(model.state_dict())
        assert pair.same()
    assert torch.equal(model[4][0].weight[:3], model[1][0].weight[WIDTH // 2 :][:3])
    assert torch.equal(mapped, values)
    pair.back()


def test_a_weight_that_is_the_conjugate_of_its_memory(free_room):
    class Conjugate(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 20
            self.weight = nn.Parameter(values.conj())

        def forward(self, h):
            return F.linear(h.to(torch.cfloat), self.weight).abs()

    with pytest.warns(UserWarning, match="cannot page"):
        free_room.same(around(Conjugate()), x())
