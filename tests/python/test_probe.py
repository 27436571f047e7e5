"""probe() describes a GPU, or raises the exception that says why it cannot be used."""

import os
import threading
import time

import pytest

import ebbtide
import ebbtide.sim


def test_a_usable_gpu_is_described(fake):
    found = ebbtide.probe(fake("good"))
    assert found.name == "A fake GPU"
    assert found.driver_version == 13000
    assert found.device_count == 1
    assert found.total_bytes == 8 << 30
    assert found.granularity == 2 << 20
    assert found.exportable is True
    assert found.context_events is True
    assert "A fake GPU" in found.detail


def test_an_older_driver_has_no_context_events(fake):
    assert ebbtide.probe(fake("twelve")).context_events is False


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("nothing", ebbtide.NoDriver, "cuGetProcAddress_v2"),
        ("eleven", ebbtide.DriverTooOld, "CUDA 11.4"),
        ("old", ebbtide.DriverTooOld, "CUDA 11.8"),
        ("lacking", ebbtide.DriverIncomplete, "cuMemMap"),
        ("broken", ebbtide.DriverFailed, r"cuInit failed with CUDA_ERROR_UNKNOWN \(999\)"),
        ("no_gpu", ebbtide.NoDevice, r"CUDA_ERROR_NO_DEVICE \(100\)"),
        ("no_vmm", ebbtide.NoVMM, "A fake GPU"),
    ],
)
def test_what_is_wrong_has_its_own_exception(fake, kind, error, words):
    with pytest.raises(error, match=words) as caught:
        ebbtide.probe(fake(kind))
    assert isinstance(caught.value, ebbtide.Error)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.status == error.status < 0


def test_a_library_that_is_not_there(tmp_path):
    with pytest.raises(ebbtide.NoDriver, match=r"missing\.so"):
        ebbtide.probe(tmp_path / "missing.so")


def test_a_gpu_that_is_not_there(fake):
    with pytest.raises(ebbtide.NoDevice, match="no GPU 1"):
        ebbtide.probe(fake("good"), index=1)


def test_the_environment_names_the_library_where_the_caller_does_not(fake, monkeypatch):
    monkeypatch.setenv("EBBTIDE_DRIVER", str(fake("good")))
    assert ebbtide.probe().name == "A fake GPU"


@pytest.mark.parametrize("kind", [str, os.fsencode, os.fspath], ids=["str", "bytes", "path"])
def test_a_path_may_be_written_in_any_of_pythons_ways(fake, kind):
    assert ebbtide.probe(kind(fake("good"))).name == "A fake GPU"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"index": -1}, ebbtide.Invalid),
        ({"index": "first"}, TypeError),
        ({"index": 1 << 40}, OverflowError),
        ({"library": 7}, TypeError),
        ({"library": "nul\0inside"}, ValueError),
        ({"device": 0}, TypeError),
    ],
)
def test_arguments_that_make_no_sense(fake, arguments, error):
    with pytest.raises(error):
        ebbtide.probe(**{"library": fake("good"), **arguments})


def test_other_threads_run_while_the_driver_starts(fake):
    # This driver takes half a second to start. A thread that held the interpreter that long
    # would let this one tick once or twice.
    probe = threading.Thread(target=ebbtide.probe, args=(fake("slow"),))
    ticks = 0
    probe.start()
    while probe.is_alive():
        time.sleep(0.01)
        ticks += 1
    assert ticks > 10


def test_the_simulated_gpu_is_a_gpu(monkeypatch):
    monkeypatch.setenv("EBBTIDE_SIM", "3GiB")
    found = ebbtide.probe(ebbtide.sim.library())
    assert found.total_bytes == 3 << 30
    assert found.granularity == 2 << 20
    assert found.exportable is True
