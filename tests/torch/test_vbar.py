"""Weights that page, used by PyTorch: the values are right, whatever had to give way."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

import ebbtide
from ebbtide import sim

MIB = 1 << 20
PAGE = 32 * MIB
FLOATS = PAGE // 4  # of a page


@pytest.fixture
def device():
    """128 MiB of the first card may be held: four pages."""
    device = ebbtide.Device(0, limit="128MiB")
    device.limit = "128MiB"
    yield device
    gc.collect()
    torch.cuda.synchronize()
    device.check()
    assert device.stats()["held"] <= device.limit
    assert device.stats()["pinned"] == 0
    device.close()


@pytest.fixture
def vbar(device):
    with ebbtide.VBAR(device, "512MiB") as vbar:
        yield vbar


def values(seed, count=1024):
    return torch.arange(count, dtype=torch.float32).add_(seed * 1000)


def use(weight, host):
    """The weight's values, as PyTorch sees them on the current stream."""
    with weight.resident(host) as t:
        return t.clone()


# ---- resident() ---------------------------------------------------------------------------------


def test_filled_at_first_a_hit_afterwards(vbar):
    host = values(1).pin_memory()
    w = vbar.alloc(host.nbytes)
    with w.resident(host) as t:
        assert (t.device, t.data_ptr(), w.pins) == (torch.device("cuda:0"), w.address, 1)
        assert torch.equal(t.cpu(), host)
    assert w.pins == 0
    host.zero_()  # not looked at again: what is there is intact
    with w.resident(host) as again:
        assert again is t
        assert torch.equal(again.cpu(), values(1))
    stats = vbar.stats()
    assert (stats["misses"], stats["hits"]) == (1, 1)


def test_offloaded_in_a_temporary(vbar):
    hosts = [values(i) for i in range(8)]
    weights = [vbar.alloc(PAGE) for _ in hosts]
    for _ in range(3):
        for w, host in zip(weights, hosts, strict=True):
            with w.resident(host) as t:
                assert t.is_cuda and torch.equal(t.cpu(), host)
                inside = w.address <= t.data_ptr() < w.address + w.nbytes
                assert inside == (w.pins == 1) == (w in weights[:4])
    assert vbar.stats()["offloaded"] == 3 * 4
    assert vbar.stats()["misses"] == 4


def test_right_after_evictions(device):
    """Two models take turns in room for one."""
    models = []
    for number in range(2):
        vbar = ebbtide.VBAR(device, 4 * PAGE)
        hosts = [values(10 * number + i) for i in range(4)]
        models.append((vbar, [(vbar.alloc(PAGE), host) for host in hosts]))
    for _ in range(3):
        for vbar, layers in models:
            vbar.prioritize()
            for w, host in layers:
                assert torch.equal(use(w, host).cpu(), host)
            assert vbar.loaded_size == 4 * PAGE
    assert device.stats()["evictions_for_weights"] == 5 * 4
    assert device.stats()["frames_created"] == 4


def test_an_exception_inside_unpins(vbar):
    host = values(1)
    w = vbar.alloc(host.nbytes)
    with pytest.raises(KeyError), w.resident(host):
        raise KeyError
    assert w.pins == 0


def test_one_resident_entered_twice(vbar):
    host = values(1)
    w = vbar.alloc(host.nbytes)
    both = w.resident(host)
    with both as a, both as b:
        assert a is b and w.pins == 2
    assert w.pins == 0


def test_a_resident_is_not_copied(vbar):
    host = values(1)
    w = vbar.alloc(host.nbytes)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            call(w.resident(host))
        with w.resident(host), pytest.raises(TypeError):
            call(w)


def test_a_fill_that_fails_leaves_nothing_pinned(vbar):
    host = values(1)
    w = vbar.alloc(host.nbytes)
    with pytest.raises((RuntimeError, NotImplementedError)), w.resident(host.to("meta")):
        pass
    assert (w.pins, w.signature) == (0, None)
    assert torch.equal(use(w, host).cpu(), host)


@pytest.mark.parametrize(
    "host",
    [
        torch.arange(24.0).view(4, 6).T,
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(4.0).expand(6, 4),
        torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor(3.5),
        torch.empty(0, 5),
        torch.arange(5, dtype=torch.int8),
        torch.arange(6.0).pin_memory(),
        torch.arange(6.0).cuda(),
        torch.nn.Parameter(torch.arange(6.0)),
        torch.arange(6.0).to(torch.complex64).conj(),
    ],
    ids=lambda host: f"{list(host.shape)} {list(host.stride())}",
)
@pytest.mark.parametrize("resident", [True, False])
def test_whatever_the_host_tensor_is_like(vbar, host, resident):
    w = vbar.alloc(1024)
    if not resident:
        vbar.watermark = 0
    for _ in range(2):
        with w.resident(host) as t:
            assert (t.shape, t.dtype, t.is_cuda) == (host.shape, host.dtype, True)
            assert not t.requires_grad and t.grad_fn is None
            assert torch.equal(t.cpu(), host.detach().cpu())


