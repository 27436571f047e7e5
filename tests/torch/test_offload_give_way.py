"""offload(): the ring gives way to tensors, in the middle of a pass, and is whole again later."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

MIB = 1 << 20
WIDTH = 2048
UNIT = 4 * WIDTH * WIDTH  # 16 MiB
COUNT = 10


class Block(nn.Module):
    """One unit. Its forward can need more than usual, which changes nothing of its result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.more = []  # bytes of tensors
        self.kept = None  # where they stay

    def forward(self, h):
        tensors = [torch.full((size,), 7, dtype=torch.int8, device="cuda") for size in self.more]
        h = torch.tanh(h @ self.weight)
        if self.kept is not None:
            self.kept += tensors
        for tensor in tensors:
            h = h + (tensor[-1] - tensor[0])
        return h


class Tight:
    """A model of which nothing stays resident, with a ring of two units."""

    def __init__(self, room, more=0, prefetch=2, **options):
        self.room, self.x = room, torch.randn(1, WIDTH, device="cuda")
        self.model = nn.Sequential(*(Block() for _ in range(COUNT)))
        with torch.no_grad():
            self.expected = copy.deepcopy(self.model).cuda()(self.x)
        room.of = lambda model: 4 * MIB + 2 * UNIT + more  # 4: for small activations
        # A ring of two units, whatever a pass takes.
        self.handle = room.offload(self.model, prefetch=prefetch, **options)
        for block in self.model:
            block.register_forward_hook(self.within_the_limit)

    def within_the_limit(self, module, args, result):
        assert self.room.held() <= self.room.limit

    def run(self, passes=1):
        with torch.no_grad():
            for _ in range(passes):
                assert torch.equal(self.model(self.x), self.expected)
                assert self.room.held() <= self.room.limit
        assert all(u.depth == 0 and u.bare == 0 for u in self.model.forward.model.units)

    def until_whole(self):
        """When PyTorch has given back what it caches, which is later if it was in vain before."""
        gc.collect()
        for _ in range(60):
            self.run()
            if self.whole():
                break
        self.run(2)
        return self.whole()

    def whole(self):
        stats = self.handle.stats()
        assert stats["largest_unit"] == UNIT
        assert stats["ring"] == self.moved("ring")
        return stats["ring"] >= 2 * UNIT and stats["resident"] == 0

    def moved(self, what):
        return self.model.forward.model.mover.stats()[what]

    def given_up(self):
        return self.moved("given_up")


