"""Real PyTorch on the runtime's face alone: its own allocator, copies, streams, events, errors.

No operators are redirected here (that is ebbtide.sim.start's business), so what launches a kernel
fails, and says so. Each test is a process of its own, with the faces preloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ebbtide import sim

torch = pytest.importorskip("torch")
if torch.version.cuda is None:
    pytest.skip("this PyTorch was built without CUDA", allow_module_level=True)


@pytest.fixture
def on_faces():
    """Run a piece of Python; its output, without hazards and with a zero exit code."""
    faces = sim.library().with_name("faces")
    major = torch.version.cuda.split(".")[0]
    preload = [
        faces / major / f"libcudart.so.{major}",
        faces / "driver" / "libcuda.so.1",
        faces / "driver" / "libnvidia-ml.so.1",
    ]

    def run(code: str, cards: str = "memory=2GiB", **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={
                **os.environ,
                "LD_PRELOAD": " ".join(map(str, preload)),
                "EBBTIDE_SIM": cards,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "race:" not in done.stderr
        assert "unfinished work:" not in done.stderr
        return done.stdout

    return run


def test_pytorch_believes_in_a_gpu(on_faces):
    on_faces("""
        import torch
        assert torch.cuda.device_count() == 1
        assert not torch.cuda.is_initialized()
        assert torch.cuda.is_available()
        p = torch.cuda.get_device_properties(0)
        assert p.name == "Ebbtide simulated GPU" and p.total_memory == 2 << 30
        assert (p.major, p.minor) == (9, 0) and p.multi_processor_count == 132
        assert p.warp_size == 32 and p.max_threads_per_multi_processor == 2048
        free, total = torch.cuda.mem_get_info()
        assert total == 2 << 30 and free < total
        x = torch.empty(1000, 1000, device="cuda")
        assert torch.cuda.memory_allocated() == 4000256
        assert torch.cuda.memory_reserved() == 20 << 20
        del x
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.mem_get_info()[0] == free
    """)


def test_copies_streams_and_events(on_faces):
    on_faces("""
        import torch
        a = torch.arange(1 << 20, dtype=torch.float32)
        assert torch.equal(a.cuda().cpu(), a)
        pinned = a.pin_memory()
        assert pinned.is_pinned() and not a.is_pinned()
        side = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(side):
            there = pinned.to("cuda", non_blocking=True)
            back = torch.empty_like(pinned).pin_memory()
            back.copy_(there, non_blocking=True)
            done = side.record_event()
        done.synchronize()
        assert torch.equal(back, a)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(int(1.98e6 * 20))
        end.record()
        assert not end.query()
        end.synchronize()
        assert 19.9 < start.elapsed_time(end) < 40, start.elapsed_time(end)
        torch.cuda.current_stream().wait_stream(side)
        copy = torch.empty_like(there)
        copy.copy_(there)
        assert torch.equal(copy.cpu(), a)
    """)


def test_running_out_of_memory_and_recovering(on_faces):
    on_faces("""
        import torch
        held = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        try:
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "Tried to allocate 3.00 GiB" in str(error), error
            assert "total capacity of 2.00 GiB" in str(error), error
        else:
            raise AssertionError("it fitted")
        del held  # what is cached is given back when it is needed
        torch.empty(1800 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 2
    """)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(on_faces, setting):
    on_faces(
        """
        import torch
        a = torch.arange(1 << 20, dtype=torch.float32)
        held = [torch.empty(50 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
        b = a.cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            c = torch.empty_like(b)
            c.copy_(b)
        side.synchronize()
        assert torch.equal(c.cpu(), a)
        assert torch.cuda.memory_allocated() == (200 << 20) + 2 * (4 << 20)
        try:
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
            raise AssertionError("it fitted")
        except torch.OutOfMemoryError:
            pass
        del held
        torch.cuda.empty_cache()
        # A simulated pool gives back what lies behind its last block, not before it.
        pool = torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        assert torch.cuda.memory_reserved() <= (256 if pool else 64) << 20
        torch.empty(1500 << 20, dtype=torch.uint8, device="cuda")
        d = b.to("cuda:1")
        assert torch.equal(d.cpu(), a)
        with torch.cuda.device(1):
            assert torch.cuda.memory_allocated() == 4 << 20
        """,
        cards="memory=2GiB,devices=2",
        PYTORCH_CUDA_ALLOC_CONF=setting,
    )


def test_two_devices(on_faces):
    on_faces(
        """
        import torch
        assert torch.cuda.device_count() == 2
        assert torch.cuda.can_device_access_peer(0, 1)
        a = torch.arange(1000, dtype=torch.float32)
        there = a.to("cuda:1").to("cuda:0")
        assert torch.equal(there.cpu(), a)
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(1):
            torch.cuda.synchronize()
            assert torch.cuda.current_device() == 1
        """,
        cards="memory=256MiB,devices=2",
    )


def test_a_kernel_that_nobody_redirected_is_named(on_faces):
    on_faces("""
        import torch
        x = torch.empty(10, device="cuda")
        for _ in range(2):
            try:
                x + 1
            except RuntimeError as error:
                assert "simulated GPU cannot run device code" in str(error), error
                assert "vectorized_elementwise_kernel" in str(error), error
                assert "CUDAFunctorOnSelf_add<float>" in str(error), error
            else:
                raise AssertionError("it ran")
        x.copy_(torch.ones(10))  # and everything else goes on
        assert x.cpu().sum() == 10
    """)


def test_tensors_pass_between_processes(tmp_path, on_faces):
    script = tmp_path / "share.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torch.multiprocessing as mp

        def child(inbox, outbox):
            there = inbox.get()
            outbox.put(there.cpu()[5].item())
            there.copy_(torch.full((1000,), 7.0))
            torch.cuda.synchronize()
            del there
            outbox.put("done")

        if __name__ == "__main__":
            context = mp.get_context("spawn")
            inbox, outbox = context.Queue(), context.Queue()
            process = context.Process(target=child, args=(inbox, outbox))
            process.start()
            here = torch.arange(1000, dtype=torch.float32).cuda()
            inbox.put(here)
            assert outbox.get(timeout=60) == 5.0
            assert outbox.get(timeout=60) == "done"
            process.join()
            assert process.exitcode == 0
            assert here.cpu()[5].item() == 7.0
        """)
    )
    on_faces(
        f"""
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, {str(script)!r}]).returncode)
        """,
        EBBTIDE_SIM_RUN=str(tmp_path / "run"),
    )