def test_gradients_flow_through_what_uses_a_weight(vbar):
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    w = vbar.alloc(parameter.nbytes)
    for _ in range(2):  # a second time, too: no graph is kept with the weight
        x = torch.randn(2, 8, device="cuda", requires_grad=True)
        with w.resident(parameter) as t:
            (x @ t).sum().backward()
        assert torch.allclose(x.grad.cpu(), parameter.detach().sum(1).expand(2, 8), atol=1e-5)


def test_inference_mode_is_not_remembered(vbar):
    """A tensor that was built in it serves outside as well, and the other way round."""
    host = values(1, 64).view(8, 8)
    a, b = vbar.alloc(256), vbar.alloc(256)
    with torch.inference_mode():
        assert torch.equal(use(a, host).cpu(), host)
    use(b, host)
    vbar.free_memory(PAGE)
    vbar.prioritize()
    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    with a.resident(host) as t:
        assert not t.is_inference()
        (x @ t).sum().backward()
    assert torch.equal(x.grad[0].cpu(), host.sum(1))
    vbar.free_memory(PAGE)
    vbar.prioritize()
    with torch.inference_mode():
        assert torch.equal(use(b, host).cpu(), host)
        vbar.watermark = 0
        assert torch.equal(use(vbar.alloc(PAGE), host).cpu(), host)


def test_what_does_not_fit_is_refused(vbar):
    w = vbar.alloc(1000)
    with pytest.raises(ValueError, match=r"1024 bytes do not fit"):
        w.resident(values(1, 256))
    with pytest.raises((TypeError, AttributeError)):
        w.resident(None)


# ---- tensor() -----------------------------------------------------------------------------------

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype(vbar, dtype):
    w = vbar.alloc(4096)
    assert w.fault()
    for shape in ([4, 8], [32], [], [0, 3], [1, 1, 2]):
        t = w.tensor(shape, dtype)
        assert (list(t.shape), t.dtype, t.data_ptr() in (0, w.address)) == (shape, dtype, True)
        assert t.is_contiguous() and t.device == torch.device("cuda:0")
        assert w.tensor(tuple(shape), dtype) is w.tensor(torch.Size(shape), dtype) is t
    w.tensor([4096], torch.uint8).fill_(1)
    if dtype.is_floating_point and dtype.itemsize > 1:
        w.tensor([32], dtype).fill_(2)
        assert w.tensor([4, 8], dtype).sum().item() == 64
    w.unpin()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1025,), torch.float32),
        ((2**40, 2**40), torch.uint8),
        ((-1,), torch.uint8),
        ((-1, -1), torch.uint8),
        ((-1, 0), torch.uint8),
        (("4",), torch.uint8),
        ((2.5,), torch.uint8),
        ((None,), torch.uint8),
        (5, torch.uint8),
        (None, torch.uint8),
        ((4,), "float32"),
        ((4,), None),
        ((4,), float),
    ],
    ids=str,
)
def test_a_tensor_that_is_none_is_refused(vbar, shape, dtype):
    w = vbar.alloc(4096)
    with pytest.raises((ValueError, TypeError)) as raised:
        w.tensor(shape, dtype)
    assert str(raised.value)
    assert w.tensor((1024,), torch.float32) is not None


def test_a_tensor_keeps_the_addresses(device):
    """After everything else is gone."""
    vbar = ebbtide.VBAR(device, PAGE)
    w = vbar.alloc(1024)
    gone = weakref.ref(vbar)
    with w.resident(values(1, 256)) as t:
        pass
    view = t[3:5]
    del vbar, w, t
    gc.collect()
    assert gone() is not None
    assert device.stats()["vbars"] == 1
    assert torch.equal(view.cpu(), values(1, 256)[3:5])  # nobody has taken the page meanwhile
    del view
    gc.collect()
    assert gone() is None
    assert device.stats()["vbars"] == 0


def test_building_a_tensor_touches_nothing(vbar):
    t = vbar.alloc(PAGE).tensor((FLOATS,), torch.float32)
    assert vbar.loaded_size == 0
    assert t.is_cuda


# ---- streams ------------------------------------------------------------------------------------


