"""PyTorch's allocator on the simulated GPU does what it does on a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ebbtide.sim.operators.memory import forget
from ebbtide.sim.operators.temporaries import attention_workspace

HERE = Path(__file__).parent
BENCH = HERE.parent.parent / "bench" / "faithful.py"
H200 = HERE / "faithful-h200.jsonl"  # what that program printed on an H200, with PyTorch 2.11
MIB = 1 << 20


def rows(text):
    return {row["metric"]: row["value"] for row in map(json.loads, text.splitlines())}


@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="recorded with PyTorch 2.11")
def test_segments_and_figures_are_those_of_an_h200():
    gpu = rows(H200.read_text())
    program = ["run", "--sim", str(gpu.pop("total")), str(BENCH), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", *program], capture_output=True, text=True, check=True
    )
    here = rows(done.stdout)
    del here["total"]  # of whole pages, as a simulated card's memory is
    assert here == gpu
    assert "race" not in done.stderr


def allocations(function):
    """The sizes that PyTorch's allocator was asked for, and gave back (negative), in order."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000)
    try:
        function()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[e["action"]] * e["size"] for e in trace if e["action"] in signs]


def test_gradients_are_added_up_in_place():
    a = torch.randn(1 << 18, device="cuda", requires_grad=True)
    b = a * 1
    loss = ((b + b.sin()) * 2).sum()
    forget()  # aliases are made again, which must not show
    asked = [size for size in allocations(loss.backward) if size == MIB]
    # The gradient of the sum, which that of b is too; cos, times it; the gradient of a. That of
    # the sine is added to the first.
    assert len(asked) == 4


def inputs(heads=8, tokens=128, dtype=torch.float32):
    shape = (8, tokens, heads, 64)
    made = [torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3)]
    return [m.requires_grad_() for m in made]


def test_efficient_attentions_results_lie_as_on_a_gpu():
    q, k, v = (t.contiguous() for t in inputs(tokens=40))
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, logsumexp, seed, offset = op(q, k, v, None, True)
    assert out.transpose(1, 2).is_contiguous()
    assert logsumexp.shape == (8, 8, 64)  # padded
    assert seed.device.type == offset.device.type == "cpu"
    back = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    mask = [True, True, True, False]
    grads = back(out, q, k, v, None, out, logsumexp, seed, offset, 0.0, mask)[:3]
    assert all(g.transpose(1, 2).is_contiguous() for g in grads)
    reference = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    same = F.scaled_dot_product_attention(*reference)
    same.backward(out.detach().cpu())
    for grad, r in zip(grads, reference, strict=True):
        torch.testing.assert_close(grad.cpu(), r.grad)


def test_efficient_attention_takes_what_the_gpus_kernels_take():
    q, k, v = inputs()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v)
    gradient = torch.randn(out.shape, device="cuda")  # of other strides: it is copied
    seen = allocations(lambda: torch.autograd.grad(out, (q, k, v), gradient))
    whole, row, workspace = 2 * MIB, 8 * 8 * 128 * 4, 2_099_200  # as an H200's trace has it
    copy = gradients = product = whole
    assert seen[:12] == [
        copy,
        *3 * [gradients],
        product,
        *2 * [row],
        -row,
        -product,
        workspace,
        -row,
        -workspace,
    ]


@pytest.mark.parametrize(
    ("shape", "half", "expected"),
    [
        ((8, 8, 128, 128, 64, 64), False, 2_099_200),
        ((1, 1, 1, 1, 64, 64), False, 16 + 4 * 64 * 64),
        ((1, 1, 64, 64, 64, 64), True, 16 + 4 * 64 * 64),
        # Heads too wide for registers: an area for the gradients of keys and values as well.
        ((1, 1, 128, 64, 256, 256), True, 4 * (16 + 4 * 128 * 64) + 2 * 4 * 64 * 256),
    ],
)
def test_the_workspace_follows_from_the_shape(shape, half, expected):
    assert attention_workspace(*shape, half, roomy=True) == expected


def test_attention_in_a_graph():
    q, k, v = (t.detach() for t in inputs(tokens=32))
    graph = torch.cuda.CUDAGraph()
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    with torch.cuda.graph(graph):
        out, _, seed, _ = op(q, k, v, None, True)
    assert seed.is_cuda  # in a graph it is
    v.fill_(3)
    graph.replay()
    assert out.cpu().allclose(torch.tensor(3.0))


def test_attention_without_dropout_draws_nothing():
    q, k, v = inputs(tokens=32)
    before = torch.cuda.get_rng_state()
    F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.nn.functional.dropout(q)
    assert not torch.equal(torch.cuda.get_rng_state(), before)
