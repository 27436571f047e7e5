"""Tensors that operators have seen before: whatever has become of them, it is noticed."""

import gc

import pytest
import torch

from ebbtide import _sim, sim
from ebbtide.sim.operators import memory

pytestmark = pytest.mark.simulated


def numbers(n, device="cuda", dtype=torch.float32):
    return torch.arange(n).to(dtype).to(device)


def seen(tensor):
    """An operator has read and written it, twice: from here on it is known."""
    tensor.add_(0)
    tensor.add_(0)
    return tensor


def test_this_pytorch_is_known():
    assert memory.recognises


# ---- changed in place ----------------------------------------------------------------------------


def grow(x):
    """Storage of its own, in which there is room for more."""
    x.untyped_storage().resize_(4 * x.untyped_storage().nbytes())
    x.set_(x.untyped_storage(), 0, (48,), (1,)).zero_()


CHANGES = {
    "set_ to another": lambda x: x.set_(numbers(24, x.device) * 3),
    "set_ to nothing, and back": lambda x: x.set_().resize_(2).fill_(7),
    "another offset": lambda x: x.set_(x.untyped_storage(), 3, (5,), (1,)),
    "other sizes": lambda x: x.resize_(4, 3),
    "other strides": lambda x: x.as_strided_((6, 4), (1, 6)),
    "another order": lambda x: x.resize_(6, 4).t_(),
    "a dimension more": lambda x: x.unsqueeze_(0),
    "six dimensions": lambda x: x.as_strided_((2, 1, 3, 1, 2, 2), (12, 12, 4, 4, 2, 1)),
    "grown": lambda x: x.resize_(3000).fill_(2),
    "grown storage": grow,
    "data": lambda x: setattr(x, "data", numbers(24, x.device) + 0.5),
    "data of another dtype": lambda x: setattr(x, "data", numbers(12, x.device, torch.float64)),
    "data of a view": lambda x: setattr(x, "data", numbers(48, x.device)[::2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_in_place_is_noticed(change):
    both = []
    for device in ("cpu", "cuda"):
        x = numbers(24, device)
        others = x[:], x.view(4, 6)  # keep its memory, and see what it was
        for t in (x, *others):
            seen(t)
        change(x)
        x.add_(1)
        x.mul_(x)
        both.append([t.cpu() for t in (x, *others, x + x)])
    for host, device in zip(*both, strict=True):
        assert torch.equal(host, device)


def test_tensors_change_places():
    x, y = seen(numbers(24)), seen(numbers(9) + 100)
    torch.utils.swap_tensors(x, y)
    assert (x + 1).tolist() == [n + 101 for n in range(9)]
    assert (y + 1).tolist() == [n + 1 for n in range(24)]


def test_the_storages_memory_is_another():
    x = numbers(24)
    seen(x)
    kept = x.untyped_storage().data_ptr()
    x.untyped_storage().resize_(0)
    filler = torch.full((24,), 5.0, device="cuda")  # takes the place that was left
    assert filler.data_ptr() == kept
    x.untyped_storage().resize_(96)
    assert x.data_ptr() != kept
    x.fill_(3)
    assert filler.tolist() == [5] * 24
    assert x.tolist() == [3] * 24


def test_memory_that_is_not_pytorchs():
    """Nothing but the address, or the size, tells the storages apart."""
    memory = numbers(24)
    at = torch._C._construct_storage_from_data_pointer
    low, high, more = (
        at(memory.data_ptr() + offset, memory.device, size)
        for offset, size in ((0, 32), (32, 32), (32, 64))
    )
    x = seen(torch.empty(0, device="cuda").set_(low, 0, (8,), (1,)))
    seen(x.set_(high, 0, (8,), (1,)))
    assert (x + 1).tolist() == [n + 9 for n in range(8)]
    x.set_(more, 0, (8,), (1,))
    assert _sim.reach(x, _sim.Ranges(), 1).untyped_storage().nbytes() == 64


def test_more_dimensions_than_lie_in_the_tensor():
    x, y = (numbers(24, d).view(2, 2, 3, 1, 2, 1).transpose_(0, 4) for d in ("cuda", "cpu"))
    seen(x)
    x.transpose_(1, 4)
    y.transpose_(1, 4)
    assert torch.equal((x + 1).cpu(), y + 1)


def test_memory_that_is_shared_until_somebody_writes():
    x = seen(numbers(24))
    address = x.data_ptr()
    lazy = torch._lazy_clone(x)
    assert torch._C._data_address(lazy) == address
    x.add_(1)
    assert x.data_ptr() != address or lazy.data_ptr() != address
    assert torch.equal(lazy.cpu(), torch.arange(24.0))
    assert torch.equal(x.cpu(), torch.arange(24.0) + 1)


@pytest.mark.two_cards
def test_a_tensor_that_went_to_another_card():
    x, y = seen(numbers(8)), seen(numbers(8))
    x.data = numbers(8, "cuda:1")
    for call in (lambda: x + y, lambda: torch._foreach_add_([y, x], 1.0)):
        with pytest.raises(RuntimeError, match="on the same device"):
            call()
    x += 1
    assert (x * 2).device == torch.device("cuda", 1)
    assert x.tolist() == [n + 1 for n in range(8)]


# ---- another in its place ------------------------------------------------------------------------


def makers(base):
    """Functions that make one tensor, over the same memory: another in one thing each."""
    table, integers = base.view(4, 6), base.view(torch.int32)
    pairs = base.view(torch.complex64).view(4, 3)
    return [
        lambda: base.view(4, 6),
        lambda: base.view(6, 4),
        lambda: base.as_strided((4, 6), (1, 4)),
        lambda: base.as_strided((4, 5), (6, 1)),
        lambda: base.as_strided((4, 5), (6, 1), 1),
        lambda: integers.view(4, 6),
        lambda: torch._neg_view(table),
        lambda: pairs.view(4, 3),
        lambda: pairs.conj(),
    ]


def used(tensor):
    """By operators that are given conjugates as they are, and others."""
    return torch.cat([(tensor * 2).flatten(), torch.mm(tensor, tensor.t()).flatten()])


def test_an_object_becomes_another_tensor():
    made = makers(numbers(24))
    expected = [used(make()) for make in makers(numbers(24, "cpu"))]
    for first in made:
        for second, wanted in zip(made, expected, strict=True):
            tensor = first()
            used(tensor)
            place = tensor._cdata
            tensor.data = second()
            assert tensor._cdata == place
            assert torch.equal(used(tensor).cpu(), wanted)


def test_a_tensor_in_the_place_of_one_that_is_gone():
    made = makers(numbers(24))
    expected = [used(make()) for make in makers(numbers(24, "cpu"))]
    same = 0
    for first in made:
        for second, wanted in zip(made, expected, strict=True):
            gone = first()
            place = gone._cdata
            used(gone)
            stock = [first() for _ in range(16)]  # takes what else is free, and only then
            del gone
            tensor = second()
            same += tensor._cdata == place
            assert torch.equal(used(tensor).cpu(), wanted)
            del stock
    assert same, "the test needs an object that is used again"


def test_nothing_is_kept_alive():
    gc.collect()
    before = torch.cuda.memory_allocated()
    x = [seen(torch.ones(1 << 18, device="cuda")) for _ in range(8)]
    torch._foreach_add_(x, 1.0)
    assert torch.cuda.memory_allocated() == before + (8 << 20)
    gone = torch.multiprocessing.reductions.StorageWeakRef(x[0].untyped_storage())
    del x
    assert torch.cuda.memory_allocated() == before
    assert gone.expired()


def test_an_alias_that_is_forgotten_is_not_given_again():
    x = seen(numbers(8))
    alias = _sim.reach(x, _sim.Ranges(), 1)
    assert _sim.reach(x, _sim.Ranges(), 1) is alias
    memory.forget()
    assert _sim.reach(x, _sim.Ranges(), 1) is not alias


# ---- lists ---------------------------------------------------------------------------------------


def test_the_members_of_a_list_change():
    tensors = [numbers(16) for _ in range(20)]
    wanted = [numbers(16, "cpu") for _ in range(20)]

    def step(n):
        torch._foreach_add_(tensors, float(n))
        torch._foreach_add_(wanted, float(n))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, wanted, strict=True))

    step(1)
    step(2)
    old = tensors[3]
    tensors[3], wanted[3] = numbers(7), numbers(7, "cpu")
    step(3)
    assert old.tolist() == [n + 3 for n in range(16)]  # not touched any more
    tensors.reverse()
    wanted.reverse()
    step(4)
    del tensors[5:], wanted[5:]
    step(5)
    tensors[0].set_(tensors[1])
    wanted[0].set_(wanted[1])
    step(6)


@pytest.mark.parametrize("lr", [0.1, "tensor"])
def test_fused_optimizers(lr):
    """As on the CPU to the bit, also with gradients that are others in each step."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        results = []
        for device in ("cpu", "cuda"):
            made = torch.Generator().manual_seed(3)
            rate = torch.tensor(0.1, device=device) if lr == "tensor" else lr
            parameters = [torch.randn(n, generator=made).to(device) for n in range(1, 21)]
            parameters = [p.requires_grad_() for p in parameters]
            optimizer = kind(parameters, lr=rate, fused=True, weight_decay=0.1)
            for _ in range(4):
                for p in parameters:
                    p.grad = torch.randn(p.shape, generator=made).to(device)
                optimizer.step()
            results.append([p.detach().cpu() for p in parameters])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.hazards
def test_what_is_seen_again_is_still_told(hazards):
    tensors = [seen(numbers(16)) for _ in range(20)]
    side = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize()
        torch._foreach_add_(tensors, 1.0)
        with torch.cuda.stream(side):
            torch._foreach_add_(tensors[19:], 1.0)  # does not wait for the others
        assert {h.kind for h in hazards()} == {sim.Kind.RACE}
