"""offload(): what programs do with weights themselves: exchange them, look at them in other ways,
write through several views at once, copy them. As with a plain model, to the bit."""

from __future__ import annotations

import pytest
import torch
from offloaded import WIDTH, Pair, around, layers, x
from torch import nn


def equal(p, q):
    """Values and all that says where they are."""
    assert (p.shape, p.stride(), p.dtype, p.device) == (q.shape, q.stride(), q.dtype, q.device)
    return torch.equal(p.detach().cpu(), q.detach().cpu())


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
    pair = Pair(either_room, around(Halves()))
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
    "two results": lambda p: torch.aminmax(
        p[1:, 1:].clone(), dim=1, out=(p[0, 1:], p[1:, :-1].diagonal())
    ),
    "nothing": lambda p: torch._foreach_add_([p[:0], p[3:3], p[2]], 1),
}


@pytest.mark.parametrize("how", TOGETHER)
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
        column, row = p[:, 0], p[0]
        least, most = torch.aminmax(p[:, 1:].clone(), dim=1, out=(column, row))
        assert least is column and most is row
    assert pair.same()


def test_what_changes_the_size_raises(free_room):
    pair = Pair(free_room, layers(3))
    p = pair.model[1][0].weight
    with pytest.raises(RuntimeError, match="keeps its size"):
        p.detach().resize_(3)
    with pytest.raises(RuntimeError, match="keeps its size"):
        torch.add(x()[0, :3], 1, out=p.detach())
    assert p.shape == (WIDTH, WIDTH) and pair.same()
