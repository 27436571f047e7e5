"""Several cards: which of them a process sees, and what goes between them."""

import os
import subprocess
import sys

import pytest
import torch
from torch.cuda import comm

# UUIDs end in the card's number.
LOOK = """
import torch
devices = range(torch.cuda.device_count())
places = [torch.cuda.get_device_properties(i).uuid.bytes[15] for i in devices]
if places:
    x = torch.ones(1 << 20, device=f"cuda:{len(places) - 1}")
    free, total = torch.cuda.mem_get_info(len(places) - 1)
    assert x.sum().item() == 1 << 20 and free < total
print(places, torch._C._cuda_getDeviceCount())
"""
UUID = "GPU-65626274-6964-652d-7369-6d2d677075"  # "ebbtide-sim-gpu"


@pytest.mark.parametrize(
    ("visible", "places"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("", []),
        ("7", []),
        ("0,9,1", [0]),
        ("1,-1,0", [1]),
        ("0,0", []),
        (UUID + "01", [1]),
        (f"{UUID}01,{UUID}00", [1, 0]),
        ("GPU-ffff", []),
    ],
)
def test_cuda_visible_devices(visible, places):
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == f"{places} {len(places)}", done.stderr


def test_devices_are_chosen_when_cuda_starts_and_not_before():
    program = """
import os, torch
before = torch.cuda.device_count()
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
x = torch.zeros(1, device="cuda")
print(before, torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid.bytes[15])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["2", "1", "1"], done.stderr


def test_no_time_lies_between_two_devices_events():
    events = []
    for device in (0, 1):
        with torch.cuda.device(device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            events.append(event)
    with pytest.raises(RuntimeError):
        events[0].elapsed_time(events[1])


def test_broadcasts_and_sums_need_no_nccl():
    x = torch.randn(4, 4, device="cuda:0")
    ours, theirs = comm.broadcast(x, (0, 1))
    assert ours.data_ptr() == x.data_ptr() and theirs.get_device() == 1
    assert torch.equal(theirs.cpu(), x.cpu())
    into = [torch.empty_like(x), torch.empty_like(x, device="cuda:1")]
    comm.broadcast(x, out=into)
    assert all(torch.equal(t.cpu(), x.cpu()) for t in into)
    with pytest.raises(RuntimeError, match="output tensor at index 1"):
        comm.broadcast(x, out=[into[0], x.cpu()])
    several = [x, torch.arange(3, device="cuda:0"), torch.eye(3, device="cuda:0").to_sparse()]
    here, there = comm.broadcast_coalesced(several, (0, 1))
    assert here[0] is x and all(t.get_device() == 1 for t in there)
    assert torch.equal(there[2].to_dense().cpu(), torch.eye(3))
    assert torch.equal(comm.reduce_add((x, theirs)).cpu(), x.cpu() * 2)


def test_data_parallel_trains_on_two_cards():
    model = torch.nn.Linear(8, 2).cuda()
    x = torch.randn(6, 8, device="cuda")
    model(x).pow(2).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    torch.nn.DataParallel(model, device_ids=[0, 1])(x).pow(2).sum().backward()
    assert torch.allclose(model.weight.grad, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.arange(10, device="cuda")[torch.tensor([11], device="cuda")],
        lambda: torch.zeros(3, device="cuda").index_select(0, torch.tensor([3], device="cuda")),
        lambda: torch.zeros(3, device="cuda").gather(0, torch.tensor([-4], device="cuda")),
        lambda: torch.multinomial(torch.tensor([1.0, -1.0], device="cuda"), 1),
        lambda: torch.nn.functional.nll_loss(
            torch.zeros(1, 3, device="cuda"), torch.tensor([5], device="cuda")
        ),
    ],
)
def test_wrong_data_is_a_device_assertion(function):
    with pytest.raises(RuntimeError, match="device-side assert triggered\naten::") as caught:
        function()
    assert caught.value.error_code == 710
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_wrong_dimensions_are_errors_of_the_call():
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.zeros(3, device="cuda").gather(2, torch.zeros(1, dtype=torch.long, device="cuda"))
