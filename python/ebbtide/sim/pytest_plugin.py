"""For a project's own tests: pytest --ebbtide-sim 8GiB runs them on simulated GPUs.

    --ebbtide-sim MEMORY    memory of each card, "8GiB"; without this option the plugin does nothing
    --ebbtide-devices N     how many cards; 1 unless said

The cards are there before anything imports torch. A test during which a hazard is reported fails,
with the report as the message, unless it is marked: @pytest.mark.ebbtide_hazards.

An installed package registers it by itself; otherwise it is -p ebbtide.sim.pytest_plugin.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from ebbtide import sim
from ebbtide.sim.launch import RUN

MARK = "ebbtide_hazards"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ebbtide", "simulated GPUs for PyTorch")
    group.addoption(
        "--ebbtide-sim",
        metavar="MEMORY",
        help="run the tests on a simulated GPU with this much memory: 8GiB, 512MiB",
    )
    group.addoption(
        "--ebbtide-devices", metavar="N", type=int, default=None, help="how many such GPUs (1)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # With or without a simulated GPU: a marker must be known wherever the tests are run.
    config.addinivalue_line(
        "markers", f"{MARK}: the test may cause hazards on the simulated GPU without failing"
    )


def _start(memory: str, devices: int) -> str:
    """Start the cards; what there is, in words."""
    if "torch" in sys.modules:
        raise pytest.UsageError(
            "--ebbtide-sim: torch has been imported already, by another plugin or by the program "
            "that runs pytest, and the simulated GPU must be there before. Run it as "
            "`ebbtide run --sim 8GiB -m pytest --ebbtide-sim 8GiB`"
        )
    try:
        sim.start(memory=memory, devices=devices)
    except (sim.CannotStart, ValueError) as error:
        raise pytest.UsageError(f"--ebbtide-sim: {error}") from None
    return f"{devices} simulated GPU{'s' * (devices > 1)} of {memory}"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start the cards: the last moment before a project's own files, which import torch."""
    options = early_config.known_args_namespace
    devices = options.ebbtide_devices
    if options.ebbtide_sim is None:
        if devices is not None:
            raise pytest.UsageError("--ebbtide-devices needs --ebbtide-sim: 8GiB, 512MiB")
        return
    if os.environ.get(RUN):
        words = "the simulated GPUs of the run it was started in"  # ebbtide run, or a test worker
    else:
        words = _start(options.ebbtide_sim, 1 if devices is None else devices)
    sim.on_hazard("quiet")  # each is told once, with the test it belongs to
    early_config.pluginmanager.register(Watch(words), "ebbtide-watch")


def _wait() -> None:
    """Let every device that is in use finish: some hazards are found only then."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        # Asking a device that nobody uses would cost a context on it.
        if torch._C._cuda_hasPrimaryContext(index):
            # A lost context says so; the hazard that lost it is what counts.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(index)


def _look() -> list[str]:
    """What was reported since the last look."""
    _wait()
    count = sim.hazard_count()
    if count == 0:
        return []
    found = [hazard.text for hazard in sim.hazards()]
    sim.clear_hazards()
    return [*found, f"and {count - len(found)} more"] if count > len(found) else found


class Hazards(pytest.fail.Exception):
    """A hazard was reported during a test."""


class Watch:
    """The hooks of a session that has simulated GPUs."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.outside: list[str] = []  # during collection, or between tests

    def pytest_report_header(self) -> str:
        return f"ebbtide: {self.words}"

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, Any, None]:
        outcome = yield
        if item.get_closest_marker(MARK) is not None:
            if phase == "teardown":
                _look()  # until then they are the test's own to look at
            return
        found = _look()
        if not found:
            return
        if outcome.excinfo is None:
            count = "a hazard was" if len(found) == 1 else f"{len(found)} hazards were"
            text = "\n\n".join([f"{count} reported on the simulated GPU", *found])
            outcome.force_exception(Hazards(text, pytrace=False))
        else:
            # What the test has to say comes first.
            item.add_report_section(phase, "hazards", "\n\n".join(found))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, None]:
        self.outside += _look()
        yield from self._phase(item, "setup")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        yield from self._phase(item, "call")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, None]:
        yield from self._phase(item, "teardown")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.outside += _look()
        if self.outside and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.outside:
            terminalreporter.section("hazards outside of tests", red=True)
            for text in self.outside:
                terminalreporter.line(text)
