"""attach(): PyTorch's own allocator over Ebbtide's memory, and pressure that works."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
import ebbtide.sim as sim

MIB = 1 << 20


@pytest.fixture
def attached():
    """Attach with a limit; afterwards nothing of it is left."""
    gc.collect()
    torch.cuda.empty_cache()
    opened = []

    def attach(limit=256 * MIB, **options):
        # What other tests have left of PyTorch's counts too, and so does a segment for small
        # tensors: that is not what these tests are about.
        already = torch.cuda.memory_reserved() + 2 * MIB
        ebbtide.attach(limit=limit + already, headroom=0, **options)
        opened.append(ebbtide.Device(0))
        return opened[-1]

    yield attach
    with contextlib.suppress(ebbtide.Gone):  # closed by the test
        for device in opened:
            device.check()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for device in opened:
        device.close()
    assert ebbtide.detach() == 0
    assert not ebbtide.is_attached()


class Weights:
    """Weights of 32 MiB in a VBAR, each with values of its own."""

    def __init__(self, device, count, size=32 * MIB, **options):
        self.vbar = ebbtide.VBAR(device, count * size, **options)
        self.hosts = [torch.full((size // 4,), float(i)).pin_memory() for i in range(count)]
        self.weights = [self.vbar.alloc(size) for _ in range(count)]

    def use(self):
        """How many were resident, all values checked."""
        resident = 0
        for w, host in zip(self.weights, self.hosts, strict=True):
            with w.resident(host) as t:
                resident += w.pins
                assert t[0].item() == host[0].item() and t[-1].item() == host[-1].item()
        return resident


def driver_use():
    """What has been taken of the card, as the driver counts."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_pytorch_s_segments_are_ours(attached):
    device = attached()
    x = torch.ones(3 * MIB, device="cuda")
    y = torch.ones(5 * MIB, device="cuda")
    stats = ebbtide.memory_stats()
    assert stats["segment_bytes"] == 32 * MIB
    assert stats["segment_bytes"] + stats["before"] == torch.cuda.memory_reserved() == stats["held"]
    assert float(x.sum() + y.sum()) == 8 * MIB
    del x, y
    torch.cuda.empty_cache()
    assert ebbtide.memory_stats()["segments"] == 0
    assert device.trim() + ebbtide.memory_stats()["parked_bytes"] <= 34 * MIB


def test_weights_give_way_to_activations_and_come_back(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 8)
    assert weights.use() == 8
    x = torch.ones(24 * MIB, device="cuda")  # 96 MiB
    assert weights.vbar.loaded_size == 160 * MIB
    assert weights.vbar.residency() == bytes([1] * 5 + [0] * 3)  # from the top down
    assert float(x.sum()) == 24 * MIB
    assert weights.use() >= 4  # the temporary of the others is an activation, too
    del x
    torch.cuda.empty_cache()
    weights.vbar.prioritize()
    assert weights.use() == 8


