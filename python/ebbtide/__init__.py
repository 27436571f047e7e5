"""Ebbtide: a VRAM allocator for PyTorch.

PyTorch hands out addresses. Ebbtide decides what VRAM is behind them.

Importing this package never imports torch.
"""

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

__all__ = [
    "VBAR",
    "Broken",
    "Busy",
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
    "probe",
]
