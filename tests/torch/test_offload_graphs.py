"""offload(): CUDA graphs of models that fit, and what they keep."""

from __future__ import annotations

import copy
import gc
import os

import pytest
import torch
from offloaded import MIB, WIDTH, at_rest, inside, layers, square, x
from torch import nn

import ebbtide

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


def capture(model, inputs):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = model(inputs)
    return graph, result


def test_a_graph_of_a_model_that_is_resident(free_room):
    model = layers(4)
    inputs = x()
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        handle = free_room.offload(model)
        for _ in range(3):
            model(inputs)
    graph, result = capture(model, inputs)
    for _ in range(3):
        inputs.copy_(x())
        graph.replay()
        with torch.no_grad():
            assert torch.equal(result, plain(inputs))
    del graph
    handle.graphs_gone()  # nobody else can know


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_of_a_model_that_is_streamed_raises(free_room):
    model = layers()
    inputs = x()
    free_room.how = "little"
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for _ in range(3):
            model(inputs)
        with free_room.device() as device:
            device.limit = free_room.limit + 4 * MIB  # for the graph's own memory
        with pytest.raises((RuntimeError, ebbtide.Error)) as info:
            capture(model, inputs)
        assert "captur" in str(info.value) or "graph" in str(info.value)
        for _ in range(2):
            assert torch.equal(model(inputs), expected)
    assert at_rest(model)
    handle.graphs_gone()