def test_a_pinned_weight_is_never_taken(attached):
    device = attached(136 * MIB)
    weights = Weights(device, 4)
    w, host = weights.weights[3], weights.hosts[3]
    with w.resident(host) as t:
        x = torch.zeros(24 * MIB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(24 * MIB, device="cuda")
        assert w.pins == 1
        del x
        assert bool((t == 3).all())


def test_when_nothing_can_give_way_it_is_pytorchs_own_error_and_the_process_goes_on(attached):
    attached(64 * MIB)
    before = torch.cuda.memory_stats()["num_ooms"]
    x = torch.ones(8 * MIB, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 64\.00 MiB"):
        torch.empty(16 * MIB, device="cuda")
    y = torch.ones(4 * MIB, device="cuda")
    assert float(x.sum() + y.sum()) == 12 * MIB
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_is_hard_whatever_the_order(attached, seed):
    device = attached(256 * MIB)
    limit = device.limit
    weights = Weights(device, 6)
    dice = random.Random(seed)
    tensors: list[torch.Tensor] = []
    before = driver_use()
    for _ in range(60):
        size = dice.randrange(1, 96) * MIB
        try:
            tensors.append(torch.full((size // 4,), float(size), device="cuda"))
            if dice.random() < 0.5:
                weights.use()
        except torch.OutOfMemoryError:
            tensors.clear()
        if dice.random() < 0.1:
            weights.vbar.prioritize()
        if dice.random() < 0.4 and tensors:
            tensors.pop(dice.randrange(len(tensors)))
        if dice.random() < 0.1:
            torch.cuda.empty_cache()
        assert device.stats()["held"] <= limit
        assert driver_use() - before <= limit
        for tensor in tensors:
            assert tensor[-1].item() == tensor.nbytes
    device.check()


def test_memory_freed_under_running_work_is_not_taken_before_it_is_over(attached):
    attached(128 * MIB)
    x = torch.empty(16 * MIB, device="cuda")
    torch.cuda._sleep(1_000_000_000)
    x.fill_(1)
    del x
    torch.cuda.empty_cache()
    assert ebbtide.memory_stats()["parked"] == 1
    # Needs the same frames: it waits for that work, and for nothing else.
    y = torch.empty(24 * MIB, device="cuda")
    y.fill_(2)
    assert float(y[0]) == 2
    assert ebbtide.memory_stats()["waits"] >= 1


@pytest.mark.simulated
def test_the_context_is_never_synchronised_and_nothing_is_freed_the_old_way(attached):
    device = attached(128 * MIB)
    before = sim.calls("cuCtxSynchronize"), sim.calls("cuMemFree"), sim.calls("cuMemAlloc")
    weights = Weights(device, 4)
    for _ in range(3):
        weights.use()
        x = torch.zeros(12 * MIB, device="cuda")
        del x
        torch.cuda.empty_cache()
    after = sim.calls("cuCtxSynchronize"), sim.calls("cuMemFree"), sim.calls("cuMemAlloc")
    assert after == before


def test_a_lower_limit_takes_back_what_can_go_and_the_rest_as_it_is_freed(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 4)
    weights.use()
    x = torch.ones(16 * MIB, device="cuda")
    before = ebbtide.memory_stats()["before"]
    with pytest.raises(ebbtide.Busy):
        device.limit = 32 * MIB + before
    assert device.limit == 32 * MIB + before
    assert weights.vbar.loaded_size == 0
    assert device.stats()["held"] == 64 * MIB + before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MIB, device="cuda")
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    y = torch.ones(4 * MIB, device="cuda")
    assert device.stats()["held"] <= 32 * MIB + before
    assert float(y.sum()) == 4 * MIB


def test_segments_from_before_keep_working_and_count(attached):
    already = torch.cuda.memory_reserved()
    x = torch.ones(16 * MIB, device="cuda")
    device = attached(64 * MIB)
    assert ebbtide.memory_stats()["before"] == torch.cuda.memory_reserved() == 64 * MIB + already
    assert device.stats()["held"] == 64 * MIB + already
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(24 * MIB, device="cuda")
    assert float(x.sum()) == 16 * MIB
    del x
    torch.cuda.empty_cache()
    assert ebbtide.memory_stats()["before"] == already
    y = torch.ones(24 * MIB, device="cuda")
    assert float(y.sum()) == 24 * MIB


# ---- what PyTorch caches and does not use -------------------------------------------------------


def test_left_overs_are_asked_back_before_weights_are_taken(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 4)
    weights.use()
    for size in (40, 44, 48):  # each too small for the next: PyTorch caches them all
        torch.empty(size * MIB // 4, device="cuda")
    assert torch.cuda.memory_reserved() >= 44 * MIB
    torch.empty(100 * MIB // 4, device="cuda")
    assert weights.vbar.loaded_size == 128 * MIB
    assert ebbtide.memory_stats()["refusals"] >= 1


def test_a_steady_loop_is_not_flushed_after_it_has_warmed_up(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 6)
    sizes = (24, 40, 56)

    def step():
        weights.use()
        tensors = [torch.empty(size * MIB // 4, device="cuda") for size in sizes]
        assert len(tensors) == 3

    for _ in range(24):
        step()
    refusals = ebbtide.memory_stats()["refusals"]
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(10):
        step()
    assert ebbtide.memory_stats()["refusals"] == refusals
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated


def test_a_weight_that_would_be_offloaded_gets_unused_segments_back(attached):
    device = attached(256 * MIB)
    x = torch.empty(40 * MIB, device="cuda")
    del x  # 160 MiB cached, unused
    weights = Weights(device, 8)
    assert weights.use() == 8
    assert torch.cuda.memory_reserved() < 160 * MIB


def test_nothing_is_refused_in_a_pool(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 6)
    weights.use()
    torch.empty(15 * MIB, device="cuda")  # cached, unused
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(20 * MIB, device="cuda")
    assert float(x.sum()) == 20 * MIB
    assert weights.vbar.loaded_size < 192 * MIB
    del x, pool


# ---- what must keep working ---------------------------------------------------------------------


def test_graphs_captured_before_and_after_evictions(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 6)
    weights.use()
    static = torch.ones(2 * MIB, device="cuda")

    def capture():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static * 2 + 1
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static * 2 + 1
        return graph, result

    first, of_first = capture()
    x = torch.zeros(30 * MIB, device="cuda")
    assert weights.vbar.loaded_size < 192 * MIB
    second, of_second = capture()
    static.fill_(3)
    first.replay()
    second.replay()
    assert float(of_first[0]) == float(of_second[-1]) == 7
    del x


def test_an_allocation_inside_a_capture_takes_weights_and_refuses_nothing(attached):
    device = attached(128 * MIB)
    weights = Weights(device, 3)
    weights.use()
    static = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        large = static.repeat(12 * 1024) * 2  # 48 MiB twice
    graph.replay()
    assert float(large[0]) == 2 and float(large[-1]) == 2
    assert weights.vbar.loaded_size < 96 * MIB
    del graph, large


def test_training_is_the_same_to_the_bit(attached):
    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            x = torch.randn(32, 256, device="cuda")
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    plain = train()
    attached(64 * MIB)
    assert all(torch.equal(a, b) for a, b in zip(plain, train(), strict=True))


def test_statistics_snapshots_and_record_stream(attached):
    attached(256 * MIB)
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(8 * MIB, device="cuda")
    assert torch.cuda.memory_allocated() >= 32 * MIB
    assert 32 * MIB in [s["total_size"] for s in torch.cuda.memory_snapshot()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        y = x * 2
    x.record_stream(side)
    del x
    z = torch.zeros(8 * MIB, device="cuda")
    torch.cuda.default_stream().wait_stream(side)
    assert float(y[0]) == 2 and float(z[0]) == 0
    assert torch.cuda.max_memory_allocated() >= 64 * MIB


def test_threads_and_streams_at_once(attached):
    device = attached(256 * MIB)
    weights = Weights(device, 4)
    wrong: list[BaseException] = []

    def work(seed):
        dice = random.Random(seed)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(15):
                    size = dice.randrange(1, 12) * MIB
                    x = torch.full((size,), float(seed), dtype=torch.uint8, device="cuda")
                    assert int(x[-1]) == seed
                    w = dice.randrange(4)
                    with weights.weights[w].resident(weights.hosts[w]) as t:
                        assert float(t[5]) == w
                    if dice.random() < 0.2:
                        torch.cuda.empty_cache()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.two_cards
def test_the_second_device_has_a_limit_of_its_own(attached):
    attached(64 * MIB)
    x = torch.ones(8 * MIB, device="cuda:1")
    y = torch.ones(8 * MIB, device="cuda:0")
    assert ebbtide.memory_stats(0)["segment_bytes"] == 32 * MIB
    assert ebbtide.memory_stats(1)["segment_bytes"] == 32 * MIB
    assert torch.equal(x.to("cuda:0"), y)
    assert torch.equal(y.to("cuda:1"), x)


@pytest.mark.two_cards
def test_only_the_given_devices(attached):
    attached(64 * MIB, devices=[0])
    x = torch.ones(24 * MIB, device="cuda:1")
    assert ebbtide.memory_stats(1) == {}
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(24 * MIB, device="cuda:0")
    del x


# ---- the door itself ----------------------------------------------------------------------------


def test_attaching_twice_is_refused_and_detaching_twice_is_harmless(attached):
    attached()
    with pytest.raises(ebbtide.Busy, match="attached already"):
        ebbtide.attach()
    torch.cuda.empty_cache()


def test_what_lives_when_it_is_detached_stays_valid(attached):
    attached(128 * MIB).close()
    x = torch.ones(8 * MIB, device="cuda")
    assert ebbtide.detach() == 32 * MIB
    assert not ebbtide.is_attached()
    y = torch.ones(40 * MIB, device="cuda")  # no limit of ours any more
    assert float(x.sum() + y.sum()) == 48 * MIB
    del x, y
    torch.cuda.empty_cache()
    ebbtide.attach(limit=64 * MIB + torch.cuda.memory_reserved(), headroom=0)
    z = torch.ones(8 * MIB, device="cuda")
    assert ebbtide.memory_stats()["segment_bytes"] == 32 * MIB
    del z


def test_attaching_again_over_segments_that_live_sets_the_new_limit(attached):
    attached(128 * MIB).close()
    x = torch.ones(8 * MIB, device="cuda")
    assert ebbtide.detach() == 32 * MIB
    already = torch.cuda.memory_reserved() - 32 * MIB
    ebbtide.attach(limit=48 * MIB + already, headroom=0)
    assert ebbtide.memory_stats()["limit"] == 48 * MIB + already
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(16 * MIB, device="cuda")
    del x


def run(folder, program, *options, **environment):
    script = folder / "program.py"
    script.write_text(program)
    words = [sys.executable, str(script)]
    if not os.environ.get("EBBTIDE_TEST_GPU"):
        words[1:1] = ["-m", "ebbtide", "run", "--sim", "1GiB", *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("EBBTIDE_SIM")}
    return subprocess.run(
        words, env={**env, **environment}, capture_output=True, text=True, timeout=120
    )


def test_forked_workers_and_their_parent(tmp_path):
    # A process of its own: PyTorch's thread that pins sets the number of threads for all.
    program = """
import torch, ebbtide
from torch.utils.data import DataLoader, TensorDataset
ebbtide.attach(limit="128MiB", headroom=0)
x = torch.ones(4 << 20, device="cuda")
loader = DataLoader(TensorDataset(torch.arange(32.0)), 8, num_workers=2, pin_memory=True)
print(sum(float(batch[0].to("cuda", non_blocking=True).sum()) for batch in loader))
print(float(x.sum()) == 4 << 20)
"""
    done = run(tmp_path, program)
    assert (done.returncode, done.stdout.split()) == (0, ["496.0", "True"]), done.stderr


@pytest.mark.simulated
def test_a_soak_and_the_limit_as_in_the_benchmark(tmp_path):
    bench = Path(__file__).parents[2] / "bench" / "attach.py"
    program = f"""
import runpy, sys
parts = ["limit", "flush", "soak"]
sys.argv = ["attach.py", "--small", "--seconds", "3", "--json"]
sys.argv += [word for part in parts for word in ("--part", part)]
runpy.run_path({str(bench)!r}, run_name="__main__")
from ebbtide import sim
assert sim.hazards() == []
"""
    done = run(tmp_path, program, "--sim", "2GiB")
    assert done.returncode == 0, done.stderr
    found = {line["metric"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    assert found["limit_exceeded"] == found["soak_bytes_unaccounted_for"] == 0
    assert found["flush_steady_segments_after_warm_up"] == 0
    assert found["flush_fragmented_weights_kept"] == 100
    assert found["limit_refills_verified"] > 10


def test_before_cuda_has_started(tmp_path):
    program = """
import torch, ebbtide
ebbtide.attach(limit="64MiB", headroom=0)
assert not torch.cuda.is_initialized()
x = torch.ones(8 << 20, device="cuda")
assert ebbtide.memory_stats()["segment_bytes"] == 32 << 20
try:
    torch.empty(16 << 20, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    done = run(tmp_path, program)
    assert (done.returncode, done.stdout.strip()) == (0, "out of memory"), done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_an_explanation(tmp_path, name):
    program = "import ebbtide; ebbtide.attach()"
    done = run(tmp_path, program, **{name: "expandable_segments:True"})
    assert done.returncode == 1
    assert "leave it out of PYTORCH_CUDA_ALLOC_CONF" in done.stderr.splitlines()[-1]


def test_the_first_segment_of_all_may_be_a_pools(tmp_path):
    program = """
import torch, ebbtide
ebbtide.attach(limit="256MiB", headroom=0)
torch.cuda.init()
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    x = torch.ones(1 << 20, device="cuda")
# The pool is closed again: PyTorch is asked, before weights are taken.
device = ebbtide.Device(0)
vbar = ebbtide.VBAR(device, "128MiB")
weights = [vbar.alloc(32 << 20) for _ in range(4)]
for w in weights:
    assert w.fault()
    w.unpin()
torch.empty(15 << 20, device="cuda")
torch.empty(20 << 20, device="cuda")
print(ebbtide.memory_stats()["refusals"], vbar.loaded_size >> 20)
"""
    done = run(tmp_path, program)
    assert (done.returncode, done.stdout.strip()) == (0, "1 128"), done.stderr


@pytest.mark.two_cards
def test_a_gpu_first_used_while_another_captures(tmp_path):
    program = """
import torch, ebbtide
ebbtide.attach(limit="128MiB", headroom=0)
static = torch.ones(1024, device="cuda:0")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="relaxed"):
    result = static * 2
    other = torch.empty(16 << 20, device="cuda:1")
graph.replay()
assert float(result[5]) == 2
del other
torch.cuda.empty_cache()
# Once the capture is over, freed memory can be told from memory in use: it is used again.
other = torch.ones(20 << 20, device="cuda:1")
print(float(other[-1]), ebbtide.memory_stats(1)["segment_bytes"] >> 20)
"""
    done = run(tmp_path, program, "--devices", "2")
    assert (done.returncode, done.stdout.strip()) == (0, "1.0 80"), done.stderr


COPIES = """
import ctypes, torch, ebbtide, ebbtide.sim as sim

sim.on_hazard("quiet")
ebbtide.attach(limit="256MiB", headroom=0)
count = 4 << 20
a = torch.arange(count, device="cuda:0", dtype=torch.float32)
b = torch.zeros(count, device="cuda:1")
b.copy_(a)
c = b.to("cuda:0")  # and back
d = torch.zeros(2048, 2048, device="cuda:1")
d.copy_(a.view(2048, 2048).t())
e = b[1000:900000].to("cuda:0", non_blocking=True)
vbar = ebbtide.VBAR(ebbtide.Device(0), "32MiB")
w, host = vbar.alloc(4 * count), a.cpu().pin_memory()
with w.resident(host) as t:
    f = t.to("cuda:1")
host = a.cpu()
assert torch.equal(b.cpu(), host) and torch.equal(c.cpu(), host) and torch.equal(f.cpu(), host)
assert torch.equal(d.cpu(), host.view(2048, 2048).t())
assert torch.equal(e.cpu(), host[1000:900000])
for i in range(2):
    torch.cuda.synchronize(i)
assert [h.text for h in sim.hazards()] == []
assert ebbtide.memory_stats(0)["segments"] and ebbtide.memory_stats(1)["segments"]


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def access(tensor, device):
    flags = ctypes.c_ulonglong()
    at = ctypes.c_uint64(tensor.data_ptr())
    get = ctypes.CDLL("libcuda.so.1").cuMemGetAccess
    assert get(ctypes.byref(flags), ctypes.byref(Location(1, device)), at) == 0
    return flags.value


print([access(tensor, device) for tensor in (a, b) for device in range(2)])
"""


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("card", "access"), [("a100", "[3, 3, 3, 3]"), ("rtx4090", "[3, 0, 0, 3]")]
)
def test_copies_between_gpus_with_and_without_peer_access(tmp_path, card, access):
    done = run(tmp_path, COPIES, "--devices", "2", "--card", card)
    assert (done.returncode, done.stdout.strip()) == (0, access), done.stderr


ASYNC = """
import torch, ebbtide
MIB = 1 << 20
if %r:
    torch.zeros(1, device="cuda")
ebbtide.attach(limit="256MiB", headroom=0)
device = ebbtide.Device(0)
vbar = ebbtide.VBAR(device, 6 * 32 * MIB)
weights = [vbar.alloc(32 * MIB) for _ in range(6)]
hosts = [torch.full((8 * MIB,), float(i)).pin_memory() for i in range(6)]


def use():
    resident = 0
    for w, host in zip(weights, hosts):
        with w.resident(host) as t:
            resident += w.pins
            assert t[-1].item() == host[0].item()
    return resident


def held():
    stats = ebbtide.memory_stats()
    assert stats["held"] <= stats["limit"] and stats["segments"] == 0
    return stats["before"]


assert use() == 6
x = torch.ones(24 * MIB, device="cuda")
assert vbar.loaded_size <= 160 * MIB and held() >= 96 * MIB
kept = vbar.loaded_size
try:
    torch.empty(64 * MIB, device="cuda")
    raise AssertionError("that is more than the limit")
except torch.OutOfMemoryError:
    assert vbar.loaded_size == kept  # nobody lost anything for it
assert float(x.sum()) == 24 * MIB
del x
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert held() <= 32 * MIB
vbar.prioritize()
assert use() == 6
# A full card, whatever the limit.
device.limit = "1TiB"
y = torch.ones((torch.cuda.mem_get_info()[0] + 64 * MIB) // 4, device="cuda")
assert vbar.loaded_size <= 128 * MIB and float(y[-1] + y[0]) == 2
del y
torch.cuda.synchronize()
torch.cuda.empty_cache()
device.check()
device.close()
vbar.close()
assert ebbtide.detach() == 0
z = torch.ones(80 * MIB, device="cuda")
print(int(z[-1]))
"""


@pytest.mark.parametrize("late", [False, True])
def test_with_cuda_malloc_async_weights_give_way_too(tmp_path, late):
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = run(tmp_path, ASYNC % late, **setting)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.simulated
def test_a_driver_that_cannot_fence_freed_memory_is_refused(tmp_path):
    program = """
import ctypes, ebbtide, ebbtide.sim as sim, torch
ctypes.CDLL(str(sim.library())).ebbsim_driver_version(12040)
try:
    ebbtide.attach()
except ebbtide.Error as error:
    print(error, ebbtide.is_attached())
"""
    done = run(tmp_path, program)
    assert "CUDA 12.4" in done.stdout and done.stdout.strip().endswith("False"), done.stderr