def test_the_ring_is_two_whole_units(free_room):
    tight = Tight(free_room)
    tight.run(4)
    before = tight.handle.stats()
    assert tight.whole()
    tight.run(4)
    after = tight.handle.stats()
    assert tight.whole() and tight.given_up() == 0
    assert after["one_by_one"] == 0
    assert after["streamed"] - before["streamed"] == 4 * COUNT * UNIT


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("where", [0, 4, COUNT - 1])
@pytest.mark.parametrize("sizes", [[UNIT * 3 // 4], [2 * MIB] * 4])
def test_tensors_that_grow_in_the_middle_take_from_the_ring(free_room, sizes, where, kept):
    tight = Tight(free_room)
    tight.run(4)
    assert tight.whole()
    block = tight.model[where]
    block.more = sizes
    block.kept = [] if kept else None
    tight.run()
    assert tight.given_up()
    assert all(bool((t == 7).all()) for t in block.kept or ())
    block.more, block.kept = [], None
    assert tight.until_whole()
    assert tight.handle.stats()["one_by_one"] == 0


def test_it_happens_again(free_room):
    tight = Tight(free_room)
    tight.run(4)
    for where in (4, 0):
        given = tight.given_up()
        tight.model[where].more = [UNIT]
        tight.run()
        assert tight.given_up() > given
        tight.model[where].more = []
        assert tight.until_whole()
    assert tight.handle.stats()["one_by_one"] == 0


def test_what_is_gone_before_the_pass_is_over_has_been_needed(free_room):
    tight = Tight(free_room)
    tight.run(4)
    tight.model[4].more = [UNIT * 3 // 4]
    hook = tight.model[5].register_forward_hook(lambda *_: torch.cuda.empty_cache())
    tight.run()
    given = tight.given_up()
    assert given and not tight.whole()
    tight.run()
    assert tight.given_up() == given
    tight.model[4].more = []
    hook.remove()
    assert tight.until_whole()


def test_tensors_that_stay_large_take_from_the_ring_once(free_room):
    tight = Tight(free_room)
    tight.run(4)
    tight.model[4].more = [UNIT * 3 // 4]
    tight.run(4)
    given = tight.given_up()
    assert given
    tight.run(8)
    assert tight.given_up() == given  # it was made smaller, beforehand
    assert UNIT <= tight.handle.stats()["ring"] < 2 * UNIT
    assert tight.handle.stats()["one_by_one"] == 0


def test_too_much_is_pytorch_s_own_error_and_costs_nothing(free_room):
    tight = Tight(free_room)
    tight.run(4)
    tight.model[4].more = [3 * UNIT]
    with pytest.raises(torch.OutOfMemoryError):
        tight.run()
    assert tight.given_up() == 0
    tight.model[4].more = []
    tight.run(2)


def test_weights_come_one_by_one_if_no_unit_is_left_in_the_ring(free_room):
    tight = Tight(free_room)
    tight.run(4)
    kept = tight.model[3].kept = []
    tight.model[3].more = [UNIT // 2, UNIT // 2, UNIT // 4]
    tight.run()
    assert tight.given_up() and kept
    tight.model[3].more, tight.model[3].kept = [], None
    kept.clear()
    assert tight.until_whole()


def test_two_threads_and_a_ring_that_comes_and_goes(free_room):
    tight = Tight(free_room, more=UNIT, prefetch=3)
    tight.run(3)
    failures = []
    over = threading.Event()

    def grow():
        try:
            while not over.is_set():
                tensor = torch.full((UNIT * 3 // 4,), 7, dtype=torch.int8, device="cuda")
                assert int(tensor[-1]) == 7
                del tensor
                torch.cuda.empty_cache()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        tight.run(12)
    finally:
        over.set()
        thread.join()
    assert failures == []
    assert tight.given_up()


def test_one_result_less_is_kept(free_room):
    """Of what PyTorch gives back most is taken again, at once: the rest is the ring's."""
    need = 12 * MIB  # a segment of its own
    tight = Tight(free_room, more=3 * need)
    last = tight.model[-1]
    last.more = [need] * 3  # in every pass
    tight.run(4)
    assert tight.whole() and tight.given_up() == 0
    for _ in range(3):
        last.more = [need] * 4
        tight.run(6)
        assert not tight.whole()
        last.more = [need] * 3
        assert tight.until_whole()
        given = tight.given_up()
        tight.run(35)
        assert tight.whole() and tight.given_up() == given


class Blocks(nn.Module):
    """One unit of several weights, which can need more than usual behind each of them."""

    def __init__(self, count):
        super().__init__()
        width = WIDTH // 2
        self.weights = nn.ParameterList(
            torch.randn(width, width) / width**0.5 for _ in range(count)
        )
        self.more = 0

    def forward(self, h):
        for weight in self.weights:
            h = torch.tanh(h @ weight)
            torch.empty(self.more, dtype=torch.int8, device="cuda")
        return h


def test_a_unit_across_the_end_of_the_ring(free_room):
    model = nn.Sequential(*(Blocks(3 if i == 3 else 4) for i in range(11)))  # of 4 MiB each
    inputs = torch.randn(1, WIDTH // 2, device="cuda")
    free_room.of = lambda model: 4 * MIB + 2 * UNIT
    failed = 0
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        free_room.offload(model)
        for block in model:
            for _ in range(12):
                assert torch.equal(model(inputs), expected)
            block.more = 2 * MIB
            try:
                assert torch.equal(model(inputs), expected)
            except torch.OutOfMemoryError:
                failed += 1
            block.more = 0
            torch.cuda.empty_cache()
    assert failed == 0


class Pieces(nn.Module):
    """A unit of weights that are no square matrices."""

    def __init__(self, *columns):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH // 2, n) for n in columns)
        self.where = []  # where they were, at the last time

    def forward(self, h):
        self.where = [weight.data_ptr() for weight in self.weights]
        for weight in self.weights:
            h = h + (h @ weight).mean() / WIDTH
        return h


@pytest.mark.parametrize("odd", [[768] * 5, [3072]])  # 5 of 3 MiB, one of 12 MiB
@pytest.mark.parametrize("nth", range(3))
def test_a_ring_that_is_in_pieces_is_put_together(free_room, odd, nth):
    """A tensor that stays takes the middle of the ring, while a unit lies across its end: what is
    left is enough for a unit, but not where it is."""
    columns = [[1024] * 4 for _ in range(8)]  # 16 MiB each
    columns[2], columns[5] = [1024] * 3, odd
    model = nn.Sequential(*(Pieces(*each) for each in columns))
    inputs = torch.randn(1, WIDTH // 2, device="cuda")
    free_room.of = lambda model: 4 * MIB + 2 * UNIT
    kept = []

    def take(module, args, result):
        nonlocal nth
        if not kept and max(module.where) - min(module.where) > UNIT:
            nth -= 1
            if nth < 0:
                kept.append(torch.empty(18 * MIB, dtype=torch.int8, device="cuda"))

    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = free_room.offload(model)
        for _ in range(4):
            assert torch.equal(model(inputs), expected)
        hooks = [model[i].register_forward_hook(take) for i in range(8) if i not in (2, 5)]
        for _ in range(12):
            assert torch.equal(model(inputs), expected)
            if kept:
                break
        assert kept
        for hook in hooks:
            hook.remove()
        for _ in range(12):
            assert torch.equal(model(inputs), expected)
    stats = model.forward.model.mover.stats()
    assert stats["pieces"] == 1 and stats["ring"] == stats["end"] - stats["address"]
    assert handle.stats()["one_by_one"] == 0