def squares(count=8):
    """None of it stays on the GPU as a tensor, which would be gone with the model."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


class Captured:
    """A model that was captured in a CUDA graph, all of it or its first layers."""

    def __init__(self, room, count=8, first=None, times=1):
        self.room, self.inputs, self.captured = room, x(), []
        self.model = squares(count)
        self.plain = copy.deepcopy(self.model).cuda()
        self.handle = room.offload(self.model)
        for _ in range(times):
            self.capture(first)

    @torch.no_grad()
    def capture(self, first=None):
        part = self.model if first is None else self.model[:first]
        for _ in range(8):
            self.model(self.inputs)
            part(self.inputs)
        expected = self.plain[: len(part)](self.inputs)
        self.captured.append((*capture(part, self.inputs), expected))

    def anew(self):
        before = inside(self.model).vbar
        self.handle.pin(self.model[len(self.captured)])
        with torch.no_grad():
            assert torch.equal(self.model(self.inputs), self.plain(self.inputs))
        assert inside(self.model).vbar is not before

    def part(self, how):
        for each in how.split(" and "):
            if each == "planned anew":
                self.anew()
            elif each == "captured again":
                self.capture()
            elif each == "restored":
                self.handle.restore()
            elif each == "on the CPU":
                self.model.cpu()
            else:
                del self.model
                gc.collect()

    def replay(self):
        for graph, result, expected in self.captured:
            graph.replay()
            assert torch.equal(result, expected)
            result.zero_()

    def let_graphs_go(self):
        self.captured.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def kept(self):
        with self.room.device() as card:
            stats = card.stats()
        return stats["vbars"], stats["resident"] // MIB, stats["for_graphs"] // MIB

    def held(self):
        return self.kept()[2]


PARTINGS = ["deleted", "restored", "on the CPU", "planned anew", "planned anew and deleted"]
NOTHING = (0, 0, 0)


@pytest.mark.parametrize("how", [*PARTINGS, "planned anew and captured again and deleted"])
def test_what_a_graph_uses_stays_until_the_graph_is_said_to_be_gone(free_room, how):
    it = Captured(free_room)
    it.part(how)
    times = len(it.captured)
    assert it.held() == 8 * times
    with free_room.device() as card:
        before = card.limit
        with pytest.raises(ebbtide.Busy):
            card.limit = 2 * MIB  # so that all goes that can
        assert it.kept()[1:] == (8 * times, 8 * times)
        card.limit = before
        more = torch.full((64 * MIB,), 0xFF, dtype=torch.uint8, device="cuda")
        it.replay()
        it.replay()
        assert more.numel()
    it.let_graphs_go()
    assert it.held() == 8 * times
    it.handle.graphs_gone()
    if how == "planned anew":
        vbars, _, held = it.kept()
        assert (vbars, held) == (1, 0)
        it.part("deleted")
    assert it.kept() == NOTHING


@pytest.mark.parametrize("how", PARTINGS)
def test_nothing_is_left_of_a_model_whose_graphs_were_gone_before(free_room, how):
    it = Captured(free_room)
    it.let_graphs_go()
    it.handle.graphs_gone()
    it.part(how)
    if how == "planned anew":
        assert it.kept()[0] == 1
        it.part("deleted")
    assert it.kept() == NOTHING


@pytest.mark.parametrize("how", PARTINGS)
def test_graphs_may_be_said_to_be_gone_where_there_are_none(free_room, how):
    it = Captured(free_room, times=0)
    it.handle.graphs_gone()
    it.part(how)
    before = it.kept()
    it.handle.graphs_gone()
    it.handle.graphs_gone()
    assert it.kept() == before


def test_of_a_deleted_model_only_what_a_graph_uses_stays(free_room):
    it = Captured(free_room, count=24, first=8)
    it.part("deleted")
    vbars, resident, held = it.kept()
    assert vbars == 1 and 8 <= resident == held < 24
    it.replay()
    it.let_graphs_go()
    it.handle.graphs_gone()
    assert it.kept() == NOTHING


@pytest.mark.parametrize("how", ["not parted with", "deleted"])
def test_graphs_are_not_gone_while_one_is_captured(free_room, how):
    it = Captured(free_room)
    if how == "deleted":
        it.part(how)
    with torch.no_grad():
        other, inputs = squares(1).cuda(), x()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = other(inputs)
            with pytest.raises(ebbtide.Busy):
                it.handle.graphs_gone()
        graph.replay()
        assert torch.equal(result, other(inputs))
    assert it.held() == 8
    it.replay()
    it.let_graphs_go()
    it.handle.graphs_gone()
    assert it.held() == 0


def test_a_model_that_goes_while_another_graph_is_captured_disturbs_nothing(free_room):
    it = Captured(free_room, count=24, first=8)
    with torch.no_grad():
        other, inputs = squares(1).cuda(), x()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = other(inputs)
            it.part("deleted")
        graph.replay()
        assert torch.equal(result, other(inputs))
    it.replay()
    it.let_graphs_go()
    it.handle.graphs_gone()
    assert it.kept() == NOTHING


def test_a_limit_that_graphs_leave_no_room_for_is_told_of(free_room):
    it = Captured(free_room, count=32)
    it.part("deleted")
    it.let_graphs_go()
    model, size = squares(4), torch.cuda.memory_reserved() + 20 * MIB
    with pytest.raises(ValueError, match=r"32 MiB of weights are kept for CUDA graphs") as info:
        ebbtide.offload(model, limit=size)
    assert f"limit={size}" in str(info.value) and "graphs_gone()" in str(info.value)
    it.handle.graphs_gone()
    ebbtide.offload(model, limit=size)
    with torch.no_grad():
        assert torch.equal(model(it.inputs), copy.deepcopy(model).cuda()(it.inputs))


@pytest.mark.parametrize("how", ["all", "changed"])
def test_a_model_is_not_planned_while_it_is_captured(free_room, how):
    """Weights would come from the host in every replay, also when they are there no more."""
    model, inputs = layers(8), x()
    plain = copy.deepcopy(model).cuda()
    handle = free_room.offload(model)
    with torch.no_grad():
        if how == "changed":
            for _ in range(3):
                model(inputs)
            model[2] = nn.Sequential(square(), nn.ReLU())
            plain = copy.deepcopy(model).cuda()
        with pytest.raises(ebbtide.Busy, match="before it is captured"):
            capture(model, inputs)
        torch.cuda.synchronize()
        for _ in range(3):
            assert torch.equal(model(inputs), plain(inputs))
    graph, result = capture(model, inputs)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(result, plain(inputs))
    del graph
    handle.graphs_gone()


def test_a_weight_at_rest_is_no_part_of_a_graph(free_room):
    model = layers(8)
    free_room.offload(model)
    with pytest.raises(ebbtide.Busy, match="copy it from the host"):
        capture(lambda inputs: model[2][0].weight * inputs, x())
    with torch.no_grad():
        assert torch.equal(model[2][0].weight * 2, model[2][0].weight + model[2][0].weight)
