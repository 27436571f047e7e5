"""Fused attention, by each of the backends that a GPU has: the CPU's results, the GPU's memory."""

import inspect

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ebbtide.sim.operators import attention
from ebbtide.sim.operators.cost import formula

BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def tensors(device, length=64):
    for seed in range(3):
        made = torch.randn(
            2, 4, length, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed)
        )
        yield made.to(device).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_each_backend_gives_the_cpus_results(backend, causal):
    def run(device, backend):
        q, k, v = tensors(device)
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            output.float().pow(2).sum().backward()
        return [t.detach().cpu() for t in (output, q.grad, k.grad, v.grad)]

    there, here = run("cuda", backend), run("cpu", SDPBackend.FLASH_ATTENTION)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_no_backend_keeps_a_matrix_of_scores(backend):
    q, k, v = tensors("cuda", 1024)
    before = torch.cuda.memory_allocated()
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(q, k, v)
    held = torch.cuda.memory_allocated() - before
    assert output.nbytes < held < 2 * output.nbytes  # one number a row more; not 2 x 4 squares


@pytest.mark.parametrize("name", attention.KERNELS)
def test_signatures_are_those_of_this_pytorch(name):
    schema = getattr(torch.ops.aten, name.partition("::")[2]).default._schema
    parameters = list(inspect.signature(attention.KERNELS[name]).parameters.values())
    assert [p.kind is p.KEYWORD_ONLY for p in parameters] == [
        a.kwarg_only for a in schema.arguments
    ]
    # A name may differ by what C++ needed it for: grad_out_.
    assert [p.name for p in parameters] == [a.name.rstrip("_") for a in schema.arguments]


def test_flash_attentions_random_state_is_as_this_pytorch_describes_it():
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    names = [r.name for r in operator._schema.returns]
    with torch.no_grad():
        results = dict(zip(names, operator(*tensors("cuda")), strict=True))
    if "rng_state" in results:
        assert (results["rng_state"].dtype, results["rng_state"].shape) == (torch.uint64, (2,))
    else:
        assert results["philox_seed"].dtype == results["philox_offset"].dtype == torch.int64


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_dropout_is_drawn_again_by_the_backward_pass(backend):
    def output(value):
        torch.cuda.manual_seed(7)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, value, dropout_p=0.375).float()

    q, k, v = tensors("cuda")
    first = output(v)
    assert torch.equal(first, output(v))
    # Linear in the values, so the gradient times a step is what the step makes of the output.
    step = torch.ones_like(v)
    (gradient,) = torch.autograd.grad(first.sum(), v)
    change = output(step).sum() - output(torch.zeros_like(v)).sum()
    assert torch.isclose((gradient.float() * step.float()).sum(), change, rtol=0.02)
    with sdpa_kernel(backend):
        assert not torch.equal(first, F.scaled_dot_product_attention(q, k, v, dropout_p=0.375))


@pytest.mark.parametrize("dropout", [0.0, 0.375])
def test_a_bias_has_a_gradient(dropout):
    q, k, v = (torch.randn(1, 2, 8, 16, device="cuda", requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 8, 8, device="cuda", requires_grad=True)

    def loss(backend=SDPBackend.EFFICIENT_ATTENTION):
        torch.cuda.manual_seed(7)
        with sdpa_kernel(backend):
            made = F.scaled_dot_product_attention(q, k, v, bias.expand(1, 2, 8, 8), dropout)
        return (made * torch.arange(16, device="cuda")).sum()

    (gradient,) = torch.autograd.grad(loss(), bias)
    step = torch.randn_like(bias)
    with torch.no_grad():
        bias += 0.01 * step
        above = loss()
        bias -= 0.02 * step
        slope = (above - loss()) / 0.02
    assert torch.isclose(slope, (gradient * step).sum(), rtol=0.01)


def test_shared_keys_with_dropout():
    q = torch.randn(1, 4, 8, 16, device="cuda", dtype=torch.half, requires_grad=True)
    k, v = (
        torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.half, requires_grad=True)
        for _ in range(2)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=True)
    made.float().sum().backward()
    assert made.shape == q.shape and k.grad.shape == k.shape and v.grad.shape == v.shape


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dropout", [0.0, 0.375])
def test_the_generator_moves_on_for_dropout_only(backend, dropout):
    q, k, v = tensors("cuda")
    generator = torch.cuda.default_generators[0]
    before = generator.get_offset()
    with sdpa_kernel(backend):
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    assert (generator.get_offset() > before) == (dropout > 0)
    after = generator.get_offset()
    made.float().sum().backward()
    assert generator.get_offset() == after


@pytest.mark.parametrize("dropout", [0.0, 0.375])
def test_outputs_and_gradients_lie_token_by_token(dropout):
    q, k, v = (torch.randn(2, 3, 8, 16, device="cuda", requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    gradients = torch.autograd.grad(made, (q, k, v), torch.randn_like(made))
    for tensor in (made, *gradients):
        assert tensor.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_dropout_in_a_graph_is_drawn_at_each_launch(backend):
    q, k, v = tensors("cuda")
    gradient = torch.ones_like(q)

    def step():
        with sdpa_kernel(backend):
            made = F.scaled_dot_product_attention(q, k, v, dropout_p=0.375)
        return made.detach(), *torch.autograd.grad(made, (q, k, v), gradient)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    torch.cuda.manual_seed(3)
    eager = [step(), step()]
    torch.cuda.manual_seed(3)
    for wanted in eager:
        graph.replay()
        for got, expected in zip(captured, wanted, strict=True):
            assert torch.equal(got, expected)
    assert not torch.equal(eager[0][0], eager[1][0])


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("way", ["", "_backward"])
def test_causal_attention_is_half_the_arithmetic(kind, way):
    name = f"_scaled_dot_product_{kind}_attention{way}"
    schema = getattr(torch.ops.aten, name).default._schema
    values = {"query": torch.empty(1, 2, 8, 16), "key": torch.empty(1, 2, 8, 16)}
    values["value"] = values["key"]

    def cost(causal):
        args = [causal if a.name == "is_causal" else values.get(a.name) for a in schema.arguments]
        return formula(f"aten::{name}")(*args)

    assert cost(True) * 2 == cost(False) == 2 * 2 * 8 * 8 * 32 * (2.5 if way else 1)
    assert formula(f"aten::{name}")(*(values.get(a.name) for a in schema.arguments[:4])) == cost(
        False
    )
