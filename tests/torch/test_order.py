"""Streams, events, pinned memory: the right program is silent, the wrong one is reported."""

import threading
import time

import pytest
import torch

import ebbtide.sim as sim

pytestmark = pytest.mark.hazards


def kinds(found):
    return [h.kind.name for h in found]


def test_a_missing_wait_stream_is_reported(hazards):
    aside, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        x.fill_(3)
    x + 1
    (found,) = hazards()
    assert found.kind is sim.Kind.RACE
    assert (found.first.call, found.second.call) == ("aten::fill_.Scalar", "aten::add.Tensor")


def test_a_stream_that_waits_is_silent(hazards):
    aside, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        x.fill_(3)
    torch.cuda.current_stream().wait_stream(aside)
    assert (x + 1).sum().item() == 4000
    assert hazards() == []


def test_a_pinned_buffer_rewritten_too_early_is_reported(hazards):
    pinned = torch.ones(100_000).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    pinned.fill_(5)
    assert kinds(hazards()) == ["SOURCE"]
    assert there[0].item() == 5  # wrong, as it would be on a GPU on a bad day


def test_a_pinned_buffer_rewritten_after_a_wait_is_silent(hazards):
    pinned = torch.ones(100_000).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned.fill_(5)
    assert there[0].item() == 1
    assert hazards() == []


@pytest.mark.parametrize("right", [False, True])
def test_memory_freed_while_another_stream_uses_it(hazards, right):
    aside = torch.cuda.Stream()
    x = torch.zeros(500_000, device="cuda")
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        y = x * 2
    if right:
        x.record_stream(aside)
    del x
    again = torch.ones(500_000, device="cuda")
    assert kinds(hazards()) == ([] if right else ["RACE"])
    del y, again


def test_events_take_the_cards_time(hazards):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(40_000_000)
    end.record()
    began = time.perf_counter()
    assert not end.query()
    end.synchronize()
    assert time.perf_counter() - began > 0.01
    assert 15 < start.elapsed_time(end) < 30
    assert hazards() == []


def test_a_loader_with_pinned_memory(hazards):
    from torch.utils.data import DataLoader, TensorDataset

    numbers = TensorDataset(torch.arange(64).float().view(16, 4))
    loader = DataLoader(numbers, batch_size=4, num_workers=2, pin_memory=True)
    total = sum(batch.to("cuda", non_blocking=True).sum().item() for (batch,) in loader)
    assert total == 2016
    assert hazards() == []


def test_two_threads_on_one_stream_do_not_take_one_another_s_memory_too_early():
    """A copy that is queued reads what it was to read, also if its source has been given back, and
    another thread's result is in its place by then."""
    stop, wrong, passes = time.monotonic() + 3, [], [0, 0]
    weights = [[torch.randn(512, 512, device="cuda") / 23 for _ in range(20)] for _ in range(2)]
    start = torch.randn(1, 512, device="cuda")

    def result(k):
        h = start
        for w in weights[k]:
            h = h @ w
        return h.clone()  # that is queued, and h given back

    expected = [result(k).cpu() for k in range(2)]

    def run(k):
        while time.monotonic() < stop and not wrong:
            passes[k] += 1
            if not torch.equal(result(k).cpu(), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and min(passes) > 3
