"""offload(): small layers that make a run are used together. Who is between two of them, or inside
of one, has what the plain model has, also if the run is over before he uses it."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, at_rest, inside, layers, x
from on_course import Inside
from torch import nn

NARROW = 64
OUTSIDE = "weights are read outside of units"


class Parent(nn.Module):
    """Calls small layers, takes a weight of one between two calls, and uses it at the end."""

    def __init__(self, take):
        super().__init__()
        self.take = take
        self.first = layers(3)
        self.a = nn.Linear(WIDTH, NARROW, bias=False)
        self.b = nn.Linear(NARROW, NARROW, bias=False)
        self.c = nn.Linear(NARROW, WIDTH, bias=False)
        self.blocks = layers(10)

    def forward(self, h):
        h = self.a(self.first(h))
        taken = self.take(self)
        h = self.c(self.b(h))
        return self.take(self) @ (taken.T @ self.blocks(h).T[: taken.shape[0]])


TAKES = {
    "the weight": lambda m: m.a.weight,
    "rows of it": lambda m: m.a.weight[:32],
    "one that comes": lambda m: m.c.weight.T,
    "computed": lambda m: m.a.weight * 2,
}


@pytest.mark.parametrize("how", ["all", "half", "little"])
@pytest.mark.parametrize("take", TAKES)
def test_a_parent_that_takes_a_weight_between_two_calls(free_room, how, take):
    free_room.how = how
    model = Parent(TAKES[take])
    handle = free_room.same(
        model, torch.randn(WIDTH, WIDTH), passes=12, more=8 * MIB, no_course=OUTSIDE
    )
    assert handle.stats()["one_by_one"] == 0


@torch.no_grad()
def test_a_parent_that_does_so_only_later(free_room, small_units):
    free_room.how = "little"
    model, inputs = Parent(lambda m: m.blocks[0][0].bias[:8, None]), torch.randn(WIDTH, WIDTH)
    plain, inputs = copy.deepcopy(model).cuda(), inputs.cuda()
    free_room.offload(model, more=8 * MIB)
    for take in (model.take, *TAKES.values()):
        model.take = plain.take = take
        expected = plain(inputs)
        for _ in range(12):
            assert torch.equal(model(inputs), expected)
            assert at_rest(model)


class Changes(nn.Module):
    """What a layer writes to its weight its parent sees at once, and the other way round."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = layers(3), layers(10)
        self.a, self.b, self.c = Writes(), Writes(), Writes()  # and these are a run

    def forward(self, h):
        h = self.first(h)
        h = self.b(self.a(h))
        h = h + self.a.weight.sum() + self.b.weight[0, 0]
        self.b.weight.mul_(0.5)
        h = self.c(h) + self.b.weight[0, 0]
        return self.blocks(h) + self.c.weight[0, 0]


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NARROW, WIDTH) / 23)

    def forward(self, h):
        self.weight.add_(1 / 1024)
        return torch.relu(h @ self.weight.T @ self.weight)


@pytest.mark.parametrize("how", ["all", "half", "little"])
def test_what_is_written_between_two_calls_and_in_them(free_room, how):
    free_room.how = how
    free_room.same(Changes(), x(), passes=12, more=8 * MIB, no_course=OUTSIDE)


class Calls(nn.Module):
    """Looks its weight up, calls somebody, and uses it."""

    def __init__(self, whom=None, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.whom = [whom]

    def forward(self, h):
        weight, whom = self.weight, self.whom[0]
        more = whom(h) if whom is not None else 0
        return torch.relu(h @ weight) + more


@pytest.mark.parametrize("how", ["all", "half", "little"])
@pytest.mark.parametrize("where", [0, 100, 299])
def test_a_layer_that_calls_one_of_another_unit(free_room, small_units, how, where):
    """And one of another run, in which nobody is."""
    free_room.how = how
    width = 128
    small = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(300)]
    other = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))
    small[where] = nn.Sequential(Calls(other, width), nn.LayerNorm(width))
    small[7] = nn.Sequential(Calls(small[200][0], width), nn.LayerNorm(width))
    model, inputs = nn.Sequential(*small, other), torch.randn(1, width, device="cuda")
    plain = copy.deepcopy(model).cuda()
    assert plain[where][0].whom[0] is plain[-1]
    with torch.no_grad():
        expected = plain(inputs)
        del plain
        free_room.offload(model, prefetch=2)
        for _ in range(12):
            assert torch.equal(model(inputs), expected)
            assert at_rest(model)
        assert any(unit.run for unit in inside(model).units)


def test_a_pass_inside_of_a_pass(free_room):
    free_room.how = "little"
    model = nn.Sequential(*(Calls() for _ in range(120)))
    plain, inputs = copy.deepcopy(model).cuda(), x()
    with torch.no_grad():
        expected = plain(inputs)
        free_room.offload(model, 24 * MIB)
        for at in (0, 1, 60, 119):
            for _ in range(4):
                assert torch.equal(model(inputs), expected)
            seen = []

            def once(h, layer=model[at], seen=seen):
                layer.whom = [None]
                seen.append(model(inputs))
                return 0

            model[at].whom = [once]
            assert torch.equal(model(inputs), expected)
            assert len(seen) == 1 and torch.equal(seen[0], expected)
            assert at_rest(model)


class Leaf(nn.Module):
    """Others do something while it is in use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 23)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / 23)
        self.inside = Inside()

    def forward(self, h):
        return torch.relu(self.inside(h @ self.first) @ self.second)


@pytest.mark.parametrize("how", ["all", "half", "little"])
@pytest.mark.parametrize("by", ["copy_", "data", "load_state_dict"])
def test_a_thread_sees_what_it_has_written_while_another_one_is_there(
    free_room, small_units, how, by
):
    free_room.how = how
    pair = Pair(free_room, nn.Sequential(*layers(3), Leaf(), *layers(5)), more=8 * MIB)
    new = {name: torch.randn(WIDTH, WIDTH) / 20 for name in ("first", "second")}

    def write(leaf):
        if by == "load_state_dict":
            leaf.load_state_dict(new)
        for name, value in new.items() if by != "load_state_dict" else ():
            to = getattr(leaf, name)
            (to.data if by == "data" else to).copy_(value)

    seen = []

    @torch.no_grad()
    def other():
        try:
            write(pair.model[3])
            seen.append(pair.model(pair.inputs))
        except BaseException as failure:
            seen.append(failure)

    def meanwhile():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with torch.no_grad():
        pair.model[3].inside.do = meanwhile
        pair.model(pair.inputs)  # which of them it computes with nobody knows
        write(pair.plain[3])
        assert torch.equal(seen[0], pair.plain(pair.inputs))
    assert pair.same() and at_rest(pair.model)
