"""offload(): modules that are never called, though what is in them is."""

from __future__ import annotations

import copy

import pytest
import torch
from offloaded import MIB, WIDTH, at_rest, inside, layers, square, x
from torch import nn

from ebbtide._offload.model import Model


@pytest.fixture
def plans(monkeypatch):
    """One entry for each time that a model is planned."""
    made, plain = [], Model.plan
    monkeypatch.setattr(Model, "plan", lambda self: made.append(1) or plain(self))
    return made


class Steps(nn.Module):
    """Can be called, or its step(), which calls what is in it."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)

    def step(self, h):
        return h + self.up(torch.relu(self.down(h)))

    def forward(self, h):
        return self.step(h)


class Uses(nn.Module):
    """Goes through its blocks in one way or another."""

    def __init__(self, use, block=Steps, count=12):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.use = use

    def forward(self, h):
        for block in self.blocks:
            h = self.use(block, h)
        return h


def step(block, h):
    return block.step(h)


def call(block, h):
    return block(h)


def reads(handle):
    return handle.stats()["read_outside"]


class Learns:
    """An offloaded model, and what it should give."""

    def __init__(self, room, model, plans, **options):
        self.model, self.inputs, self.plans = model, x(), plans
        self.plain = copy.deepcopy(model).cuda()
        self.handle = room.offload(model, 8 * MIB, **options)

    @torch.no_grad()
    def run(self, passes=1):
        for _ in range(passes):
            assert torch.equal(self.model(self.inputs), self.plain(self.inputs))
        assert at_rest(self.model)

    def has_learned(self, passes=8):
        """So many passes are enough. Then no weight comes by itself, and nothing is planned."""
        self.run(passes)
        before = reads(self.handle)
        self.plans.clear()
        self.run(8)
        stats = self.handle.stats()
        assert self.plans == [] and stats["one_by_one"] == 0
        assert stats["read_outside"] == before
        return inside(self.model)


# ---- modules without a forward ------------------------------------------------------------------


class Spaces(nn.Module):
    """Bare modules are namespaces in it."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList()
        for _ in range(3):
            level = nn.Module()
            level.block = nn.ModuleList(square() for _ in range(2))
            level.after = square()
            self.down.append(level)
        self.mid = nn.Module()
        self.mid.one, self.mid.other = square(), Steps()
        self.mid.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        for level in self.down:
            for block in level.block:
                h = torch.tanh(block(h))
            h = level.after(h)
        return self.mid.other(self.mid.one(h)) * self.mid.scale


class Parts(nn.ModuleDict):
    """That has a forward."""

    def forward(self, h):
        return self["one"](h) + self["other"](h)


def parts():
    return nn.Sequential(*(Parts({"one": square(), "other": square()}) for _ in range(30)))


def traced():
    return torch.fx.symbolic_trace(layers(16))


@pytest.mark.parametrize("build", [Spaces, traced, parts])
def test_modules_that_are_no_more_than_names_are_no_units(room, plans, build):
    learns = Learns(room, build(), plans)
    ours = learns.has_learned(3)
    assert reads(learns.handle) == 0
    assert not ours.readers.opened and not ours.readers.atomic
    named = {name for unit in ours.units for name in unit.names}
    if build is parts:
        assert named == {str(i) for i in range(30)}
    elif build is Spaces:
        assert {"down.0.block.1", "down.2.after", "mid.other"} <= named
    if room.how == "all":
        stats = learns.handle.stats()
        assert stats["resident"] >= stats["bytes"]


def test_a_model_without_a_forward_is_no_unit(free_room):
    model, inputs = nn.Module(), torch.randn(1, 128, device="cuda")
    model.one, model.other = nn.Linear(128, 128), nn.Linear(128, 256)
    expected = copy.deepcopy(model.other).cuda()(inputs)
    free_room.offload(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model.other(inputs), expected)
    assert all("" not in unit.names for unit in inside(model).units)


# ---- modules that are used by another method ----------------------------------------------------


def test_what_is_in_a_module_that_is_passed_by_becomes_units(room, plans):
    learns = Learns(room, Uses(step), plans)
    ours = learns.has_learned(4)
    assert ours.readers.opened == {f"blocks.{i}" for i in range(12)}
    assert not ours.readers.atomic
    assert reads(learns.handle) == 24  # once each, in the first pass


def test_modules_that_are_passed_by_are_opened_level_by_level(free_room, plans):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Steps()

        def step(self, h):
            return self.inner.step(h)

        def forward(self, h):
            return self.step(h)

    learns = Learns(free_room, Uses(step, Outer, 30), plans)
    ours = learns.has_learned(6)
    assert len(ours.readers.opened) == 60


def test_modules_that_begin_to_be_passed_by_are_noticed_in_a_model_at_rest(room, plans):
    learns = Learns(room, Uses(call), plans)
    ours = learns.has_learned(4)
    assert not ours.readers.opened and reads(learns.handle) == 0
    for model in (learns.model, learns.plain):
        model.use = step
    learns.has_learned(12)
    assert ours.readers.opened


def test_modules_that_are_called_in_one_pass_and_passed_by_in_the_next(room, plans):
    count = [0]

    def by_turns(block, h):
        count[0] += 1
        return block(h) if count[0] // 24 % 2 else block.step(h)  # of both models

    learns = Learns(room, Uses(by_turns), plans)
    learns.has_learned(12)


def test_what_was_opened_stays_so_and_who_reads_it_further_up_is_found(free_room, plans):
    """A block is not called, and neither is what is in it: its parent reads that."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.after = Steps(), square()

        def forward(self, h):
            for layer in (self.block.down, self.block.up):
                h = nn.functional.linear(h, layer.weight, layer.bias)
            return self.after(h)

    free_room.of = lambda model: 22 * MIB
    model = nn.Sequential(Parent(), *layers(20))
    learns = Learns(free_room, model, plans)
    ours = learns.has_learned()
    assert ours.readers.opened == {"0.block"} and ours.readers.atomic == {"0"}


def test_a_hook_that_reads_what_is_in_a_module_does_not_open_it(room, plans):
    learns = Learns(room, Uses(call), plans)
    seen = []
    learns.model.blocks[0].register_forward_pre_hook(
        lambda block, args: seen.append(float(block.up.weight.sum()))
    )
    learns.run(24)
    ours = inside(learns.model)
    assert not ours.readers.opened and not ours.readers.atomic and len(set(seen)) == 1
    assert reads(learns.handle) == 24
    learns.plans.clear()
    learns.run(8)
    assert learns.plans == []


# ---- copies that are counted --------------------------------------------------------------------


class Own(nn.Module):
    """Reads its own weight, not in forward()."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def step(self, h):
        return h @ self.weight


def test_copies_by_operators_are_counted_while_a_pass_runs(room, plans):
    learns = Learns(room, Uses(step, Own), plans)
    learns.run(6)
    assert reads(learns.handle) == 6 * 12
    learns.plans.clear()
    learns.run(12)
    assert reads(learns.handle) == 18 * 12 and learns.plans == []
    stats = learns.handle.stats()
    assert stats["one_by_one"] == stats["streamed"] == 0
    (learns.model.blocks[0].weight * 2).sum()  # between passes
    assert reads(learns.handle) == 18 * 12
    learns.handle.exclude(learns.model.blocks)
    learns.run(4)
    assert reads(learns.handle) == 18 * 12
