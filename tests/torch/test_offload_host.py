"""offload(): the host's memory, pinned, borrowed and given back."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from pathlib import Path

import pytest
import torch
from offloaded import MIB, WIDTH, inside, layers, x
from torch import nn

import ebbtide
from ebbtide import sim
from ebbtide._offload import host

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


def pieces(model):
    return {id(b.piece): b.piece for b in inside(model).weights.bindings}.values()


def pinned(model):
    """How many of its weights the GPU copies at the link's speed, and how many there are."""
    mover = inside(model).mover
    found = [mover.pinned(piece.source) is not None for piece in pieces(model)]
    return sum(found), len(found)


def test_weights_pinned_one_by_one_that_lie_side_by_side(free_room):
    """A copy cannot read across two of them."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2000)))
    for layer in reversed(model):  # in this order they come to lie side by side, most of them
        layer.weight.data = layer.weight.data.pin_memory()
    where = [layer.weight.data_ptr() for layer in model]
    if SIMULATED:  # a driver may have other habits
        assert sum(b - a == 16384 for a, b in itertools.pairwise(where)) > 1000
    free_room.of = lambda model: 20 * MIB
    free_room.same(model, torch.randn(1, 64))


def test_what_is_another_dtype_is_pinned_again(room):
    model, inputs = layers(8), x()
    plain = copy.deepcopy(model).cuda().half()
    room.offload(model, 30 * MIB)
    with torch.no_grad():
        model(inputs)
        model.half()
        for _ in range(3):
            assert torch.equal(model(inputs.half()), plain(inputs.half()))
    assert pinned(model) == (8, 8)


def test_a_copy_of_an_offloaded_model_that_is_offloaded_is_pinned(free_room):
    model, inputs = layers(8), x()
    free_room.offload(model)
    with torch.no_grad():
        expected = model(inputs)
        other = copy.deepcopy(model)
        free_room.offload(other)
        assert torch.equal(other(inputs), expected)
    assert pinned(other) == (8, 8)


def from_file(path, count=6, beside=0):
    """A model whose weights are in a mapped file, with other things before them."""
    values = layers(count).state_dict()
    torch.save({"other": torch.randn(max(beside, 4) // 4), "model": values}, path)
    model = layers(count)
    model.load_state_dict(torch.load(path, mmap=True)["model"], assign=True)
    return model


def test_a_mapped_weight_that_is_written_is_pinned_again(room, tmp_path):
    model, inputs = from_file(tmp_path / "weights"), x()
    plain = copy.deepcopy(model).cuda()
    room.offload(model, 30 * MIB)
    with torch.no_grad():
        for each in (model, plain):
            each(inputs)
            for layer in each[1:4]:
                layer[0].weight.mul_(1.5)
        for _ in range(3):
            assert torch.equal(model(inputs), plain(inputs))
    assert pinned(model) == (6, 6)
    assert sum(piece.loan is not None for piece in pieces(model)) == 3


def shared_mappings(path):
    """Bytes of the file that are mapped once more, for the GPU."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.rstrip().endswith(str(path)) and line.split()[1].endswith("s"):
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            found += end - start
    return found


def test_of_a_file_no_more_is_pinned_than_weights_are_in(free_room, tmp_path):
    path = tmp_path / "checkpoint"
    model = from_file(path, beside=64 * MIB)
    free_room.same(model, x())
    assert all(piece.loan is not None for piece in pieces(model))
    assert 6 * MIB <= shared_mappings(path) < 8 * MIB


def test_a_file_counts_as_what_may_be_pinned(free_room, tmp_path):
    model = from_file(tmp_path / "weights")
    handle = free_room.same(model, x(), host="1MiB")
    assert shared_mappings(tmp_path / "weights") == 0
    assert pinned(model)[0] <= 1 and handle.stats()["pageable"] >= 5 * MIB
    other = from_file(tmp_path / "more")
    handle = free_room.same(other, x(), host="8MiB")
    assert handle.stats()["pageable"] == 0
    assert pinned(other) == (6, 6) and inside(other).weights.arena.budget[0] >= 6 * MIB


def test_what_may_be_pinned_may_be_again_when_it_is_given_back(free_room):
    model, inputs = layers(6), x()
    free_room.offload(model, host="12MiB")
    with torch.no_grad():
        for _ in range(4):
            values = {name: torch.randn_like(t) for name, t in layers(6).state_dict().items()}
            expected = layers(6).cuda()
            expected.load_state_dict(values)
            model.load_state_dict(values, assign=True)
            assert torch.equal(model(inputs), expected(inputs))
            assert pinned(model) == (6, 6)


@pytest.mark.parametrize("how", ["of its own", "of a file"])
def test_what_is_collected_while_a_graph_is_captured(free_room, tmp_path, how):
    """The capture is not disturbed, and all is given back, later."""
    model = layers(6) if how == "of its own" else from_file(tmp_path / "weights")
    free_room.offload(model)
    other = nn.Linear(WIDTH, WIDTH).cuda()
    graph, inputs = torch.cuda.CUDAGraph(), x()
    with torch.no_grad():
        expected = other(inputs)
        model(inputs)
        model(inputs)
        model.itself = [model]  # as hooks and closures do
        torch.cuda.synchronize()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph):  # which may collect garbage, too, before it begins
                result = other(inputs)
                del model
                gc.collect()
                waiting = len(host._later)
        finally:
            gc.enable()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    assert waiting > 0
    host.tidy()
    assert host._later == []
    assert shared_mappings(tmp_path / "weights") == 0


@pytest.mark.two_cards
def test_two_cards_do_not_share_what_one_of_them_has_pinned(hazards):
    """It would be gone for both as soon as one lets go of it."""
    model = layers(6).share_memory()  # a file's, mapped for all
    other = copy.deepcopy(model)
    for layer, twin in zip(model, other, strict=True):
        twin[0].weight = nn.Parameter(layer[0].weight.detach())
    inputs = torch.randn(1, WIDTH)
    ebbtide.offload(model, 0)
    ebbtide.offload(other, 1)
    with torch.no_grad():
        expected = model(inputs.to("cuda:0")).cpu()
        for _ in range(3):
            assert torch.equal(other(inputs.to("cuda:1")).cpu(), expected)
        assert pinned(other) == (6, 6)
        for _ in range(2):
            other(inputs.to("cuda:1"))
        del model, layer
        gc.collect()
        assert torch.equal(other(inputs.to("cuda:1")).cpu(), expected)
    assert pinned(other) == (6, 6)
    assert hazards() == []


@pytest.mark.simulated
def test_a_stream_that_cannot_be_made_is_an_error_of_ours(free_room):
    gc.collect()
    sim.fail("cuStreamCreate", nth=1, code=2)
    with pytest.raises(ebbtide.Error, match="cuStreamCreate"):
        free_room.offload(layers(2))
    sim.clear_failures()
    free_room.same(layers(2), x())
