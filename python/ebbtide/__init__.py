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
    from ebbtide._attach import CannotAttach, attach, detach, is_attached, memory_stats
    from ebbtide._offload import Offloaded, offload

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
    "Offloaded",
    "Probe",
    "Weight",
    "__version__",
    "attach",
    "detach",
    "is_attached",
    "memory_stats",
    "offload",
    "probe",
]

# What is about torch is loaded when it is asked for.
_LAZY = {
    "CannotAttach": "_attach",
    "Offloaded": "_offload",
    "attach": "_attach",
    "detach": "_attach",
    "is_attached": "_attach",
    "memory_stats": "_attach",
    "offload": "_offload",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ebbtide.{_LAZY[name]}"), name)
