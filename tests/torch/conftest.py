"""Tests in which PyTorch runs on two simulated cards of 1 GiB; with EBBTIDE_TEST_GPU set, on a GPU.

The cards must be there before torch is imported, so these tests have a pytest process of their own.
Every test must end without a hazard, unless it is marked: @pytest.mark.hazards. What only a
simulated card can tell is marked @pytest.mark.simulated, what needs two @pytest.mark.two_cards.
"""

import contextlib
import copy
import gc
import os
import sys
import time

import pytest

assert "torch" not in sys.modules, "these tests need a pytest process of their own"

import ebbtide.sim as sim  # noqa: E402

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")
if SIMULATED:
    sim.start(memory="1GiB", devices=2)
    sim.on_hazard("quiet")
else:
    # The libraries take memory of their own on a GPU, more than many of these tests have.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")

import torch  # noqa: E402
from offloaded import SETTLING, Seen  # noqa: E402

import ebbtide  # noqa: E402

MIB = 1 << 20


def pytest_configure(config):
    config.addinivalue_line("markers", "hazards: the test is about hazards, and makes some")
    config.addinivalue_line("markers", "simulated: only a simulated card can tell")
    config.addinivalue_line("markers", "two_cards: needs two cards")


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # to look at all that PyTorch has takes longer than most tests


def pytest_collection_modifyitems(items):
    alone = torch.cuda.device_count() < 2
    for item in items:
        if not SIMULATED and item.get_closest_marker("simulated"):
            item.add_marker(pytest.mark.skip(reason="needs the simulated GPU"))
        if alone and item.get_closest_marker("two_cards"):
            item.add_marker(pytest.mark.skip(reason="needs two cards"))


@pytest.fixture(autouse=True)
def clean(request):
    """A known seed before, and a well card without a hazard after."""
    torch.manual_seed(0)
    if not SIMULATED:
        yield
        torch.cuda.synchronize()
        return
    sim.clear_hazards()
    yield
    torch.cuda.synchronize()
    if request.node.get_closest_marker("hazards") is None:
        assert [h.text for h in sim.hazards()] == []
    assert sim.check() is None


@pytest.fixture
def hazards():
    """What has been reported since the last look, after everything has ended."""

    def look():
        torch.cuda.synchronize()
        if not SIMULATED:
            return []
        found = sim.hazards()
        sim.clear_hazards()
        return found

    return look


# ---- offload() ----------------------------------------------------------------------------------


class Room:
    """ebbtide.offload() with a limit, in words: all, half or little of a model stays resident."""

    def __init__(self, how):
        self.how = how
        self.limit = 0

    def of(self, model):
        size = sum(t.nbytes for t in {*model.parameters(), *model.buffers()})
        # 2 MiB for small activations, and a ring.
        limits = {"all": 2 * size + 192 * MIB, "half": size // 2 + 4 * MIB, "little": 7 * MIB}
        return limits[self.how]

    def offload(self, model, more=0, **options):
        gc.collect()
        torch.cuda.empty_cache()
        self.limit = torch.cuda.memory_reserved() + self.of(model) + more
        return ebbtide.offload(model, limit=self.limit, **options)

    def device(self):
        return ebbtide.Device(0)

    def held(self):
        with self.device() as device:
            return device.stats()["held"]

    def same(self, model, *inputs, passes=4, more=0, call=None, no_course="", **options):
        """Offload it. It gives what the plain model gives on the GPU, pass by pass, and ends with
        the same weights and buffers. If it streams, there are so many passes that some go by a
        course, unless `no_course` says why none does. Its handle."""
        call = call or (lambda m, *x: m(*x))
        plain = copy.deepcopy(model).cuda()
        inputs = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
        settling = 0 if self.how == "all" else SETTLING
        with torch.no_grad():
            expected = [flat(call(plain, *inputs)) for _ in range(passes + settling)]
            state = {name: t.cpu() for name, t in plain.state_dict().items()}
            del plain
            handle, seen = self.offload(model, more, **options), None
            for i, each in enumerate(expected):
                seen = Seen(model) if i == passes else seen
                got = flat(call(model, *inputs))
                assert len(got) == len(each)
                assert all(torch.equal(a, b) for a, b in zip(got, each, strict=True))
                assert self.held() <= self.limit
                if seen is not None:
                    seen.look()
        assert seen is None or seen.is_right(no_course, SIMULATED and self.how == "little")
        now = model.state_dict()
        assert list(now) == list(state)
        assert [name for name in now if not torch.equal(now[name].cpu(), state[name])] == []
        return handle


def flat(result):
    return [
        t.clone() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)
    ]


@pytest.fixture
def free_room():
    """Afterwards, nothing of any offloaded model is left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models: to divide their work takes longer
    yield Room("all")
    torch.set_num_threads(threads)
    left = {}
    for _ in range(20):
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if not ebbtide.is_attached():
            return
        with ebbtide.Device(0) as device:
            device.check()
            stats = ebbtide.memory_stats(0) or device.stats()
            names = ("vbars", "pinned", "segment_bytes")
            left = {name: stats[name] for name in names if stats.get(name)}
        if not left:
            break
        time.sleep(0.05)  # a thread of PyTorch's lets go of a backward that failed a moment later
    rest = ebbtide.detach()
    with contextlib.suppress(ebbtide.Gone):
        device.close()
    assert (left, rest) == ({}, 0)


@pytest.fixture(params=["all", "half", "little"])
def room(request, free_room):
    """At several limits."""
    free_room.how = request.param
    return free_room


@pytest.fixture(params=["all", "little"])
def either_room(request, free_room):
    """Where the model fits, and where it does not."""
    free_room.how = request.param
    return free_room


@pytest.fixture
def small_units(monkeypatch):
    """Models of a few MiB have several units."""
    monkeypatch.setattr("ebbtide._offload.units.MIB", 128 << 10)
