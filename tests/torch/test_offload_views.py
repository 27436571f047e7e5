"""offload(): weights that programs look at in other ways, and write through that: conjugates,
negatives, views in place, several views at once. As with a plain model, to the bit."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from offloaded import MIB, WIDTH, Complex, Pair, around, equal, layers, x
from torch import nn

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


# ---- other ways to look at it -------------------------------------------------------------------


CONJUGATES = {
    "conj": lambda p: p.conj(),
    "mH": lambda p: p.mH,
    "H": lambda p: p.H,
    "of a part": lambda p: p[3:9].conj(),
    "adjoint": lambda p: p.adjoint()[2],
    "conj twice": lambda p: p.conj().conj(),
    "negative": lambda p: torch._neg_view(p),
    "of a conjugate": lambda p: p.conj().imag,
    "imag": lambda p: p.imag,
    "as real": lambda p: torch.view_as_real(p),
}


@pytest.mark.parametrize("how", CONJUGATES)
@pytest.mark.parametrize("grad", [False, True])
def test_conjugates_of_a_weight(free_room, how, grad):
    pair = Pair(free_room, around(Complex()))
    with torch.set_grad_enabled(grad):
        a, b = (CONJUGATES[how](model[2].weight) for model in pair.both())
        assert torch.equal((a + 0).resolve_conj(), (b + 0).resolve_conj())
        assert torch.equal(a.cpu().resolve_conj(), b.cpu().resolve_conj())
        assert torch.equal(a.clone().resolve_conj(), b.clone().resolve_conj())
    assert pair.same()


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "add_": lambda t: t.add_(torch.ones_like(t) / 8),
    "copy_": lambda t: t.copy_(torch.arange(t.numel(), device="cuda").view(t.shape) / 1e5),
    "from another": lambda t: t.copy_(t.roll(1, 0)),
    "fill_": lambda t: t.fill_(0.5),
    "zero_": lambda t: t.zero_(),
    "a part": lambda t: t[1].sub_(0.25),
    "set": lambda t: t.__setitem__(0, 0.125),
    "data": lambda t: t.data.mul_(3),
    "out": lambda t: torch.mul(t, 2, out=t),
}


@torch.no_grad()
@pytest.mark.parametrize("how", CONJUGATES)
def test_what_is_written_to_a_conjugate_is_written_to_the_weight(free_room, how):
    pair = Pair(free_room, around(Complex()))
    for write in WRITES.values():
        before = pair.plain[2].weight.clone()
        for model in pair.both():
            write(CONJUGATES[how](model[2].weight))
        assert pair.same() and not torch.equal(pair.plain[2].weight, before)
    pair.back()


@torch.no_grad()
def test_a_weight_that_is_the_conjugate_of_another(free_room):
    """It is put into a module, copied, exchanged, and given back."""
    pair = Pair(free_room, nn.Sequential(*around(Complex()), *around(Complex())))
    ways = [
        lambda first, second: setattr(second, "weight", nn.Parameter(first.weight.conj())),
        lambda first, second: setattr(second.weight, "data", first.weight.conj()),
        lambda first, second: second.weight.copy_(first.weight.conj() * 2),
        lambda first, second: setattr(
            second, "weight", nn.Parameter(copy.deepcopy(first.weight.conj()))
        ),
        lambda first, second: setattr(second.weight, "data", torch._neg_view(first.weight)),
    ]
    for way in ways:
        for model in pair.both():
            model[2].weight.mul_(0.5)
            way(model[2], model[7])
        assert pair.same()
        pair.each(lambda model: model[2].weight.conj().add_(0.01))
        pair.each(lambda model: model[7].weight.mul_(2))
        assert torch.equal(*(m[7].weight.detach().cpu() for m in pair.both()))
        copied = copy.deepcopy(pair.model)
        assert torch.equal(copied(pair.inputs), pair.plain(pair.inputs))
    pair.back()


class Turning(Complex):
    def forward(self, h):
        result = super().forward(h)
        self.weight = nn.Parameter(self.weight.conj(), requires_grad=False)
        return result


@torch.no_grad()
def test_a_forward_that_puts_a_conjugate_in_the_place_of_its_weight(free_room):
    pair = Pair(free_room, around(Complex()))
    part = Turning()
    for model in pair.both():
        model[2] = copy.deepcopy(part).cuda()
    for _ in range(5):
        results = [model(pair.inputs) for model in pair.both()]
        assert torch.equal(*results)
        assert torch.equal(*(m[2].weight.cpu().resolve_conj() for m in pair.both()))


IN_PLACE = {
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.unsqueeze_(1).squeeze_(1),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "swapdims_": lambda t: t.swapdims_(0, 1),
    "as_strided_": lambda t: t.as_strided_((3, 5), (7, 2), 11),
    "of a part": lambda t: t[4:9].t_(),
    "detach_": lambda t: t.detach_(),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_views_in_place(free_room, how):
    pair = Pair(free_room, layers(3))
    made = []
    for model in pair.both():
        t = model[1][0].weight.detach()
        result = IN_PLACE[how](t)
        made.append((t, result))
        with torch.no_grad():
            result.mul_(2)
    (t, result), (u, expected) = made
    assert equal(t, u) and equal(result, expected)
    assert (result is t) == (expected is u)
    assert pair.same()


@torch.no_grad()
def test_a_weight_that_is_transposed_in_place(either_room):
    pair = Pair(either_room, layers(5))
    for model in pair.both():
        model[3][0].weight.t_()
        model[1][0].weight.data.t_()  # of another tensor
    assert equal(pair.model[3][0].weight, pair.plain[3][0].weight)
    assert pair.same()


def test_a_view_in_place_beyond_its_memory_raises(free_room):
    pair = Pair(free_room, layers(3))
    p = pair.model[1][0].weight
    with pytest.raises(RuntimeError, match="out of bounds"):
        p.detach().as_strided_((WIDTH, WIDTH + 1), (WIDTH, 1))
    assert p.shape == (WIDTH, WIDTH) and pair.same()


# ---- one operator, several views ----------------------------------------------------------------


class Halves(nn.Module):
    """Two weights whose rows take turns in one memory."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(WIDTH, 2 * WIDTH) / 20
        self.left = nn.Parameter(whole[:, :WIDTH])
        self.right = nn.Parameter(whole[:, WIDTH:])

    def forward(self, h):
        return h @ self.left @ self.right


