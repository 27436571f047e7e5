"""Ebbtide: a VRAM allocator for PyTorch.

PyTorch hands out addresses. Ebbtide decides what VRAM is behind them.

Importing this package never imports torch.
"""

from ebbtide._core import (
    DriverFailed,
    DriverIncomplete,
    DriverTooOld,
    Error,
    Invalid,
    NoDevice,
    NoDriver,
    NoVMM,
    Probe,
    probe,
)
from ebbtide._core import version as __version__

__all__ = [
    "DriverFailed",
    "DriverIncomplete",
    "DriverTooOld",
    "Error",
    "Invalid",
    "NoDevice",
    "NoDriver",
    "NoVMM",
    "Probe",
    "__version__",
    "probe",
]
