"""Tests in which PyTorch runs on two simulated cards of 1 GiB.

The cards must be there before torch is imported, so these tests have a pytest process of their own.
Every test must end without a hazard, unless it is marked: @pytest.mark.hazards.
"""

import sys

import pytest

assert "torch" not in sys.modules, "these tests need a pytest process of their own"

import ebbtide.sim as sim  # noqa: E402

sim.start(memory="1GiB", devices=2)
sim.on_hazard("quiet")

import torch  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "hazards: the test is about hazards, and makes some")


@pytest.fixture(autouse=True)
def clean(request):
    """A known seed before, and a well card without a hazard after."""
    torch.manual_seed(0)
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
        found = sim.hazards()
        sim.clear_hazards()
        return found

    return look
