"""offload(): passes that fail, gradients, several models and threads, limits, the handle."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import ebbtide

MIB = 1 << 20
SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")
WIDTH = 512  # a square of it is 1 MiB


def layers(count=8, width=WIDTH):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def x(width=WIDTH):
    return torch.randn(1, width, device="cuda")


def paged(model):
    """Bytes of the weights that come and go: biases stay on the GPU."""
    return sum(p.nbytes for p in model.parameters() if p.nbytes > 64 << 10)


def inside(model):
    return model.forward.model


def at_rest(model):
    """Nothing of it is in use."""
    ours = inside(model)
    assert all(u.depth == 0 and u.bare == 0 for u in ours.units)
    assert ours.running.depth == 0 and ours.running.run is None
    with ebbtide.Device(0) as device:
        pinned = device.stats()["pinned"]
    assert pinned <= -(-ours.station.ring // (2 * MIB)) * 2 * MIB
    return True


# ---- passes that fail ---------------------------------------------------------------------------


class Boom(nn.Module):
    """Fails when told to."""

    armed = False

    def __init__(self, part=None):
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        if self.part is not None:
            h = self.part(h)
        if self.armed:
            raise KeyError("boom")
        return h * self.weight


@pytest.mark.parametrize("where", ["unit", "run", "root", "hook"])
def test_a_pass_that_raises_leaves_nothing_pinned(room, where):
    boom = Boom()
    if where == "unit":
        model = nn.Sequential(layers(3), nn.Sequential(nn.Linear(WIDTH, WIDTH), boom), layers(3))
    elif where == "run":
        small = (nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)) for _ in range(3))
        model = nn.Sequential(layers(3), *small, boom, *layers(3))
    elif where == "root":
        model = boom = Boom(layers(6))
    else:
        model = nn.Sequential(layers(3), boom, layers(3))
        boom.register_forward_hook(fail)
    inputs = x()
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        expected = plain(inputs)
        del plain
        room.offload(model)
        for armed in (True, False, True, True, False, False, True, False):
            boom.armed = armed
            if armed:
                with pytest.raises(KeyError, match="boom"):
                    model(inputs)
            else:
                assert torch.equal(model(inputs), expected)
            assert at_rest(model)


def fail(module, args, result):
    if module.armed:
        raise KeyError("boom")


def test_an_activation_that_does_not_fit_is_pytorch_s_own_error(free_room):
    model = nn.Sequential(layers(2), Grows(1 << 29), layers(2))
    handle = free_room.offload(model)
    inputs = x()
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                model(inputs)
            assert at_rest(model)
        model[1].size = 0
        model(inputs)
    assert handle.stats()["one_by_one"] == 0


# ---- gradients ----------------------------------------------------------------------------------


def test_without_no_grad_forward_works_and_backward_raises(room):
    model = layers(6)
    inputs = x()
    plain = copy.deepcopy(model).cuda()
    expected = plain(inputs).detach()
    del plain
    room.offload(model)
    for _ in range(3):
        got = model(inputs)
        assert torch.equal(got, expected) and got.requires_grad
        with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
            got.sum().backward()
        leaf = inputs.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
            torch.autograd.grad(model(leaf).sum(), leaf)
        with pytest.raises(RuntimeError, match="not have been used"):  # PyTorch's own
            torch.autograd.grad(model(leaf).sum(), model[0][0].weight)
        assert all(p.grad is None for p in model.parameters())
        assert at_rest(model)


def test_backward_from_inside_of_the_model_raises(room):
    model = layers(6)
    room.offload(model)
    seen = []
    model[3][0].register_forward_hook(lambda module, args, result: seen.append(result))
    inputs = x().requires_grad_()
    for _ in range(3):
        model(inputs)
        with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
            seen.pop().sum().backward()
    assert inputs.grad is None and all(p.grad is None for p in model.parameters())


def test_backward_raises_where_weights_want_no_gradient_too(free_room):
    model = layers(4).requires_grad_(False)
    free_room.offload(model)
    inputs = x().requires_grad_()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
            model(inputs).sum().backward()
    assert inputs.grad is None


def test_inference_mode(room):
    model = layers(6)
    inputs = x()
    plain = copy.deepcopy(model).cuda()
    with torch.inference_mode():
        expected = plain(inputs)
        del plain
        room.offload(model)
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
    assert torch.equal(model(inputs).detach(), expected)


# ---- several models, and threads ----------------------------------------------------------------


def test_a_deleted_model_leaves_nothing_behind(room):
    inputs = x()
    model = layers()
    model[6][0].weight = model[1][0].weight
    handle = room.offload(model)
    with ebbtide.Device(0) as device, torch.no_grad():
        gc.disable()
        try:
            model(inputs)
            model(inputs)
            last = weakref.ref(inside(model))
            host = weakref.ref(inside(model).weights.bindings[0].piece)
            assert device.stats()["vbars"]
            del model
            assert last() is None and host() is None
            stats = device.stats()
            assert (stats["vbars"], stats["pinned"], stats["resident"]) == (0, 0, 0)
        finally:
            gc.enable()
    assert "gone" in repr(handle)
    with pytest.raises(ebbtide.Gone, match="deleted"):
        handle.stats()


def test_a_part_that_outlives_its_model_still_works(room):
    inputs = x()
    model = layers()
    with torch.no_grad():
        expected = copy.deepcopy(model[5]).cuda()(inputs)
        room.offload(model)
        model(inputs)
        part = model[5]
        del model
        for _ in range(4):
            assert torch.equal(part(inputs), expected)


def test_the_newest_model_comes_first_or_the_one_that_is_told_to(free_room):
    inputs = x()
    models = [layers(12), layers(12)]
    size = paged(models[0])
    with torch.no_grad():
        expected = [copy.deepcopy(m).cuda()(inputs) for m in models]
    free_room.of = lambda model: size + 10 * MIB
    handles = [free_room.offload(m) for m in models]

    def use():
        with torch.no_grad():
            for _ in range(3):
                for model, result in zip(models, expected, strict=False):
                    assert torch.equal(model(inputs), result)
        return [handles[i].stats()["resident"] for i in range(len(models))]

    one, other = use()
    assert other >= size > one
    handles[0].prioritize()
    one, other = use()
    assert one >= size > other
    handles[1].prioritize()
    one, other = use()
    assert other >= size > one
    models.pop()
    assert use()[0] >= size


def run_threads(count, work):
    errors = []

    def run(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                work(i)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_run_two_models(room):
    models = [layers(6), layers(6)]
    inputs = x()
    with torch.no_grad():
        expected = [copy.deepcopy(m).cuda()(inputs) for m in models]
    torch.cuda.synchronize()
    for model in models:
        room.offload(model, 8 * MIB)

    def work(i):
        for _ in range(15):
            assert torch.equal(models[i](inputs), expected[i])

    run_threads(2, work)
    assert all(at_rest(m) for m in models)


def test_two_threads_run_the_same_model(room):
    model = layers(6)
    inputs = [x(), x()]
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        expected = [plain(i) for i in inputs]
        del plain
    torch.cuda.synchronize()
    room.offload(model, 6 * MIB)

    def work(i):
        for _ in range(15):
            assert torch.equal(model(inputs[i]), expected[i])

    run_threads(2, work)
    assert at_rest(model)
    with torch.no_grad():
        assert torch.equal(model(inputs[0]), expected[0])


def test_passes_on_changing_streams(room):
    model = layers(6)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        room.offload(model, 6 * MIB)
        streams = [torch.cuda.Stream() for _ in range(3)]
        for i in range(9):
            stream = streams[i % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = model(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(got, expected)


@pytest.mark.two_cards
def test_a_model_on_another_card(free_room):
    model = layers(4)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = ebbtide.offload(model, "cuda:1")
        for _ in range(3):
            assert torch.equal(model(inputs.to("cuda:1")).to("cuda:0"), expected)
        assert handle.stats()["resident"] > 0
    assert model[0][0].weight.device == torch.device("cuda", 1)
    del model


# ---- limits -------------------------------------------------------------------------------------


class Grows(nn.Module):
    """An activation that comes in the middle."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, h):
        if not self.size:
            return h
        large = torch.zeros(self.size, device="cuda")
        return h + large[-1]


