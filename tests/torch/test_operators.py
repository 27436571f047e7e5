"""Redirected operators where redirection could go wrong: devices, outputs, aliases, errors."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from ebbtide import sim
from ebbtide.sim.operators.memory import forget


def both(function, *tensors):
    """The same on the CPU and on the simulated GPU; the results are equal to the bit."""
    expected = function(*[t.clone() for t in tensors])
    got = function(*[t.cuda() for t in tensors])
    assert got.device.type == "cuda"
    assert torch.equal(got.cpu(), expected)
    assert got.stride() == expected.stride()
    return got


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda g, c: g + c,
        lambda g, c: c + g,
        lambda g, c: torch.mm(g, c),
        lambda g, c: torch.cat([g, c]),
        lambda g, c: torch._foreach_add([g, g], [g, c]),
        lambda g, c: g + g.to("cuda:1"),
        lambda g, c: F.embedding(torch.tensor([1]), g),
        lambda g, c: c[torch.zeros(2, dtype=torch.int64, device="cuda")],
        lambda g, c: g.addcmul_(g, c),
        lambda g, c: torch.add(g, g, out=torch.empty(3, 3)),
        lambda g, c: torch.add(c, c, out=torch.empty(3, 3, device="cuda")),
        lambda g, c: torch.add(g, g, out=torch.empty(3, 3, device="cuda:1")),
        lambda g, c: torch.tensor(1.0).add_(g.sum()),
    ],
)
def test_tensors_of_two_devices_are_refused(call):
    g, c = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"on the same device|same device as the indexed"):
        call(g, c)


def test_a_cpu_scalar_goes_with_any_device():
    g = torch.ones(3, device="cuda:1")
    assert (g * torch.tensor(2.0)).device == g.device
    assert g[torch.tensor([0, 1])].tolist() == [1, 1]


def test_the_lengths_of_a_packed_sequence_stay_on_the_cpu():
    packed = pack_padded_sequence(torch.ones(4, 2, 3, device="cuda"), torch.tensor([4, 2]))
    assert packed.data.is_cuda
    assert packed.batch_sizes.device.type == "cpu"


# ---- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4, 9, 100])
def test_out_is_given_the_results_shape(size):
    a = torch.arange(9.0).view(3, 3)
    outs = []
    for device in ("cpu", "cuda"):
        out = torch.empty(size, device=device)
        if size not in (0, 9):
            with pytest.warns(UserWarning, match="was resized"):
                torch.add(a.to(device), 1, out=out)
        else:
            out.resize_(0)
            torch.add(a.to(device), 1, out=out)
        outs.append(out.cpu())
    assert torch.equal(*outs)


def test_out_keeps_its_memory_strides_and_dtype():
    out = torch.zeros(3, 3, dtype=torch.float64, device="cuda").t()
    before = out.data_ptr()
    torch.add(torch.ones(3, 3, device="cuda"), torch.eye(3, device="cuda"), out=out)
    assert (out.data_ptr(), out.stride()) == (before, (1, 3))
    assert torch.equal(out.cpu(), (torch.ones(3, 3) + torch.eye(3)).double())
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(out, 0.5, out=torch.zeros(3, 3, dtype=torch.int64, device="cuda"))


def test_an_output_may_be_an_input():
    def into_itself(a):
        return torch.cumsum(a, 0, out=a)

    both(into_itself, torch.rand(5, 5))


def test_overlapping_memory_is_refused():
    a = torch.zeros(10, device="cuda")
    with pytest.raises(RuntimeError, match=r"single memory location|overlap"):
        a[1:].add_(a[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        a[:1].expand(5).add_(1)


def test_conjugates_and_negatives():
    z = torch.randn(4, 4, dtype=torch.complex64)
    both(lambda a: a.conj() @ a, z)
    both(lambda a: a.conj().imag + 1, z)
    both(lambda a: torch.add(a.mH, 1), z)


def test_an_alias_is_not_another_tensors():
    """Memory is used again for other shapes and dtypes, and stays what it then is."""
    for dtype in (torch.float32, torch.int32, torch.float32, torch.float16):
        for shape in ((4, 4), (2, 8), (16,)):
            t = torch.full(shape, 3, dtype=dtype, device="cuda")
            assert (t + 1).sum().item() == 64
            del t


def test_in_and_out_of_inference_mode():
    forget()  # the aliases that other tests made
    a = torch.zeros(8).cuda()
    with torch.inference_mode():
        assert (a + 1).sum().item() == 8
    a.add_(1)
    with torch.inference_mode():
        a.mul_(2)
    assert a.add_(1).sum().item() == 24


def refills_seeds_of_inference_mode():
    """Whether this PyTorch (2.6 does) makes the seeds of a graph's random numbers in the inference
    mode of the capture and fills them at every launch: then it refuses one outside of that mode,
    on a GPU too, and even if the graph is empty."""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        pass
    try:
        graph.replay()
    except RuntimeError as error:
        return "Inplace update to inference tensor" in str(error)
    return False


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_of_inference_mode_is_launched_outside_of_it():
    if refills_seeds_of_inference_mode():
        pytest.xfail("this PyTorch cannot launch a graph of inference mode outside of it")
    forget()  # the aliases that other tests made
    a = torch.zeros(8).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        a.add_(1)
    graph.replay()
    graph.replay()
    assert a.tolist() == [2] * 8


def test_more_tensors_than_are_told_at_once():
    many = [torch.zeros(1, device="cuda") for _ in range(1500)]
    torch._foreach_add_(many, many)
    torch._foreach_add_(many, 1.0)
    assert sum(m.item() for m in many) == 1500


def test_what_depends_on_the_data_waits():
    a = torch.ones(8, device="cuda")
    torch.cuda._sleep(200_000_000)
    (a + 1).abs_()
    assert not torch.cuda.current_stream().query()
    assert torch.nonzero(a).shape == (8, 1)
    assert torch.cuda.current_stream().query()


# ---- put together from others --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5, 3)])
def test_the_pieces_of_a_synchronised_batch_norm(dtype, shape):
    """Two parts, their statistics exchanged, are the batch norm of the whole."""
    x = torch.randn(shape, dtype=dtype)
    weight, bias = torch.rand(4), torch.rand(4)
    running = [torch.zeros(4), torch.ones(4)]
    whole = x.float().requires_grad_()
    expected = F.batch_norm(whole, *running, weight, bias, training=True)
    grad = torch.randn(shape, dtype=dtype)
    expected.backward(grad.float())

    aten = torch.ops.aten
    parts, grads = x.cuda().split([2, 4]), grad.cuda().split([2, 4])
    w, b = weight.cuda(), bias.cuda()
    stats = [aten.batch_norm_stats(p, 1e-5) for p in parts]
    counts = torch.tensor([p.numel() / 4 for p in parts], device="cuda")
    updated = [torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")]
    means, stds = (torch.stack(s) for s in zip(*stats, strict=True))
    mean, invstd = aten.batch_norm_gather_stats_with_counts(
        x.cuda(), means, stds, *updated, 0.1, 1e-5, counts
    )
    got = torch.cat([aten.batch_norm_elemt(p, w, b, mean, invstd, 1e-5) for p in parts])
    reduced = [
        aten.batch_norm_backward_reduce(g, p, mean, invstd, w, True, True, True)
        for g, p in zip(grads, parts, strict=True)
    ]
    dy, dy_xmu, to_weight, to_bias = (sum(r) for r in zip(*reduced, strict=True))
    back = torch.cat(
        [
            aten.batch_norm_backward_elemt(g, p, mean, invstd, w, dy, dy_xmu, counts.int())
            for g, p in zip(grads, parts, strict=True)
        ]
    )
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got.cpu().float(), expected.detach(), **near)
    torch.testing.assert_close(back.cpu().float(), whole.grad, **near)
    for mine, theirs in zip(updated, running, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
    assert to_weight.shape == to_bias.shape == (4,)


def test_sparse_tensors():
    dense = torch.eye(4) * torch.arange(4.0)
    both(lambda a: a.to_sparse().to_dense(), dense)
    both(lambda a: torch.sparse.mm(a.to_sparse(), a), dense)
    both(lambda a: (a.to_sparse() + a.to_sparse()).coalesce().values(), dense)
    both(lambda a: a.to_sparse().add_(torch.ones_like(a).to_sparse()).to_dense(), dense)
    both(lambda a: a.to_sparse_csr() @ a, dense)
    both(lambda a: torch.sparse.sum(a.to_sparse(), 0).to_dense(), dense)


# ---- errors --------------------------------------------------------------------------------------


def test_an_operator_without_a_cpu_kernel_is_named():
    g = torch.ones(4, 4, device="cuda")
    with pytest.raises(NotImplementedError, match=r"aten::_sparse_semi_structured_tile.*no CPU"):
        torch.ops.aten._sparse_semi_structured_tile(g)


def test_a_dtype_without_a_cpu_kernel_is_named():
    g = torch.ones(4, 4, device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"aten::.*the CPU has no kernel") as caught:
        torch.sort(g)
    assert "sort" in str(caught.value)
    assert torch.equal(g.float().cpu(), torch.ones(4, 4))


def test_an_error_leaves_everything_well():
    g = torch.ones(4, 4, device="cuda")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.mm(g, g[:2])
    assert (g @ g).sum().item() == 64
    assert sim.hazard_count() == 0


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_a_softmax_of_halves_in_single_precision(function):
    x = torch.randn(3, 5, dtype=torch.half)

    def run(device):
        leaf = x.to(device).requires_grad_()
        made = function(leaf, -1, dtype=torch.float32)
        made.pow(2).sum().backward()
        return made.detach().cpu(), leaf.grad.cpu()

    (there, gradient), (here, expected) = run("cuda"), run("cpu")
    assert there.dtype == torch.float32 and gradient.dtype == torch.half
    assert torch.equal(there, here) and torch.allclose(gradient, expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_recurrent_network_under_autocast(kind):
    network = getattr(torch.nn, kind)(5, 6, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(3, 4, 5, device="cuda")
    with torch.autocast("cuda"):
        made, _ = network(x)
    assert made.dtype == torch.half and made.grad_fn.name() == "CudnnRnnBackward0"
    made.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in network.parameters())
    assert torch.equal(made, network.half()(x.half())[0])


def test_sizes_of_a_packed_sequence_are_the_hosts():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 3, device="cuda"), [2, 1])
    wrong = torch.tensor([2, 1], device="cuda")
    network = torch.nn.RNN(3, 4).cuda()
    state = torch.zeros(1, 2, 4, device="cuda")
    weights = network._flat_weights
    with pytest.raises(RuntimeError, match="batch_sizes tensor should be on CPU"):
        torch.rnn_tanh(packed.data, wrong, state, weights, True, 1, 0.0, False, False)


def test_least_squares_has_one_driver():
    a, b = torch.randn(4, 3), torch.randn(4, 2)
    made = torch.linalg.lstsq(a.cuda(), b.cuda())
    assert torch.equal(made.solution.cpu(), torch.linalg.lstsq(a, b, driver="gels").solution)
    for driver in ("gelsy", "gelsd", "gelss"):
        with pytest.raises(RuntimeError, match="other than `gels` is not supported on CUDA"):
            torch.linalg.lstsq(a.cuda(), b.cuda(), driver=driver)


# ---- tensors of other kinds ----------------------------------------------------------------------


def test_quantized_tensors():
    x = torch.randn(4, 4)
    here = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    there = torch.quantize_per_tensor(x.cuda(), 0.1, 0, torch.qint8)
    assert there.is_cuda and torch.equal(there.int_repr().cpu(), here.int_repr())
    assert torch.equal(here.cuda().dequantize().cpu(), here.dequantize())
    with pytest.raises(NotImplementedError, match="quantized::add cannot run on the simulated GPU"):
        torch.ops.quantized.add(there, there, 0.1, 0)


def test_nested_tensors():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.as_nested_tensor([p.cuda() for p in parts])
    products = torch.matmul(nested, nested.transpose(1, 2)).unbind()
    assert all(torch.equal(m.cpu(), p @ p.T) for m, p in zip(products, parts, strict=True))
    padded = nested.to_padded_tensor(-1.0)
    assert padded.shape == (2, 4, 3) and torch.equal(padded[0, :2].cpu(), parts[0])
    assert (padded[0, 2:] == -1).all()


def test_code_made_at_run_time_is_refused_by_name():
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this PyTorch compiles no kernels")
    with pytest.raises(NotImplementedError, match="_compile_kernel cannot run on the simulated"):
        torch.cuda._compile_kernel("__global__ void f() {}", "f")
