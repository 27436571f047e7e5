"""Ebbtide: a VRAM allocator for PyTorch.

PyTorch hands out addresses. Ebbtide decides what VRAM is behind them.

Importing this package never imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ebbtide._core import (
    Broken,
    Busy,
    DriverFailed,
    DriverIncomplete,
    DriverTooOld,
    Error,
    Forked,
    Full,
    Gone,
    Invalid,
    NoAddresses,
    NoDevice,
    NoDriver,
    NotPinned,
    NoVMM,
    Probe,
    probe,
)
from ebbtide._core import version as __version__
from ebbtide.vbar import VBAR, Device, Weight

if TYPE_CHECKING:
    from ebbtide.attach import CannotAttach, attach, detach, is_attached, memory_stats

__all__ = [
    "VBAR",
    "Broken",
    "Busy",
    "CannotAttach",
    "Device",
    "DriverFailed",
    "DriverIncomplete",
    "DriverTooOld",
    "Error",
    "Forked",
    "Full",
    "Gone",
    "Invalid",
    "NoAddresses",
    "NoDevice",
    "NoDriver",
    "NoVMM",
    "NotPinned",
    "Probe",
    "Weight",
    "__version__",
    "attach",
    "detach",
    "is_attached",
    "memory_stats",
    "probe",
]

# What is about torch is loaded when it is asked for.
_LAZY = {
    "CannotAttach": "attach",
    "attach": "attach",
    "detach": "attach",
    "is_attached": "attach",
    "memory_stats": "attach",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    # Importing ebbtide.attach binds the module to the name of its function, so all are bound anew.
    module = importlib.import_module(f"ebbtide.{_LAZY[name]}")
    for each, home in _LAZY.items():
        if home == _LAZY[name]:
            globals()[each] = getattr(module, each)
    return globals()[name]
