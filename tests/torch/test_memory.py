"""PyTorch's own allocator, devices and random numbers on simulated cards."""

import gc

import pytest
import torch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def test_out_of_memory_is_pytorchs_own_and_goes_by():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    kept = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    assert torch.empty(600 * MIB, dtype=torch.uint8, device="cuda").numel() == 600 * MIB


def test_memory_is_counted_as_on_a_gpu():
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 30 * MIB
    assert torch.cuda.mem_get_info() == (free - 30 * MIB, total)
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.mem_get_info()[0] == free - 30 * MIB  # cached
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (free, total)


def test_devices_that_do_not_match_raise_as_on_a_gpu():
    a, b = torch.ones(10, device="cuda:0"), torch.ones(10, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"^Expected all tensors to be on the same device"):
        a + b
    with pytest.raises(RuntimeError, match=r"^Expected all tensors to be on the same device"):
        a + torch.ones(10)
    assert (a + torch.tensor(1.0)).sum().item() == 20  # a number may come from anywhere
    assert a[torch.tensor([1, 2])].tolist() == [1, 1]  # and so may indices


def test_copies_between_devices():
    x = torch.randn(6, 4)
    a = x.to("cuda:0")
    assert torch.equal(a.to("cuda:1").cpu(), x)
    assert torch.equal(a.t().to("cuda:1", torch.float16).cpu(), x.t().half())
    b = torch.zeros(4, 6, device="cuda:1").t()
    b.copy_(a)
    assert torch.equal(b.cpu(), x)


def test_operators_run_on_their_tensors_device():
    with torch.cuda.device(0):
        x = torch.ones(1000, device="cuda:1") * 2
        assert (x @ x).item() == 4000


def test_random_numbers_follow_the_generators_state():
    torch.manual_seed(1)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    there = torch.rand(3, device="cuda:1")
    assert torch.equal(there.cpu(), first.cpu())  # each device has its own
    own = torch.Generator("cuda").manual_seed(7)
    drawn = torch.randn(3, device="cuda", generator=own)
    assert torch.equal(torch.randn(3, device="cuda", generator=own.manual_seed(7)), drawn)
    # An out= of another size runs twice, and draws once more.
    small = torch.empty(2, device="cuda")
    torch.randn(3, generator=own, out=small)
    assert small.shape == (3,)


def test_snapshots_and_statistics():
    torch.cuda.memory._record_memory_history()
    x = torch.ones(10, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert any(s["address"] <= x.data_ptr() for s in snapshot["segments"])
    assert torch.cuda.memory_stats()["allocation.all.current"] > 0
