"""offload(): results of every kind, modules called without their model, and passes cut short."""

from __future__ import annotations

import collections
import copy
import gc
import sys
import threading
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, at_rest, inside, layers, x
from torch import nn

import ebbtide

# ---- results that are parts of weights -----------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    rows: torch.Tensor


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


KINDS = {
    "tuple": (lambda t: (t,), lambda r: r[0]),
    "dataclass": (Rows, lambda r: r.rows),
    "slots": (Slotted, lambda r: r.rows),
    "namespace": (lambda t: types.SimpleNamespace(a=[t]), lambda r: r.a[0]),
    "deque": (lambda t: collections.deque([t]), lambda r: r[0]),
    "set": (lambda t: {t}, lambda r: next(iter(r))),
    "proxy": (lambda t: types.MappingProxyType({"a": t}), lambda r: r["a"]),
    "dict in an object": (lambda t: Slotted({"a": Rows(t)}), lambda r: r.rows["a"].rows),
}


class Table(nn.Module):
    """Gives rows of its table away, in something."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, count):
        return KINDS[self.kind][0](self.table[:count])


class Reader(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table = Table(kind)
        self.layers = layers(6)

    def forward(self, h):
        rows = self.table(2)
        return self.layers(h) + KINDS[self.table.kind][1](rows).sum(0)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_weights_are_copies_in_whatever_they_are_given_away(room, kind):
    room.same(Reader(kind), x(), passes=6)


class Small(nn.Module):
    """One of many: gives its weight away, from some time on."""

    gives = False

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(200, 200)

    def forward(self, h):
        return self.a(h), (self.a.weight if Small.gives else self.a.weight + 0)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Small() for _ in range(60))

    def forward(self, h):
        kept = []
        for layer in self.layers:
            h, weight = layer(h)
            kept.append(weight)
        return h + sum(kept).sum(0)


def test_a_layer_of_a_run_that_gives_its_weight_away_from_a_later_pass_on(free_room, monkeypatch):
    model, inputs = Many(), torch.randn(2, 200, device="cuda")
    plain = copy.deepcopy(model).cuda()
    free_room.of = lambda model: 12 * MIB
    with torch.no_grad():
        expected = plain(inputs)
        free_room.offload(model)
        for gives in (False, True):
            monkeypatch.setattr(Small, "gives", gives)
            for _ in range(4):
                assert torch.equal(model(inputs), expected)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        y = self.a(h)
        y += h
        return self.b(y)


def test_results_can_be_written_to_with_gradients_on(room):
    model, inputs = nn.Sequential(*(Residual() for _ in range(4))), x()
    plain = copy.deepcopy(model).cuda()
    room.offload(model)
    for _ in range(3):
        assert torch.equal(model(inputs), plain(inputs))
    with pytest.raises(RuntimeError, match="no backward"):
        model(inputs).sum().backward()


def test_weights_that_want_no_gradient_any_more(free_room):
    model, inputs = layers(4), x()
    free_room.offload(model)
    assert model(inputs).requires_grad
    model.requires_grad_(False)
    assert model(inputs).cpu().numpy().shape == (1, WIDTH)


def test_vmap_with_gradients_on(free_room):
    model, inputs = layers(4), torch.randn(3, WIDTH, device="cuda")
    plain = copy.deepcopy(model).cuda()
    free_room.offload(model)
    for _ in range(3):
        assert torch.equal(torch.vmap(model)(inputs), torch.vmap(plain)(inputs))


def test_tracing_is_refused(free_room):
    model, inputs = layers(4), x()
    free_room.offload(model)
    with torch.no_grad():
        for _ in range(3):
            expected = model(inputs)
        for part, given in ((model, inputs), (model[1], inputs)):
            with pytest.raises(RuntimeError, match="cannot be traced"):
                torch.jit.trace(part, given, check_trace=False)
        assert torch.equal(model(inputs), expected) and at_rest(model)


# ---- modules called without their model ----------------------------------------------------------


def small_layers(count=64):
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(count)))


@pytest.mark.parametrize("limit", [6, 40])
def test_a_layer_of_a_run_that_is_called_by_itself(free_room, limit):
    """When it is over nobody is in the run, and weights are parked."""
    free_room.of = lambda model: limit * MIB
    model, inputs = small_layers(), torch.randn(2, 128, device="cuda")
    plain = copy.deepcopy(model).cuda()
    handle = free_room.offload(model)
    ours = inside(model)
    with torch.no_grad():
        for _ in range(4):
            model(inputs)
        starts = [unit.names[0] for unit in ours.units if unit.run]
        assert starts
        for _ in range(3):
            for each in (int(starts[-1]), int(starts[-1]) + 1, int(starts[0])):
                assert torch.equal(model[each](inputs), plain[each](inputs))
                assert ebbtide._offload.handle.is_parked(model[each].weight)
                for m in (model, plain):
                    m[each].weight.data.mul_(1.25)
                assert torch.equal(model.state_dict()[f"{each}.weight"], plain[each].weight.cpu())
            assert torch.equal(model(inputs), plain(inputs))
            assert at_rest(model)
        model[int(starts[0])](inputs)
        handle.restore()
        assert torch.equal(model.cuda()(inputs), plain(inputs))


def test_layers_that_are_called_one_by_one_do_not_come_one_by_one(free_room):
    """A run stays in the ring from one of its members to the next."""
    free_room.of = lambda model: 6 * MIB
    model, inputs = small_layers(128), torch.randn(2, 128, device="cuda")
    plain = copy.deepcopy(model).cuda()
    handle = free_room.offload(model)

    def by_hand(which):
        h = inputs
        for layer in which:
            h = layer(h)
        return h

    with torch.no_grad():
        expected = by_hand(plain)
        for _ in range(4):
            assert torch.equal(by_hand(model), expected)
        before = handle.stats()
        for _ in range(3):
            assert torch.equal(by_hand(model), expected)
    moved = handle.stats()["streamed"] - before["streamed"]
    assert moved <= 3 * 1.25 * before["bytes"]
    assert handle.stats()["one_by_one"] == before["one_by_one"]


def test_a_thread_that_calls_a_layer_and_ends_leaves_nothing(free_room):
    model, inputs = small_layers(), torch.randn(2, 128, device="cuda")
    handle = free_room.offload(model)
    with torch.no_grad():
        for _ in range(3):
            model(inputs)
        start = next(unit.names[0] for unit in inside(model).units if unit.run)

        def work():
            with torch.no_grad():
                model.get_submodule(start)(inputs)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        handle.restore()
    assert all(type(p) is nn.Parameter for p in model.parameters())


# ---- passes cut short ----------------------------------------------------------------------------


class Strike:
    """KeyboardInterrupt behind the nth call that code of offload() makes."""

    def __init__(self, nth):
        self.left = nth

    def __call__(self, frame, event, arg):
        if "_offload" not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.step

    def step(self, frame, event, arg):
        if event == "opcode":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self.step


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("limit", [7, 10, 40])
def test_ctrl_c_anywhere_leaves_nothing_in_use(free_room, limit, grad):
    free_room.of = lambda model: limit * MIB
    model, inputs = layers(6), x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
    handle = free_room.offload(model)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            model(inputs)
        sys.settrace(Strike(1 << 30))  # some versions of Python trace nothing the first time
        model(inputs)
        sys.settrace(None)
        nth, struck = 1, 0
        while True:
            inside(model).tracking = True
            sys.settrace(Strike(nth))
            try:
                model(inputs)
                break
            except KeyboardInterrupt:
                struck += 1
            finally:
                sys.settrace(None)
            nth += max(nth // 25, 1)
            assert torch.is_autocast_cache_enabled()
            assert torch.equal(model(inputs), expected)
            assert at_rest(model)
        assert struck > 40
        handle.restore()
    with free_room.device() as card:
        card.limit = 1 << 30
    assert torch.equal(model.cuda()(inputs), expected)


def test_a_plan_that_fails_once_is_made_again_also_without_the_model(free_room, monkeypatch):
    model, inputs = layers(6), x()
    expected = copy.deepcopy(model).cuda()
    free_room.offload(model)
    ours, lay_out = inside(model), type(inside(model))._lay_out
    with torch.no_grad():
        for _ in range(3):
            model(inputs)

        def fails(*_):
            monkeypatch.setattr(type(ours), "_lay_out", lay_out)
            raise ebbtide.Error("once")

        monkeypatch.setattr(type(ours), "_lay_out", fails)
        ours.dirty()
        with pytest.raises(ebbtide.Error, match="once"):
            model[0](inputs)
        for layer, plain in zip(model, expected, strict=True):
            assert torch.equal(layer(inputs), plain(inputs))
    assert len(ours.units) == 6


# ---- copies, and what is left --------------------------------------------------------------------


def test_a_copy_of_a_layer_with_a_forward_of_its_own(free_room):
    def twice(self, h):
        return type(self).forward(self, h) * 2

    model, inputs = layers(4), x()
    model[1].forward = types.MethodType(twice, model[1])
    pair = Pair(free_room, model)
    other = copy.deepcopy(model)
    assert other[1].forward.__self__ is other[1]
    with torch.no_grad():
        other[1][0].weight.mul_(3)
        pair.plain[1][0].weight.mul_(3)
        assert torch.equal(other(inputs), pair.plain(inputs))


class Static(nn.Linear):
    """Its weight is in its unit, and its forward() asks for no module."""

    @staticmethod
    def forward(h):
        return h * 2


class OfTheClass(nn.Linear):
    factor = 3

    @classmethod
    def forward(cls, h):
        return h * cls.factor


class Function(nn.Linear):
    forward = torch.relu


@pytest.mark.parametrize("kind", [Static, OfTheClass, Function])
@pytest.mark.parametrize("alone", [False, True])
def test_a_forward_that_is_called_without_its_module(free_room, kind, alone):
    part = kind(WIDTH, WIDTH)
    model = part if alone else nn.Sequential(layers(2), part)
    pair = Pair(free_room, model)
    assert torch.equal(model(pair.inputs), pair.plain(pair.inputs))  # with gradients, too
    with torch.no_grad():
        other = copy.deepcopy(model)
        for again in (other, copy.deepcopy(other)):
            assert torch.equal(again(pair.inputs), pair.plain(pair.inputs))
            free_room.offload(again)
            assert torch.equal(again(pair.inputs), pair.plain(pair.inputs))
    gone = weakref.ref(inside(other))
    gc.disable()
    try:
        del other, again
        assert gone() is None
    finally:
        gc.enable()
    pair.back()


def test_a_copy_goes_when_nobody_has_it(free_room):
    model = layers(4)
    free_room.offload(model)
    other = copy.deepcopy(model)
    gone = []
    finalizer = weakref.finalize(other, gone.append, True)
    gc.disable()
    try:
        del other
        assert gone == [True]
    finally:
        gc.enable()
    assert not finalizer.alive


def test_what_was_given_out_is_forgotten_when_weights_are_replaced(free_room):
    model, inputs = layers(6), x()
    free_room.offload(model)
    with torch.no_grad():
        for _ in range(3):
            model.state_dict()
            values = {name: torch.randn_like(t) for name, t in layers(6).state_dict().items()}
            model.load_state_dict(values, assign=True)
            model(inputs)
    assert len(inside(model).handed) == 0
    view = model.state_dict()["1.0.weight"]
    view.zero_()
    with torch.no_grad():
        plain = layers(6).cuda()
        plain.load_state_dict(values)
        plain[1][0].weight.zero_()
        assert torch.equal(model(inputs), plain(inputs))


# ---- modules put in past PyTorch's hooks ---------------------------------------------------------


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        return h


PUT_IN = {
    "insert": lambda m, new: m.layers.insert(2, new),
    "a layer twice": lambda m, new: m.layers.insert(2, copy.deepcopy(m.layers[1])),
    "the dict": lambda m, new: m.layers._modules.__setitem__("3", new),
    "del": lambda m, new: m.layers.__delitem__(1),
    "pop": lambda m, new: m.layers.pop(2),
    "append": lambda m, new: m.layers.append(new),
}


@pytest.mark.parametrize("how", PUT_IN)
def test_modules_that_come_and_go_without_a_sign(room, how):
    pair = Pair(room, Listed())
    new = nn.Linear(WIDTH, WIDTH)
    PUT_IN[how](pair.model, new)
    PUT_IN[how](pair.plain, copy.deepcopy(new).cuda())
    assert pair.same()
    assert len(pair.handle.residency()) == len(pair.plain.layers)
    pair.back()
    assert all(type(part._modules) is dict for part in pair.model.modules())
