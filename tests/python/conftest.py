"""What the Python tests share. They run on the package in PYTHONPATH, as cmake built it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide

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