def test_filled_on_one_stream_used_on_another(vbar):
    hosts = [values(i, FLOATS).pin_memory() for i in range(2)]
    weights = [vbar.alloc(PAGE) for _ in hosts]
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(20_000_000)
        for w, host in zip(weights, hosts, strict=True):
            use(w, host)
    with torch.cuda.stream(two):
        results = [use(w, host) for w, host in zip(weights, hosts, strict=True)]
    two.synchronize()
    assert all(torch.equal(r.cpu(), host) for r, host in zip(results, hosts, strict=True))


@pytest.mark.simulated
@pytest.mark.hazards
@pytest.mark.parametrize("told", [True, False])
def test_filled_is_what_orders_another_stream(vbar, hazards, told):
    """While the filling stream has its pin. Where the fill is not told, the use is a race."""
    host = values(1, FLOATS).pin_memory()
    w = vbar.alloc(PAGE)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        signature = w.fault()
        w.tensor(host.shape, host.dtype).copy_(host, non_blocking=True)
        if told:
            w.filled(signature)
    with torch.cuda.stream(two):
        assert w.fault() == signature
        result = w.tensor(host.shape, host.dtype).clone()
        w.unpin()
    assert [h.kind for h in hazards()] == ([] if told else [sim.Kind.RACE])
    assert not told or torch.equal(result.cpu(), host)
    with torch.cuda.stream(one):
        w.unpin()


def test_a_fill_that_comes_after_the_other_streams_fault(vbar):
    """Both have faulted before either has filled: who finds it filled is ordered by looking."""
    host = values(1, FLOATS).pin_memory()
    w = vbar.alloc(PAGE)
    t = w.tensor(host.shape, host.dtype)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(two):
        second = w.fault()
    with torch.cuda.stream(one):
        first = w.fault()
        torch.cuda._sleep(10_000_000)
        t.copy_(host, non_blocking=True)
        w.filled(first)
        w.unpin()
    with torch.cuda.stream(two):
        assert second == w.signature
        result = t.clone()
        w.unpin()
    two.synchronize()
    assert torch.equal(result.cpu(), host)


@pytest.mark.hazards
def test_the_same_with_streams_that_are_given(vbar, hazards):
    host = values(1, FLOATS).pin_memory()
    w = vbar.alloc(PAGE)
    t = w.tensor(host.shape, host.dtype)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    second, first = w.fault(stream=two), w.fault(stream=one)
    with torch.cuda.stream(one):
        t.copy_(host, non_blocking=True)
    w.filled(first, stream=one)
    w.unpin(stream=one)
    assert second == w.signature
    with torch.cuda.stream(two):
        t.clone()
    w.unpin(stream=two)
    assert hazards() == []


@pytest.mark.simulated
def test_a_stream_promised_never_to_capture_stays_so_when_it_becomes_current(vbar, device):
    host = values(1).pin_memory()
    w, stream = vbar.alloc(host.nbytes), torch.cuda.Stream()
    device.keep_stream(stream, never_captures=True)
    again = ebbtide.Device(0)  # the same GPU, by an object that has not met the stream
    with torch.cuda.stream(stream), ebbtide.VBAR(again, "32MiB") as other:
        for weight in (other.alloc(host.nbytes), w):
            assert torch.equal(use(weight, host).cpu(), host)
        before = sim.calls("cuStreamIsCapturing")
        for _ in range(5):
            w.fault()
            w.unpin()
        assert sim.calls("cuStreamIsCapturing") == before
    again.close()


@pytest.mark.simulated
def test_an_external_stream(vbar):
    card = sim.open_card(0)
    host = values(1)  # not pinned: PyTorch asks the streams that used pinned memory when it goes
    w, other = vbar.alloc(host.nbytes), vbar.alloc(host.nbytes)
    for _ in range(3):
        raw = card.stream()
        stream = torch.cuda.ExternalStream(raw.handle)
        with torch.cuda.stream(stream):
            result = use(w, host)
        assert w.fault(stream=stream) is not None
        w.unpin(stream=stream)
        stream.synchronize()
        assert torch.equal(result.cpu(), host)
        raw.destroy()  # it may go: nobody asks it afterwards
        del stream
        assert torch.equal(use(other, host).cpu(), host)
        vbar.free_memory(PAGE)
        vbar.prioritize()
    card.close()


