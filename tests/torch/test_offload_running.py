"""offload(): passes that fail, gradients, limits."""

from __future__ import annotations

import contextlib
import copy
import os

import pytest
import torch
from offloaded import MIB, WIDTH, Boom, at_rest, inside, layers, square, x
from torch import nn

import ebbtide

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


# ---- passes that fail ---------------------------------------------------------------------------


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


def test_a_pass_is_over_also_if_its_last_unit_cannot_be_left(room, monkeypatch):
    model, inputs = layers(6), x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        room.offload(model)
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
        ours = inside(model)
        ours.begin()
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="boom"):
            patch.setattr(ours, "_leave_run", lambda: {}["boom"])
            ours.end()
        assert ours.running.depth == 0
        assert torch.equal(model(inputs), expected) and at_rest(model)


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


class Chooses(nn.Module):
    """An adapter that is not selected, an expert that is not chosen."""

    def __init__(self):
        super().__init__()
        self.used, self.other, self.chosen = square(), square(), False

    def forward(self, h):
        return self.other(self.used(h)) if self.chosen else self.used(h)


def test_a_result_wants_a_gradient_if_the_plain_models_does(room):
    """Not if there is only somebody in its unit who does: attention, then, computes otherwise."""
    attention = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)
    model = nn.Sequential(*(Chooses() for _ in range(40)), attention).eval()
    model.requires_grad_(False)
    model[3].other.requires_grad_(True)
    plain, inputs = copy.deepcopy(model).cuda(), torch.randn(2, 9, WIDTH, device="cuda")
    room.offload(model, 20 * MIB)
    for chosen in (False, True, False):
        model[3].chosen = plain[3].chosen = chosen
        for _ in range(4):
            expected, got = plain(inputs), model(inputs)
            assert got.requires_grad == expected.requires_grad == chosen
            assert torch.equal(got, expected)
    model[3].chosen = True
    with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
        model(inputs).sum().backward()


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH, requires_grad=True))

    def forward(self, h):
        return h @ self.table


def test_backward_raises_where_a_buffer_wants_a_gradient(room):
    model = nn.Sequential(*layers(4).requires_grad_(False), Holds())
    room.offload(model)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"offload.*no_grad"):
            model(x()).sum().backward()


def test_what_is_added_and_planned_in_inference_mode_is_no_inference_tensor(room):
    model = layers(6)
    room.offload(model)
    for added in (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)):
        model.append(nn.Sequential(added))
        with torch.inference_mode():
            for _ in range(3):
                model(x())
        assert not any(p.is_inference() for p in model.parameters())
    model.requires_grad_(False).requires_grad_(True)
    for p in model.parameters():
        torch.nn.init.ones_(p)


def jacobian(model, inputs):
    return torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))


OTHERS = {
    "func.grad": lambda m, h: torch.func.grad(lambda h: m(h).sum())(h),
    "of weights": lambda m, h: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, (h,)).sum()
    )(dict(m.named_parameters())),
    "func.jacrev": lambda m, h: torch.func.jacrev(m)(h),
    "through func.jvp": lambda m, h: jacobian(m, h)[1].sum().backward(),
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_ways_to_a_gradient_raise_and_the_model_goes_on(either_room, how):
    model, inputs = layers(8), x()
    plain = copy.deepcopy(model).cuda()
    either_room.offload(model, 4 * MIB, prefetch=2)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(20):
                assert torch.equal(model(inputs), plain(inputs))
        with pytest.raises(RuntimeError):  # PyTorch's own words
            OTHERS[how](model, inputs)
        assert at_rest(model)
        assert all(p.grad is None for p in model.parameters())
    # Nothing has to be kept for this one, which is computed on the way.
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            assert all(map(torch.equal, jacobian(model, inputs), jacobian(plain, inputs)))


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


MODES = {
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_many_passes_give_the_same_in_every_mode(room, mode):
    def call(model, h):
        with MODES[mode]():
            return model(h)

    seen = "Python sees to what autograd keeps" if mode == "grad" else ""
    part = nn.TransformerEncoderLayer(WIDTH, 4, 1024, dropout=0.0, batch_first=True)
    room.same(
        nn.Sequential(*layers(6), part, *layers(6)), x(), more=8 * MIB, call=call, no_course=seen
    )


# ---- limits -------------------------------------------------------------------------------------


def casting(on=True):
    return torch.autocast("cuda", torch.bfloat16) if on else contextlib.nullcontext()


@torch.no_grad()
@pytest.mark.parametrize("own", [False, True])
def test_autocast(room, own):
    """It keeps what it makes of weights: of one that streams, there is no room for that."""

    class Casts(nn.Sequential):
        def forward(self, h):
            with casting(own):
                return super().forward(h)

    model, inputs = Casts(*layers(32)), x()
    plain = copy.deepcopy(model).cuda()
    with casting():
        expected = plain(inputs)
    del plain
    handle = room.offload(model)
    for _ in range(2):
        with casting(not own):
            for _ in range(4):
                assert torch.equal(model(inputs), expected)
                assert torch.is_autocast_cache_enabled()
        assert room.held() <= room.limit
    stats = handle.stats()
    assert (stats["streamed"] > 0) == (room.how != "all") and stats["one_by_one"] == 0


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


def test_out_of_memory_where_a_resident_unit_lies_on_more_pages_than_it_fills(free_room):
    blocks = [nn.Sequential(*(square() for _ in range(8)), Grows(0)) for _ in range(25)]
    model, grows = nn.Sequential(*blocks), blocks[12][-1]
    inputs = x()
    free_room.of = lambda model: 220 * MIB
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for _ in range(4):
            assert torch.equal(model(inputs), expected)
        assert handle.stats()["resident"] >= 200 * MIB  # all there is
        grows.size = 52 * MIB  # in floats: leaves 12 MiB, for a unit of 8
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs)
        assert at_rest(model)
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
            assert free_room.held() <= free_room.limit
        grows.size = 0
        for _ in range(60):
            assert torch.equal(model(inputs), expected)
        assert handle.stats()["resident"] >= 200 * MIB


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
