"""The simulated GPU: a library with the CUDA driver's own interface, made of host memory.

    from ebbtide import sim

    sim.virtual_clock()
    with sim.add_card(memory=8 << 30) as card:
        ...

There is one simulated driver in a process. docs/simulator.md says what it models. Importing this
loads nothing; the library is loaded by the first call.
"""

from pathlib import Path

from ebbtide.sim._library import PATTERN, CallFailed, path
from ebbtide.sim.card import (
    Card,
    Event,
    Figures,
    Frame,
    Memory,
    Pinned,
    Stream,
    add_card,
    open_card,
    peek,
)
from ebbtide.sim.control import (
    Census,
    Hazard,
    Kind,
    Side,
    calls,
    census,
    check,
    clear_failures,
    clear_hazards,
    clock,
    fail,
    failures,
    hazard_count,
    hazards,
    let_pass,
    now,
    on_hazard,
    reset,
    virtual_clock,
)
from ebbtide.sim.launch import CannotStart, start

__all__ = [
    "PATTERN",
    "CallFailed",
    "CannotStart",
    "Card",
    "Census",
    "Event",
    "Figures",
    "Frame",
    "Hazard",
    "Kind",
    "Memory",
    "Pinned",
    "Side",
    "Stream",
    "add_card",
    "calls",
    "census",
    "check",
    "clear_failures",
    "clear_hazards",
    "clock",
    "fail",
    "failures",
    "hazard_count",
    "hazards",
    "let_pass",
    "library",
    "now",
    "on_hazard",
    "open_card",
    "peek",
    "reset",
    "start",
    "virtual_clock",
]


def library() -> Path:
    """The path of the simulated GPU's library, to be given where a driver's path is asked for."""
    return path()
