"""Tests in which PyTorch runs on two simulated cards of 1 GiB; with EBBTIDE_TEST_GPU set, on a GPU.

The cards must be there before torch is imported, so these tests have a pytest process of their own.
Every test must end without a hazard, unless it is marked: @pytest.mark.hazards. What only a
simulated card can tell is marked @pytest.mark.simulated, what needs two @pytest.mark.two_cards.
"""

import os
import sys

import pytest

assert "torch" not in sys.modules, "these tests need a pytest process of their own"

import ebbtide.sim as sim  # noqa: E402

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")
if SIMULATED:
    sim.start(memory="1GiB", devices=2)
    sim.on_hazard("quiet")

import torch  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "hazards: the test is about hazards, and makes some")
    config.addinivalue_line("markers", "simulated: only a simulated card can tell")
    config.addinivalue_line("markers", "two_cards: needs two cards")


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
