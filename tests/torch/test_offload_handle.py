"""offload(): its arguments, and the handle."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import warnings

import pytest
import torch
from offloaded import MIB, WIDTH, inside, is_plain, layers, paged, x
from torch import nn

import ebbtide
from ebbtide._offload import layout

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


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
    for prefetch in ("2", 1.5, True):
        with pytest.raises(TypeError, match="prefetch"):
            ebbtide.offload(layers(1), prefetch=prefetch)
    for device in (7, "cuda:7", -1):
        with pytest.raises(ValueError, match=f"^device={device!r}: there is no GPU"):
            ebbtide.offload(layers(1), device)
    for device in ("gpu", "xpu"):
        with pytest.raises(ValueError, match=f"^device='{device}' is no device of PyTorch's here"):
            ebbtide.offload(layers(1), device)
    for device in (None, 1.0, True):
        with pytest.raises(TypeError, match=f"^device={device!r} is neither"):
            ebbtide.offload(layers(1), device)
    with pytest.raises(TypeError, match="order"):
        ebbtide.offload(layers(1), order="0")
    for limit in (0, 8, 8.0, 2**70):
        with pytest.raises(ValueError, match=f"^limit={limit!r} is .* bytes of VRAM"):
            ebbtide.offload(layers(1), limit=limit)
    for size in (
        -1,
        -1.0,
        1.5,
        8e9 + 0.5,
        float("inf"),
        float("nan"),
        True,
        [],
        "abc",
        "1.5.2",
        "",
    ):
        for name in ("limit", "host"):
            with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(size))} is not a size"):
                ebbtide.offload(layers(1), **{name: size})
    for meant in (8 << 30, "8GiB"):
        with pytest.raises(ValueError, match="write limit="):
            ebbtide.offload(layers(1), meant)
    for order in (5, [layers(1)]):
        with pytest.raises(TypeError, match="order"):
            ebbtide.offload(layers(1), order=order)
    with pytest.raises(TypeError, match="module"):
        handle.pin("0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
        buffers = torch.jit.script(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, affine=False)))
        relu = torch.jit.script(nn.ReLU())
    for compiled in (linear, buffers):
        with pytest.raises(TypeError, match=r"0 is.*torch\.jit"):
            ebbtide.offload(nn.Sequential(compiled))
    with pytest.raises(TypeError, match=r"the model is.*torch\.jit"):
        ebbtide.offload(relu)
    with pytest.raises(ValueError, match="lazy"):
        ebbtide.offload(nn.Sequential(nn.LazyLinear(4)))
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=f"^device='{device}'.* must be a CUDA device"):
            ebbtide.offload(layers(1), device)


@pytest.mark.parametrize("device", ["cuda:5", 5, -1, "abc", "xpu", "meta", None, 1.5, True])
def test_a_restore_to_no_device_says_so_and_does_nothing(either_room, device):
    model = layers()
    inputs, plain = x(), copy.deepcopy(model).cuda()
    handle = either_room.offload(model)
    with torch.no_grad():
        for passes in (0, 3):
            for _ in range(passes):
                assert torch.equal(model(inputs), plain(inputs))
            with pytest.raises((TypeError, ValueError), match=f"device={device!r}|meta device"):
                handle.restore(device)
            assert torch.equal(model(inputs), plain(inputs))
    assert handle.restore() is model and is_plain(model)
    assert torch.equal(model(inputs.cpu()), plain.cpu()(inputs.cpu()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_offload_that_fails_leaves_everything_as_it_was(free_room, monkeypatch, device):
    model, inputs = layers(6).to(device), torch.randn(1, WIDTH, device=device)
    before, values = list(model.parameters()), copy.deepcopy(model.state_dict())
    expected = model(inputs).detach()

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    with free_room.device() as card:
        card.limit = limit = 1 << 30
        with monkeypatch.context() as patch:
            patch.setattr(layout, "make_units", fails)
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                ebbtide.offload(model, limit="100MiB")
        assert card.limit == limit
        with pytest.raises((torch.OutOfMemoryError, ValueError)):
            ebbtide.offload(model, limit="2MiB")
        assert card.limit == limit
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(type(p) is nn.Parameter and p.device.type == device for p in before)
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())
    assert "forward" not in model.__dict__
    assert torch.equal(model(inputs).detach(), expected)
    with torch.no_grad():
        free_room.offload(model)
        assert torch.equal(model(inputs.cuda()), copy.deepcopy(model).cuda()(inputs.cuda()))


@pytest.mark.parametrize("attached", [False, True])
def test_a_model_on_the_gpu_that_is_larger_than_the_limit(attached):
    """What is over the limit are its own weights, and these move out."""
    gc.collect()
    ebbtide.detach()
    torch.cuda.empty_cache()
    with ebbtide.Device(0) as card:
        card.limit = 1 << 62
        if attached:
            ebbtide.attach()
        model, inputs = layers(64).cuda(), x()
        base = torch.cuda.memory_reserved() - 64 * MIB
        with torch.no_grad():
            expected = model(inputs)
            handle = ebbtide.offload(model, limit=base + 40 * MIB)
            for _ in range(3):
                assert torch.equal(model(inputs), expected)
        assert handle.stats()["resident"] > 10 * MIB  # at once
        assert card.stats()["held"] <= base + 40 * MIB


def test_tensors_that_are_over_the_limit_are_told_of_and_nothing_is_changed(free_room):
    model = layers(4)
    with free_room.device() as card:
        card.limit = before = 1 << 30
        held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match=r"holds \d+ MiB.*limit='32MiB'"):
            ebbtide.offload(model, limit="32MiB")
        assert card.limit == before
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
        del held
        torch.cuda.empty_cache()
        free_room.same(model, x())


@pytest.mark.parametrize("how", ["restored", "on the CPU", "deleted"])
def test_a_limit_goes_with_the_last_model(free_room, how):
    one, other = layers(6), layers(4)
    with free_room.device() as card:
        card.limit = before = torch.cuda.memory_reserved() + 300 * MIB
        free_room.of = lambda model: 40 * MIB
        first, second = free_room.offload(one), ebbtide.offload(other)
        kept = [other.forward]  # as who wraps it does
        first.restore()
        assert card.limit == free_room.limit < before
        free_room.of = lambda model: 50 * MIB
        first = free_room.offload(one)
        second.restore()
        assert card.limit == free_room.limit < before
        if how == "deleted":
            del one
        else:
            kept.append(one.forward)
            first.restore() if how == "restored" else one.cpu()
        assert card.limit == before
        assert kept and torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").numel()
        ebbtide.offload(other)
        assert card.limit == before


def test_a_limit_that_somebody_else_has_set_stays(free_room):
    model, (low, high) = layers(4), (torch.cuda.memory_reserved() + n * MIB for n in (100, 300))
    free_room.of = lambda model: 40 * MIB
    with free_room.device() as card:
        card.limit = high
        handle = free_room.offload(model)
        card.limit = low
        handle.restore()
        assert card.limit == low
        handle, again = free_room.offload(model), layers(2)
        card.limit = high
        free_room.offload(again)
        handle.restore()
        assert card.limit == free_room.limit
        again.cpu()
        assert card.limit == high  # the last one that was not offload()'s
        card.limit = low
        held = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
        free_room.of = lambda model: 120 * MIB
        handle = free_room.offload(model)
        more = torch.zeros(100 * MIB, dtype=torch.uint8, device="cuda")
        handle.restore()  # to a limit that is lower than what is held
        assert card.limit == low
        assert held.numel() + more.numel() > 100 * MIB


def test_the_limit_of_attach_comes_back():
    gc.collect()
    ebbtide.detach()
    torch.cuda.empty_cache()
    size = torch.cuda.memory_reserved() + 200 * MIB
    ebbtide.attach(limit=size)
    assert x().numel()
    handle = ebbtide.offload(layers(4), limit=size - 100 * MIB)
    with ebbtide.Device(0) as card:
        assert handle is not None and card.limit == size
        model = layers(4)
        handle = ebbtide.offload(model, limit=size - 100 * MIB)
        assert card.limit == size - 100 * MIB
        ebbtide.detach()
        handle.restore()
        assert card.limit == size
        card.limit = 1 << 62


def test_an_offload_that_fails_leaves_the_limit_of_others(free_room):
    model, other = layers(4), layers(4)
    free_room.of = lambda model: 100 * MIB
    with free_room.device() as card:
        card.limit = before = torch.cuda.memory_reserved() + 300 * MIB
        handle = free_room.offload(model)
        held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match="holds"):
            ebbtide.offload(other, limit=free_room.limit - 60 * MIB)
        assert card.limit == free_room.limit
        handle.restore()
        assert card.limit == before
        # One that more than that was in use for already.
        low = free_room.limit - 70 * MIB
        with pytest.raises(ebbtide.Busy):
            card.limit = low
        with pytest.raises(ValueError, match="holds"):
            ebbtide.offload(other, limit=free_room.limit - 60 * MIB)
        assert held.numel() and card.limit == low
        assert "forward" not in other.__dict__ and is_plain(other)
        card.limit = before


def test_bytes_are_counted_for_each_model(free_room):
    one, other = layers(6), layers(10)
    free_room.of = lambda model: 9 * MIB
    first, second = free_room.offload(one), free_room.offload(other)
    with torch.no_grad():
        for _ in range(3):
            one(x())
        told = first.stats()
        for _ in range(3):
            other(x())
    assert {key: first.stats()[key] for key in ("streamed", "filled")} == {
        key: told[key] for key in ("streamed", "filled")
    }
    assert told["streamed"] + told["filled"] >= 6 * MIB
    assert second.stats()["streamed"] + second.stats()["filled"] >= 20 * MIB


def test_all_of_a_model_can_be_pinned(free_room):
    free_room.of = lambda model: 30 * MIB
    model = layers(8)
    handle = free_room.offload(model)
    handle.pin(model)
    with torch.no_grad():
        for _ in range(3):
            model(x())
    assert inside(model).share.firm >= 8 * MIB


def test_a_handle_of_a_restored_model_says_so(free_room):
    model = layers(2)
    handle = free_room.offload(model)
    kept = model.forward  # as who wraps it does
    handle.restore()
    assert "gone" in repr(handle) and kept is not None
    for ask in (handle.stats, handle.residency, handle.prioritize, handle.restore):
        with pytest.raises(ebbtide.Gone, match="restored"):
            ask()


def test_what_keeps_a_forward_keeps_no_vram(free_room):
    model = layers(8)
    handle, before = free_room.offload(model), free_room.held()
    with torch.no_grad():
        model(x())
        model(x())
    kept = [part.forward for part in model.modules()]
    handle.restore()
    gc.collect()
    torch.cuda.empty_cache()
    with free_room.device() as card:
        card.trim()  # frames that are nobody's
    assert kept and free_room.held() <= before


@pytest.mark.two_cards
def test_a_limit_is_of_one_card():
    gc.collect()
    ebbtide.detach()
    with ebbtide.Device(0) as card:
        card.limit = 1 << 62
    ebbtide.offload(layers(2), "cuda:1", limit="64MiB")
    assert torch.zeros(200 * MIB, dtype=torch.uint8, device="cuda:0").numel()


@pytest.mark.two_cards
def test_a_limit_goes_with_the_last_model_of_its_card(free_room):
    models, handles = (layers(2), layers(2)), []
    with ebbtide.Device(0) as first, ebbtide.Device(1) as second:
        for card in (first, second):
            card.limit = 1 << 30
            handles.append(ebbtide.offload(models[card.index], card.index, limit="400MiB"))
        handles[1].restore()
        assert (first.limit, second.limit) == (400 * MIB, 1 << 30)
        handles[0].restore()
        assert first.limit == 1 << 30


def test_a_model_for_which_there_is_no_room_is_not_restored(free_room):
    free_room.of = lambda model: 12 * MIB
    model, inputs = layers(16), x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for _ in range(3):
            model(inputs)
        with pytest.raises(torch.OutOfMemoryError):
            handle.restore("cuda")
        torch.cuda.empty_cache()
        assert torch.equal(model(inputs), expected)
        handle.exclude(model)
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs)
        assert handle.restore() is model
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
        with free_room.device() as card:
            card.limit = 1 << 30
        assert torch.equal(model.cuda()(inputs), expected)


def test_a_model_that_runs_is_not_restored(room):
    model, inputs = layers(6), x()
    handle = room.offload(model)
    model[3].register_forward_pre_hook(lambda *_: handle.restore())
    for _ in range(3):
        with pytest.raises(ebbtide.Busy, match="running"), torch.no_grad():
            model(inputs)


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


class Gelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Sigmoid())

    def forward(self, h):
        return h * self.gate(1.7 * h)


@pytest.mark.parametrize("nested", [False, True])
def test_modules_of_torch_jit_without_weights(room, nested):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Gelu())
        traced = torch.jit.trace(nn.GELU(), torch.zeros(2))
    parts = [nn.Linear(WIDTH, WIDTH), scripted, nn.Linear(WIDTH, WIDTH), traced]
    model = nn.Sequential(layers(4), nn.Sequential(*parts) if nested else scripted, *parts)
    children, state, inputs = dict(scripted.named_modules()), list(model.state_dict()), x()
    handle = room.same(model, inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(inputs)
        assert torch.equal(other(inputs), expected)
        room.offload(other, 24 * MIB)
        assert torch.equal(other(inputs), expected)
    handle.restore()
    assert list(model.state_dict()) == state and is_plain(model[0])
    assert dict(scripted.named_modules()) == children
    assert type(scripted._modules).__module__.startswith("torch.jit")
    with torch.no_grad():
        del other
        assert torch.equal(model.cuda()(inputs), expected)


def test_the_handle_and_the_model_are_not_pickled(free_room):
    model = layers(2)
    handle = free_room.offload(model)
    for what in (model, model[0], handle):
        with pytest.raises(TypeError, match=r"cannot be pickled: save its state_dict\(\)"):
            pickle.dumps(what)
    # A copy of what has a handle is none of its business.
    for made in (copy.copy(handle), copy.deepcopy({"model": handle})["model"]):
        assert made.stats() == handle.stats()


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
