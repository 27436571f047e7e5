"""offload(): models whose layers run on several streams, forked and joined as PyTorch has it. Each
waits for what comes for it, and its memory is given away after it."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from offloaded import MIB, at_rest, inside
from torch import nn

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")
WIDTH = 256  # four such squares are a run


def square():
    return nn.Linear(WIDTH, WIDTH)


class Branches(nn.Module):
    """Layers side by side, each on the stream whose turn it is."""

    streams: tuple[torch.cuda.Stream, ...] = ()

    def __init__(self, count):
        super().__init__()
        self.branches = nn.ModuleList(square() for _ in range(count))

    def forward(self, h):
        now, found = torch.cuda.current_stream(), []
        for number, branch in enumerate(self.branches):
            its = self.streams[number % len(self.streams)] if self.streams else now
            its.wait_stream(now)
            with torch.cuda.stream(its):
                found.append(branch(h))
            h.record_stream(its)
        for number, result in enumerate(found):
            if self.streams:
                now.wait_stream(self.streams[number % len(self.streams)])
            result.record_stream(now)
        return h + sum(found)


def model():
    return nn.Sequential(square(), *(Branches(12) for _ in range(5)), square())


@pytest.fixture
def streams(monkeypatch):
    """Tells the branches how many there are, beside the one that the model runs on."""
    made = [torch.cuda.Stream() for _ in range(4)]
    monkeypatch.setattr(Branches, "streams", ())
    return lambda count: monkeypatch.setattr(Branches, "streams", tuple(made[:count]))


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_branches_on_streams_of_their_own(room, streams, count, before):
    """From the first pass on, or later: runs of them are not what they were taken for."""
    plain = model()
    inputs = torch.randn(2, WIDTH, device="cuda")
    expected = copy.deepcopy(plain).cuda()(inputs)
    handle = room.offload(plain, more=16 * MIB)
    for _ in range(before):
        assert torch.equal(plain(inputs), expected)
    streams(count)
    for _ in range(6):
        assert torch.equal(plain(inputs), expected)
        assert room.held() <= room.limit
    slow = handle.stats()
    for _ in range(4):
        assert torch.equal(plain(inputs), expected)
    assert slow["units"] == handle.stats()["units"] > 8  # they have been planned, once for all
    assert handle.stats()["one_by_one"] == slow["one_by_one"]
    assert at_rest(plain)


@torch.no_grad()
def test_of_a_run_on_one_other_stream_nothing_is_planned_anew(free_room, streams):
    """All of a model may run on any stream, another one in every other pass."""
    plain, stream = model(), torch.cuda.Stream()
    inputs = torch.randn(2, WIDTH, device="cuda")
    expected = copy.deepcopy(plain).cuda()(inputs)
    free_room.how = "half"
    # On a GPU, cuBLAS takes some for each stream.
    handle = free_room.offload(plain, more=0 if SIMULATED else 80 * MIB)
    for _ in range(4):
        assert torch.equal(plain(inputs), expected)
    units = handle.stats()["units"]
    for _ in range(6):
        assert torch.equal(plain(inputs), expected)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = plain(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        result.record_stream(torch.cuda.current_stream())
        assert torch.equal(result, expected)
    assert handle.stats()["units"] == units and inside(plain).apart == set()


@torch.no_grad()
def test_what_comes_after_a_run_on_another_stream(room):
    """A layer that is called by itself, and then the model, elsewhere: the run is left where it was
    entered."""
    plain = nn.Sequential(*(square() for _ in range(24)))
    inputs = torch.randn(2, WIDTH, device="cuda")
    own = copy.deepcopy(plain).cuda()
    expected = own(inputs), own[1](inputs)
    room.offload(plain, more=16 * MIB)
    side = torch.cuda.Stream()
    for _ in range(6):
        with torch.cuda.stream(side):
            alone = plain[1](inputs)
        assert torch.equal(plain(inputs), expected[0])
        side.synchronize()
        assert torch.equal(alone, expected[1])
    assert at_rest(plain)