def halves(model):
    return [model[2].left, model[2].right]


def same_halves(pair):
    both = zip(halves(pair.model), halves(pair.plain), strict=True)
    return all(torch.equal(p.detach(), q.detach()) for p, q in both) and pair.same()


@torch.no_grad()
def test_an_operator_that_writes_two_weights_of_one_memory(either_room):
    pair = Pair(either_room, around(Halves()), more=24 * MIB)
    for model in pair.both():
        torch._foreach_add_(halves(model), 1)
    assert same_halves(pair)


def test_an_optimizer_that_writes_two_weights_of_one_memory(free_room):
    pair = Pair(free_room, around(Halves()))
    for model in pair.both():
        for p in halves(model):
            p.grad = torch.ones_like(p)
        torch.optim.SGD(halves(model), lr=0.1, foreach=True).step()
        model.zero_grad()
    assert same_halves(pair)


TOGETHER = {
    "side by side": lambda p: torch._foreach_add_([p[:9], p[9:]], 1),
    "twice": lambda p: torch._foreach_add_([p, p], 1),
    "one in the other": lambda p: torch._foreach_add_([p, p[3:9]], 1),
    "across": lambda p: torch._foreach_mul_([p[:, 3:9], p[2:7]], 2),
    "columns": lambda p: torch._foreach_zero_([p[:, ::2], p[:, 1::2]]),
    "transposed": lambda p: torch._foreach_add_([p, p.t()], 1),
    "of another dtype": lambda p: torch._foreach_zero_([p[1:3].view(torch.float64), p[2, 3:]]),
    "read and written": lambda p: torch.add(p[:, : WIDTH // 2], 1, out=p[:, WIDTH // 2 :]),
    "all read, a part written": lambda p: p[3].add_(p.sum(0)),
    "two results": lambda p: torch.aminmax(p[1:, 1:].clone(), dim=1, out=(p[0, 1:], p[1, 1:])),
    "nothing": lambda p: torch._foreach_add_([p[:0], p[3:3], p[2]], 1),
}


# On a GPU, one kernel writes them all: which comes first where they overlap, nobody knows.
OVERLAP = {"twice", "one in the other", "across", "transposed", "of another dtype"}


@pytest.mark.parametrize("how", [h for h in TOGETHER if SIMULATED or h not in OVERLAP])
@torch.no_grad()
def test_an_operator_that_writes_several_views(free_room, how):
    pair = Pair(free_room, layers(3))
    for model in pair.both():
        TOGETHER[how](model[1][0].weight)
    assert equal(pair.model[1][0].weight, pair.plain[1][0].weight)
    assert pair.same()


@torch.no_grad()
def test_what_an_operator_gives_back_is_what_it_was_given(free_room):
    pair = Pair(free_room, layers(3))
    for model in pair.both():
        p = model[1][0].weight
        part, across = p[:1], p.t()
        assert p.add_(1) is p and part.mul_(2) is part and across.mul_(2) is across
        assert torch.add(part, p[:1], out=part) is part
        first, second = p[0], p[1]
        least, most = torch.aminmax(p[:, 1:].clone(), dim=1, out=(first, second))
        assert least is first and most is second
    assert pair.same()


@pytest.mark.filterwarnings("ignore:An output")
def test_what_changes_the_size_raises(free_room):
    pair = Pair(free_room, layers(3))
    p = pair.model[1][0].weight
    with pytest.raises(RuntimeError, match="keeps its size"):
        p.detach().resize_(3)
    with pytest.raises(RuntimeError, match="keeps its size"):
        torch.add(x()[0, :3], 1, out=p.detach())
    assert p.shape == (WIDTH, WIDTH) and pair.same()