def test_two_threads_on_two_streams(vbar):
    hosts = [values(i, 4096).pin_memory() for i in range(8)]
    weights = [vbar.alloc(PAGE if i % 2 else 16384) for i in range(8)]
    wrong, gate = [], threading.Barrier(2)

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            gate.wait()
            results = []
            for _ in range(6):
                for w, host in zip(weights, hosts, strict=True):
                    results.append((use(w, host), host))
                vbar.prioritize()
            torch.cuda.current_stream().synchronize()
            wrong.extend(1 for result, host in results if not torch.equal(result.cpu(), host))

    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == []
    assert vbar.stats()["pinned"] == 0


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.two_cards
def test_the_second_card_whichever_is_current(device):
    with ebbtide.Device(1, limit="64MiB") as second:
        vbar = ebbtide.VBAR(second, "128MiB")
        layers = [(vbar.alloc(PAGE), values(i)) for i in range(4)]
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                for w, host in layers:
                    with w.resident(host) as t:
                        assert t.device == torch.device("cuda:1")
                        assert torch.equal(t.cpu(), host)
                assert torch.cuda.current_device() == current
        assert second.stats()["held"] == 64 * MIB
        assert device.stats()["held"] == 0
        second.check()
        vbar.close()


def test_a_card_beside_pytorchs(device):
    """Device("sim") is not one of PyTorch's: its tensors are the CPU's, and fit."""
    with ebbtide.Device("sim", memory="64MiB", limit="32MiB") as beside:
        vbar = ebbtide.VBAR(beside, "64MiB")
        for i in range(2):
            host = values(i)
            with vbar.alloc(PAGE).resident(host) as t:
                assert not t.is_cuda and torch.equal(t, host)
        vbar.close()


# ---- graphs -------------------------------------------------------------------------------------


def test_a_graph_holds_the_weights_it_uses(device):
    vbar = ebbtide.VBAR(device, 2 * PAGE)
    host = torch.eye(64).mul_(3).pin_memory()
    w = vbar.alloc(PAGE)
    x = torch.ones(4, 64, device="cuda")
    y = torch.zeros(4, 64, device="cuda")
    use(w, host)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), w.resident(host) as t:
        torch.mm(x, t, out=y)
    assert vbar.residency()[0] & 4
    assert vbar.free_memory(PAGE) == 0
    more = ebbtide.VBAR(device, 4 * PAGE)
    taken = [more.alloc(PAGE).fault() for _ in range(4)]
    assert taken.count(None) == 1  # the graph's page is no victim
    with pytest.raises(ebbtide.Busy, match="graphs_gone"):
        vbar.close()
    graph.replay()
    assert torch.equal(y.cpu(), torch.full((4, 64), 3.0))
    del graph
    vbar.graphs_gone()
    assert vbar.free_memory(PAGE) == PAGE
    vbar.close()


# ---- weights that are written, and models -------------------------------------------------------


def test_written_weights_are_saved_and_come_back(device):
    saved = [torch.zeros(FLOATS).pin_memory() for _ in range(4)]

    def save(offset, size):
        assert size == PAGE
        saved[offset // PAGE].copy_(weights[offset // PAGE].tensor((FLOATS,), torch.float32))

    vbar = ebbtide.VBAR(device, 4 * PAGE, page_out=save)
    weights = [vbar.alloc(PAGE) for _ in range(4)]
    for number in range(3):  # written each time it is there
        vbar.prioritize()
        for i, w in enumerate(weights):
            with w.resident(saved[i]) as t:
                assert t[5].item() == t[-1].item() == number * (i + 1)
                t.add_(i + 1)
        other = ebbtide.VBAR(device, 4 * PAGE)
        w = other.alloc((number + 2) * PAGE)
        assert w.fault() is not None
        w.unpin()
        other.close()
    assert device.stats()["page_outs"] == 2 + 3 + 4
    for i, host in enumerate(saved):
        assert host[7].item() == 3 * (i + 1)
    vbar.close()


class Paged(torch.nn.Module):
    """Linear layers whose weights are in a VBAR."""

    def __init__(self, vbar, model):
        super().__init__()
        self.layers = [
            (vbar.alloc(PAGE), layer.weight.detach(), layer.bias.detach().cuda())
            for layer in model
            if isinstance(layer, torch.nn.Linear)
        ]

    def forward(self, x):
        for w, host, bias in self.layers:
            with w.resident(host) as t:
                x = torch.relu(torch.nn.functional.linear(x, t, bias))
        return x


@torch.no_grad()
def test_a_model_runs_the_same_to_the_bit(device):
    layers = []
    for _ in range(6):
        layers += [torch.nn.Linear(96, 96), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    vbar = ebbtide.VBAR(device, "512MiB")
    paged = Paged(vbar, model)
    model.cuda()
    for number in range(4):
        x = torch.randn(5, 96, device="cuda")
        assert torch.equal(paged(x), model(x))
        if number == 1:
            vbar.free_memory(2 * PAGE)
        if number == 2:
            vbar.prioritize()
    stats = vbar.stats()
    assert min(stats["hits"], stats["misses"], stats["offloaded"]) > 0
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(paged)
    vbar.close()
