"""What the Python tests share. They run on the package in PYTHONPATH, as cmake built it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide
from ebbtide import sim

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_driver_from_outside(monkeypatch):
    """A test decides itself which driver it means."""
    monkeypatch.delenv("EBBTIDE_DRIVER", raising=False)


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def fake():
    """fake("old") is the path of a driver that is wrong in one way (tests/unit/fake_driver.c)."""
    folder = Path(ebbtide.__file__).parents[2] / "tests" / "unit"

    def path(kind: str) -> Path:
        file = folder / f"libfake_{kind}.so"
        assert file.exists(), f"{file} was not built"
        return file

    return path


@pytest.fixture
def python():
    """python("-c", "...") runs this interpreter in a process of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def simulator(monkeypatch):
    """A simulated GPU that knows nothing. In the end, nothing was used too early."""
    for name in ("EBBTIDE_SIM", "EBBTIDE_SIM_RUN", "EBBTIDE_SIM_FAIL"):
        monkeypatch.delenv(name, raising=False)
    sim.reset()
    sim.on_hazard("quiet")
    yield
    gc.collect()
    assert [h.text for h in sim.hazards()] == []
    assert sim.check() is None
    sim.reset()
    sim.on_hazard("print")


@pytest.fixture
def device(simulator):
    """A card of 256 MiB, of which 128 MiB may be held: four pages. Its books balance in the end."""
    device = ebbtide.Device("sim", memory="256MiB", limit="128MiB")
    yield device
    device.check()
    assert device.stats()["held"] <= device.limit
    device.close()


@pytest.fixture
def vbar(device):
    """Twice as large as what may be held."""
    with ebbtide.VBAR(device, "256MiB") as vbar:
        yield vbar


@pytest.fixture
def load_all():
    """load_all(a, b): fault, fill and unpin each; whether it is resident."""

    def load(*weights: ebbtide.Weight) -> list[bool]:
        answers = []
        for w in weights:
            signature = w.fault()
            answers.append(signature is not None)
            if signature is not None:
                w.filled(signature)
                w.unpin()
        return answers

    return load