def test_weights_give_way_to_activations_and_come_back(free_room):
    model = nn.Sequential(layers(10), Grows(0), layers(10))
    inputs = x()
    free_room.of = lambda model: 56 * MIB
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)

        def steps(count=4):
            for _ in range(count):
                assert torch.equal(model(inputs), expected)
                assert free_room.held() <= free_room.limit
            return handle.stats()["resident"]

        assert steps() >= 20 * MIB
        model[1].size = 10 * MIB
        assert steps() <= 14 * MIB
        model[1].size = 0
        assert any(steps() >= 20 * MIB for _ in range(15))


def test_out_of_memory_the_next_try_has_all_there_is(free_room):
    model = nn.Sequential(layers(10), Grows(0), layers(10))
    inputs = x()
    free_room.of = lambda model: 56 * MIB
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for _ in range(4):
            assert torch.equal(model(inputs), expected)
        model[1].size = 40 * MIB  # more than the limit, in floats
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs)
        assert at_rest(model)
        model[1].size = 12 * MIB  # 48 MiB: what is left is for a unit in passing
        assert torch.equal(model(inputs), expected)
        assert handle.stats()["resident"] <= 8 * MIB
        assert free_room.held() <= free_room.limit
        model[1].size = 0
        for _ in range(60):
            assert torch.equal(model(inputs), expected)
        assert handle.stats()["resident"] >= 20 * MIB


