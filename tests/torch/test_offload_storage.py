"""offload(): weights that are referred to, tied, small, or parts of others."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, around, is_plain, square, x
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import ebbtide
from ebbtide._offload.handle import is_parked

SMALL = 64 << 10


# ---- weights that are referred to, tied, or left alone ------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_somebody_refers_to_weakly_stay_tied(room, when):
    model = around(square())
    model[1][0].weight = model[4][0].weight
    refs = [weakref.ref(p) for p in model.parameters()] if when == "before" else []
    pair = Pair(room, model)
    assert model[1][0].weight is model[4][0].weight
    refs += [weakref.ref(p) for p in model.parameters()]
    pair.handle.exclude(model[0])
    assert pair.same() and type(model[0][0].weight) is nn.Parameter
    pair.back()
    assert model[1][0].weight is model[4][0].weight and refs


@pytest.mark.parametrize("which", [1, 4])
def test_a_tied_weight_is_left_alone_in_all_its_places(room, which):
    model = around(square())
    model[1][0].weight = model[4][0].weight
    model[1][0].weight.mark = "a"
    pair = Pair(room, model)
    pair.handle.exclude(model[which])
    assert pair.same()
    weight = model[1][0].weight
    assert type(weight) is nn.Parameter and weight is model[4][0].weight and weight.mark == "a"
    assert pair.each(lambda m: m[1][0].weight.mul_(2))
    pair.back()


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.up = nn.LSTM(WIDTH, WIDTH // 8), nn.Linear(WIDTH // 8, WIDTH)

    def forward(self, h):
        self.inner.flatten_parameters()
        assert not any(is_parked(w) for w in self.inner._flat_weights)
        return self.up(self.inner(h)[0])


def test_the_list_of_a_recurrent_layer_is_its_weights(room):
    model = around(Recurs())
    inner = model[2].inner
    weights = list(inner.parameters())

    def listed():
        own = [inner._parameters[name] for name in inner._flat_weights_names]
        assert all(a is b for a, b in zip(inner._flat_weights, own, strict=True))
        return all(a() is b for a, b in zip(inner._flat_weight_refs, own, strict=True))

    pair = Pair(room, model)
    assert listed() and all(a is b for a, b in zip(weights, inner.parameters(), strict=True))
    state = {n: torch.randn_like(t) / 20 for n, t in pair.plain[2].inner.state_dict().items()}
    assert pair.each(lambda m: m[2].inner.load_state_dict(state)) and listed()
    for change in (nn.Module.half, nn.Module.float):
        assert pair.each(change) and listed()
    given = {n: p.detach() * 2 for n, p in pair.plain[2].inner.named_parameters()}
    hidden = x()
    with torch.no_grad():
        both = [functional_call(m[2].inner, given, (hidden,))[0] for m in pair.both()]
    assert torch.equal(*both)
    assert pair.same() and listed()
    deep = copy.deepcopy(inner)
    with torch.no_grad():
        assert torch.equal(deep(hidden)[0], pair.plain[2].inner(hidden)[0])
    pair.handle.exclude(model[2])
    assert pair.same() and listed() and not any(is_parked(w) for w in inner.parameters())
    pair.back()
    assert listed() and "flatten_parameters" not in inner.__dict__


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_copies_of_a_recurrent_layer(free_room, kind):
    """cuDNN asks where their weights are."""
    model, hidden = kind(WIDTH, 128), x()
    expected = copy.deepcopy(model).cuda()(hidden)[0]
    handle = free_room.offload(model)
    for made in (model, copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        for _ in range(2):
            assert torch.equal(made(hidden)[0], expected)
    second = ebbtide.offload(made)
    assert torch.equal(made(hidden)[0], expected)
    for its, part in ((second, made), (handle, model)):
        assert its.restore() is part and "forward" not in part.__dict__
        assert torch.equal(part.cuda()(hidden)[0], expected)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_part_that_was_taken_out_is_offloaded_by_itself(room, how):
    pair = Pair(room, around(nn.Sequential(square(), square())))
    with pytest.raises(ValueError, match="already"):
        ebbtide.offload(pair.model[2])
    out, plain = (model[2] for model in pair.both())
    for model in pair.both():
        if how == "replaced":
            model[2] = nn.Identity()
        else:
            del model[2]
    handle = ebbtide.offload(out)
    for _ in range(2):
        with torch.no_grad():
            assert all(torch.equal(out(pair.inputs), plain(pair.inputs)) for _ in range(3))
        assert pair.same()
    handle.restore()
    assert pair.same() and is_plain(out)
    pair.back()


# ---- weights that a module has beside the units in it, and these have, too ----------------------


class Head(nn.Module):
    """Larger than a unit, with a bias of its own."""

    def __init__(self, bias=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 32)
        self.decoder = nn.Linear(32, 20000)
        self.bias = bias

    def forward(self, h):
        h = self.decoder(torch.tanh(self.inner(h))) + self.bias
        return h[..., :WIDTH]


def heads(how):
    first, other = Head(), Head()
    first.bias = first.decoder.bias
    other.bias = {"child": other.decoder.bias, "other": first.bias}[how]
    other.bias.mark = "a"
    return nn.Sequential(square(), first, square(), other, square())


@pytest.mark.parametrize("how", ["child", "other"])
def test_a_tied_weight_of_a_span_stays_on_the_gpu_and_tied(room, how):
    pair = Pair(room, heads(how))
    model = pair.model

    def tied(m):
        first, other = m[1], m[3]
        own = other.decoder if how == "child" else first.decoder
        assert first.bias is first.decoder.bias and other.bias is own.bias
        assert first.bias.data_ptr() == first.decoder.bias.data_ptr()
        return all(type(bias) is nn.Parameter for bias in (first.bias, other.bias))

    assert tied(model) and model[1].bias.is_cuda and is_parked(model[1].decoder.weight)
    assert is_parked(model[3].decoder.bias) == (how == "other")
    assert pair.each(lambda m: m[1].bias.mul_(2))
    assert pair.each(lambda m: m[1].decoder.bias.data.add_(1))
    assert pair.each(lambda m: setattr(m[3].bias, "data", torch.ones(20000, device="cuda")))
    state = {n: t.cpu() * 2 for n, t in model.state_dict().items()}
    assert pair.each(lambda m: m.load_state_dict(state)) and tied(model)
    assert pair.each(nn.Module.half) and pair.each(nn.Module.float) and tied(model)
    pair.handle.pin(model[3])
    assert pair.same() and tied(model) and model[3].bias.mark == "a"
    deep = copy.deepcopy(model)
    assert tied(deep) and deep[1].bias is not model[1].bias
    with torch.no_grad():
        assert torch.equal(deep(pair.inputs), pair.plain(pair.inputs))
    assert pair.handle.stats()["one_by_one"] == pair.handle.stats()["read_outside"] == 0
    if room.how == "all":
        assert all(part == 1.0 for part in pair.handle.residency().values())
    # When it is the decoder's alone it pages.
    assert pair.each(lambda m: setattr(m[1], "bias", nn.Parameter(m[1].bias.detach() * 2)))
    assert is_parked(model[1].decoder.bias) == (how == "child") and not is_parked(model[1].bias)
    pair.back()
    assert model[3].bias.mark == "a"


@pytest.mark.parametrize("how", ["child", "own"])
def test_a_weight_of_a_span_that_overlaps_another_goes_on_to_do_so(room, how):
    model = around(Head())
    head = model[2]
    head.bias = one = nn.Parameter(head.decoder.bias.detach())
    other = head.decoder.bias
    if how == "own":
        head.more = other = nn.Parameter(one.detach()[1:])
        head.decoder.bias = None
    pair = Pair(room, model, no_course="there are weights beside units")
    assert head.bias is one and is_parked(one) and is_parked(other)
    for again in (False, True):
        if again:
            pair.handle.pin(head)
            assert pair.same()
        with torch.no_grad():
            one.mul_(2)
            other[7] = 3
            # The plain one's have a storage each.
            pair.plain.load_state_dict(model.state_dict())
        assert torch.equal(one[-len(other) :], other)
        assert pair.same()
    pair.back()
    assert one[-len(other) :].data_ptr() == other.data_ptr()


# ---- small weights ------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.layer, self.behind = nn.LayerNorm(WIDTH), square(), nn.LayerNorm(WIDTH)
        self.behind.weight = self.before.weight

    def forward(self, h):
        return self.behind(self.layer(self.before(h)))


def test_whatever_is_done_to_small_weights(room):
    model = nn.Sequential(*(Normed() for _ in range(6)))
    for part in model[1:]:
        part.before.bias = model[0].before.bias
    pair = Pair(room, model)
    small = [p for p in model.parameters() if p.nbytes <= SMALL]
    assert all(type(p) is nn.Parameter and p.is_cuda for p in small)
    assert model[2].behind.weight is model[2].before.weight

    def given(value):
        return torch.full((WIDTH,), value, device="cuda")

    def replace(m):
        m[2].before.weight = m[2].behind.weight = nn.Parameter(given(0.5))
        m[2].before._parameters["bias"] = nn.Parameter(given(0.25))

    assert pair.each(lambda m: m[0].before.weight.mul_(2))
    assert pair.each(lambda m: m[0].before.bias.data.add_(1))
    assert pair.each(lambda m: setattr(m[2].before.weight, "data", given(3.0)))
    assert pair.each(replace)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    assert pair.each(lambda m: m[1].before.weight.zero_())
    assert pair.each(lambda m: m.load_state_dict(state))
    on_cpu = {n: t.cpu() for n, t in state.items()}
    model.load_state_dict(on_cpu, assign=True)
    assert pair.each(lambda m: m.load_state_dict(state))
    pair.handle.exclude(model[2])
    pair.handle.pin(model[4])
    assert pair.same()
    assert pair.each(nn.Module.half) and pair.each(nn.Module.float)
    deep = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(deep(pair.inputs), pair.plain(pair.inputs))
    model[3].cpu()
    assert pair.same()
    model.cpu()
    pair.plain.cpu()
    pair.inputs = pair.inputs.cpu()
    assert pair.same() and is_plain(model)


def test_models_of_small_weights(room):
    many = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)) for _ in range(40)), square()
    )
    pair = Pair(room, many)
    assert pair.handle.stats()["bytes"] > 40 * 2 * 16 * WIDTH * 4
    pair.back()
    only = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    pair = Pair(room, only, x(64))
    assert pair.handle.stats()["bytes"] > 40 * 64 * 64 * 4
    pair.back()


def test_small_weights_that_are_rows_of_a_large_one(room):
    model = around(square())
    large = model[4][0].weight
    model[1][0].bias = nn.Parameter(large.detach()[3])
    model[0][0].bias = nn.Parameter(large.detach()[:, 3])
    pair = Pair(room, model, no_course="units share weights")
    with torch.no_grad():
        model[4][0].weight.mul_(2)
    assert torch.equal(model[1][0].bias, large[3]) and torch.equal(model[0][0].bias, large[:, 3])
    pair.plain.load_state_dict(model.state_dict())
    assert pair.same()
    pair.back()
    assert model[1][0].bias.data_ptr() == large[3].data_ptr()


# ---- parts of a storage -------------------------------------------------------------------------


def overlapping(kind, flat):
    """Two weights of one storage, of numbers of two bytes."""
    size = WIDTH * WIDTH
    if kind in ("int16", "uint8", "int64"):
        as_other = flat.view(getattr(torch, kind))
        return flat[8 : 8 + size].view(WIDTH, WIDTH), as_other[11 : 11 + as_other.numel() // 2]
    if kind == "expanded":
        return flat[8 : 8 + WIDTH].expand(WIDTH, WIDTH), flat[7:8].expand(size)
    if kind == "strided":
        return flat.as_strided((WIDTH, WIDTH), (1, 1), 8), flat[:5]
    assert kind == "beside"
    return flat[8 : 8 + size].view(WIDTH, WIDTH), flat[size + 9 : size + 18]


class Two(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = (nn.Parameter(t, requires_grad=False) for t in (one, other))

    def forward(self, h):
        h = F.linear(h.to(self.one.dtype), self.one).float()
        return (h + self.other.float().sum()).clamp(-1, 1)


KINDS = ["int16", "uint8", "int64", "expanded", "strided", "beside"]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_overlap_as_other_numbers(free_room, kind, pinned):
    flat = torch.randn(WIDTH * WIDTH + 1024).bfloat16()
    flat = flat.pin_memory() if pinned else flat
    model = around(Two(*overlapping(kind, flat)))
    free_room.how = "half"
    pair = Pair(free_room, model, more=30 * MIB)
    for name, by in (("one", 2), ("other", 0)) if kind not in ("expanded", "strided") else ():
        with torch.no_grad():
            getattr(model[2], name).mul_(by)
            # The plain one's have a storage each.
            pair.plain.load_state_dict(model.state_dict())
        assert pair.same()
    pair.back()


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_slices_of_a_mapped_file_that_are_written(room, how, tmp_path):
    values, size = torch.randn(3 * WIDTH * WIDTH) / 20, WIDTH * WIDTH
    if how == "torch":
        torch.save(values, tmp_path / "weights.pt")
        mapped = torch.load(tmp_path / "weights.pt", mmap=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({"all": values}, tmp_path / "weights.safetensors")
        mapped = safetensors.load_file(tmp_path / "weights.safetensors")["all"]
    model = around(square())
    for i, at in ((0, 0), (1, size), (4, size + size // 2)):
        model[i][0].weight = nn.Parameter(mapped[at : at + size].view(WIDTH, WIDTH))
    pair = Pair(room, model, no_course="units share weights")
    for i in (0, 1, 4):
        with torch.no_grad():
            model[i][0].weight.mul_(2)
            pair.plain.load_state_dict(model.state_dict())
        assert pair.same()
    assert torch.equal(model[4][0].weight[:3], model[1][0].weight[WIDTH // 2 :][:3])
    assert torch.equal(mapped, values)
    pair.back()


def test_a_weight_that_is_the_conjugate_of_its_memory(free_room):
    class Conjugate(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 20
            self.weight = nn.Parameter(values.conj())

        def forward(self, h):
            return F.linear(h.to(torch.cfloat), self.weight).abs()

    with pytest.warns(UserWarning, match="cannot page"):
        free_room.same(around(Conjugate()), x())
