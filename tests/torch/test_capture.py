"""What becomes a part of a CUDA graph, and what a graph refuses."""

import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ebbtide.sim as sim


def capture(function):
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        made = function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, made


# The shape of the result depends on the data, so that a GPU waits for it.
WAITING = {
    "nonzero": lambda x: x.nonzero(),
    "a mask selects": lambda x: x[x > 0],
    "a mask is put": lambda x: x.index_put_((x > 0,), torch.ones(9, device="cuda")),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long().flatten()),
    "equal": lambda x: torch.equal(x, x),
    "to_sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_for_the_data_is_synchronising(name):
    x = torch.ones(3, 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            WAITING[name](x)
        x + 1
        x[x > 0] = 2
    finally:
        torch.cuda.set_sync_debug_mode("default")


# PyTorch does not recover from a capture that failed, on a GPU neither: each has its own process.
@pytest.mark.parametrize("code", ["x.nonzero()", "x[x > 0]", "x.to_sparse()"])
def test_what_waits_for_the_data_cannot_be_captured(code):
    program = f"""
import os, torch
x = torch.ones(3, 3, device="cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    graph.capture_begin()
    try:
        {code}
    except RuntimeError as error:
        print(error, flush=True)
    try:
        graph.capture_end()
    except RuntimeError as error:
        print("END", error, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    refused, _, end = done.stdout.partition("END")
    assert "aten::" in refused and "cannot be captured in a CUDA graph" in refused, done
    assert "previous error during capture" in end, done


def test_a_sparse_product_cannot_be_captured_and_says_so():
    x = torch.eye(3, device="cuda").to_sparse()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="sparse tensor cannot be captured"):
            x @ torch.ones(3, 3, device="cuda")
        torch.ones(1, device="cuda")
        graph.capture_end()


def test_a_mask_can_be_filled():
    x = torch.tensor([-1.0, 2.0], device="cuda")

    def fill():
        x[x < 0] = 5

    graph, _ = capture(fill)
    graph.replay()
    assert x.tolist() == [5, 2]


def test_numbers_in_place_of_tensors():
    x = torch.arange(5, device="cuda")
    graph, made = capture(lambda: x % 3)
    graph.replay()
    assert made.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.hazards
def test_every_range_of_a_captured_operator_is_known(hazards):
    tensors = [torch.zeros(1, device="cuda") for _ in range(1500)]
    graph, _ = capture(lambda: torch._foreach_add_(tensors, 1.0))
    torch.cuda.synchronize()
    assert hazards() == []
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensors[-1].fill_(3)
    (found,) = hazards()
    assert "race" in found.text and "_foreach_add_" in found.text


# ---- random numbers ------------------------------------------------------------------------------


def test_a_graph_draws_what_eager_code_would():
    x = torch.ones(100, device="cuda")
    graph, made = capture(lambda: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    for seed in (1, 2):
        torch.cuda.manual_seed(seed)
        torch.rand(1, device="cuda")
        first = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        second = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        after = torch.rand(1, device="cuda")
        torch.cuda.manual_seed(seed)
        torch.rand(1, device="cuda")
        graph.replay()
        assert torch.equal(made, first)
        graph.replay()
        assert torch.equal(made, second)
        assert torch.equal(torch.rand(1, device="cuda"), after)


def test_an_operator_keeps_the_state_it_was_captured_with():
    torch.cuda.init()
    default = torch.cuda.default_generators[0]
    first = default.graphsafe_get_state()
    second = default.clone_state()
    graph = torch.cuda.CUDAGraph()
    for state in (first, second):
        graph.register_generator_state(state)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        default.graphsafe_set_state(second)
        torch.rand(5, device="cuda")
        default.graphsafe_set_state(first)
        torch.rand(5, device="cuda")
        torch.rand(5, device="cuda")
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    before = first.get_offset(), second.get_offset()
    graph.replay()
    moved = first.get_offset() - before[0], second.get_offset() - before[1]
    assert moved == (8, 4)


def test_checkpointing_in_a_graph_draws_the_same_twice():
    def noisy(x):
        return x * torch.sigmoid(torch.randn(1, device="cuda"))

    def step():
        x = torch.ones(1, device="cuda", requires_grad=True)
        try:
            made = checkpoint(noisy, x, use_reentrant=False)
        except RuntimeError as error:
            if "Cannot call CUDAGeneratorImpl" not in str(error):
                raise
            pytest.skip("this PyTorch cannot save random states during a capture")
        return torch.autograd.grad(made, x)[0]

    torch.cuda.manual_seed(42)
    expected = step()
    graph, made = capture(step)
    torch.cuda.manual_seed(42)
    graph.replay()
    assert torch.equal(made, expected)
    assert sim.check() is None