def test_a_lower_limit_makes_the_ring_smaller(free_room):
    model = layers(12)
    inputs = x()
    free_room.of = lambda model: 14 * MIB
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model, prefetch=5)
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
        before = handle.stats()["ring"]
        with free_room.device() as device, contextlib.suppress(ebbtide.Busy):
            device.limit = free_room.limit - 10 * MIB
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
        assert 0 < handle.stats()["ring"] < before
        assert free_room.held() <= free_room.limit - 10 * MIB
        assert handle.stats()["one_by_one"] == 0


def test_a_limit_that_is_too_small_for_a_unit(free_room):
    model = nn.TransformerEncoderLayer(512, 4, 8192, dropout=0.0)  # 36 MiB, and one unit
    free_room.of = lambda model: 28 * MIB  # PyTorch takes 20 at once for a temporary
    handle = free_room.same(model, x())
    assert handle.stats()["one_by_one"] == 4


def test_a_limit_that_changes(free_room):
    model = layers()
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        already = torch.cuda.memory_reserved()
        with ebbtide.Device(0) as device:
            for size in (64, 8, 24, 7, 64):
                device.limit = already + size * MIB
                for _ in range(4):
                    assert torch.equal(model(inputs), expected)
                    assert device.stats()["held"] <= device.limit
    assert handle.stats()["resident"] >= 8 * MIB


# ---- graphs -------------------------------------------------------------------------------------


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


# ---- the handle ---------------------------------------------------------------------------------


def test_what_the_handle_says(room):
    model = layers()
    size = paged(model)
    handle = room.offload(model)
    with torch.no_grad():
        for _ in range(4):
            model(x())
    stats, residency = handle.stats(), handle.residency()
    assert stats["bytes"] == size and stats["units"] == len(residency) == 8
    assert list(residency) == [f"{i}" for i in range(8)]
    assert all(0 <= part <= 1 for part in residency.values())
    if room.how == "all":
        assert set(residency.values()) == {1.0}
        assert stats["resident"] >= size
        assert 16 <= stats["slow_entries"] <= (16 if SIMULATED else 32)
    elif room.how == "little":
        assert sum(residency.values()) < 5
        assert stats["streamed"] > 0
    assert f"of {size >> 20} MiB" in repr(handle)


def test_a_pinned_module_is_resident_before_others(free_room):
    model = layers(16)
    inputs = x()
    free_room.of = lambda model: 18 * MIB
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for part in (model[6], model[13]):
            handle.pin(part)
            for _ in range(4):
                assert torch.equal(model(inputs), expected)
    residency = handle.residency()
    assert residency["6"] == 1 and residency["13"] == 1
    assert min(residency.values()) == 0
    with pytest.raises(ValueError, match="no part"):
        handle.pin(nn.Linear(1, 1))


def test_an_excluded_module_is_left_alone(room):
    model = layers()
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = room.offload(model, 24 * MIB)
        model(inputs)
        weight = model[2][0].weight
        handle.exclude(model[2])
        for _ in range(4):
            assert torch.equal(model(inputs), expected)
    assert model[2][0].weight is weight and weight.data_ptr()
    assert type(weight) is nn.Parameter
    assert handle.stats()["bytes"] == paged(model) - MIB
    with pytest.raises(ValueError, match="no part"):
        handle.exclude(nn.Linear(1, 1))


def test_what_was_kept_on_the_gpu_is_restored_too(free_room):
    model = nn.Sequential(layers(2), nn.BatchNorm1d(WIDTH)).eval()
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    handle = free_room.offload(model)
    with torch.no_grad():
        model(x())
        assert handle.restore() is model
        assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
        model(x().cpu())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_restored_model_is_a_plain_one(room, device):
    model = layers()
    model.register_buffer("table", torch.randn(WIDTH, WIDTH))
    inputs = x()
    before = list(model.parameters())
    values = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = room.offload(model)
        for _ in range(3):
            model(inputs)
        with room.device() as card:
            card.limit = "1GiB"
    assert handle.restore(device) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(type(p) is nn.Parameter and p.device.type == device for p in before)
    assert all(torch.equal(model.state_dict()[name].cpu(), t) for name, t in values.items())
    model.cuda()
    assert torch.equal(model(inputs).detach(), expected)
    model(inputs).sum().backward()
    assert all(p.grad is not None for p in before)
    assert "forward" not in model.__dict__ and not model[0]._state_dict_hooks
    with pytest.raises(ebbtide.Gone, match="restored"):
        handle.stats()
    pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        room.offload(model, 24 * MIB)
        assert torch.equal(model(inputs), expected)


def test_what_offload_refuses(free_room):
    model = nn.Sequential(layers(2), layers(2))
    handle = free_room.offload(model)
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(model)
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(model[0])
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(model[0][1][0])
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(nn.Sequential(model, nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="handle"):
        ebbtide.offload(handle)
    for odd in (torch.zeros(2), lambda: 0, nn.Linear):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            ebbtide.offload(odd)
    for prefetch in (0, -1):
        with pytest.raises(ValueError, match="prefetch"):
            ebbtide.offload(layers(1), prefetch=prefetch)
    for prefetch in ("2", 1.5):
        with pytest.raises(TypeError, match="prefetch"):
            ebbtide.offload(layers(1), prefetch=prefetch)
    for device in (7, "cuda:7", -1):
        with pytest.raises((ValueError, RuntimeError), match=r"GPU|Device"):
            ebbtide.offload(layers(1), device)
    with pytest.raises(ValueError, match="cpu"):
        ebbtide.offload(layers(1), "cpu")
    with pytest.raises(ValueError, match=r"much"):
        ebbtide.offload(layers(1), limit="much")


def test_weights_without_values_are_refused_and_nothing_is_changed(free_room):
    with torch.device("meta"):
        bad = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(layers(2), bad)
    with pytest.raises(ValueError, match=r"1\.weight.*meta"):
        free_room.offload(model)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert type(model[0][0][0].weight) is nn.Parameter
    assert model[0][0][0].weight.device.type == "cpu"
    model[1] = nn.Linear(WIDTH, WIDTH)
    free_room.same(model, x())


@pytest.mark.parametrize("prefetch", [1, 5])
def test_less_or_more_may_be_on_its_way_at_once(room, prefetch):
    room.same(layers(), x(), prefetch=prefetch)


def test_an_order_that_is_told(room):
    model = layers()
    with pytest.raises(ValueError, match="nowhere"):
        room.offload(model, order=["0", "nowhere"])
    handle = room.same(model, x(), order=[f"{i}" for i in range(8)])
    assert list(handle.residency()) == [f"{i}" for i in range(8)]


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = layers()

    def forward(self, x):
        for part in reversed(self.parts):
            x = part(x)
        return x


def test_an_order_that_is_told_is_known_before_the_first_pass(free_room):
    model = Backwards()
    handle = free_room.offload(model, order=[f"parts.{i}" for i in reversed(range(8))])
    assert list(handle.residency()) == [f"parts.{i}" for i in reversed(range(8))]
    free_room.of = lambda model: 64 * MIB
    other = Backwards()
    assert next(iter(free_room.offload(other).residency())) == "parts.0"
    with torch.no_grad():
        model(x())


def test_little_pinned_memory(room):
    model = layers()
    room.same(model, x(), host="3MiB")


def test_the_handle_and_the_model_are_not_pickled(free_room):
    model = layers(2)
    handle = free_room.offload(model)
    for what in (model, model[0], handle):
        with pytest.raises(TypeError, match=r"pickle"):
            pickle.dumps(what)


def test_weights_of_a_tensor_subclass_stay_and_there_is_one_warning(free_room):
    class Strange(torch.Tensor):
        pass

    model = layers(4)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        for i in (1, 2):
            strange = model[i][0].weight.detach().as_subclass(Strange)
            model[i][0].weight = nn.Parameter(strange, requires_grad=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            handle = free_room.offload(model)
            for _ in range(3):
                assert torch.equal(model(inputs), expected)
    assert len([w for w in seen if "Strange" in str(w.message)]) == 1
    assert handle.stats()["bytes"] < 3 * MIB
    assert model[1][0].weight.device.type == "cuda"


def test_a_model_that_fits_has_few_units_and_more_when_it_does_not(free_room):
    model, inputs = layers(36), x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        free_room.of = lambda model: 128 * MIB
        handle = free_room.offload(model)
        for _ in range(4):
            assert torch.equal(model(inputs), expected)
        assert handle.stats()["units"] == 8
        slow = handle.stats()["slow_entries"]
        assert torch.equal(model(inputs), expected)
        assert handle.stats()["slow_entries"] == slow
        # Activations grow in the middle of a pass. The unit in use is in a page of 32 MiB.
        grown = []
        with ebbtide.Device(0) as device:
            device.limit = torch.cuda.memory_reserved() + 70 * MIB

            def grow(module, args):
                grown.append(torch.empty(36 * MIB, dtype=torch.uint8, device="cuda"))

            hook = model[17].register_forward_pre_hook(grow)
            assert torch.equal(model(inputs), expected)
            hook.remove()
            for _ in range(6):
                assert torch.equal(model(inputs), expected)
            assert handle.stats()["units"] == 36
            assert device.stats()["held"] <= device.limit
