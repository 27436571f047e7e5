"""Random numbers: a CUDA generator's seed and offset decide what a CPU generator gives.

So manual_seed, saved and restored states, per-device generators and checkpointing behave as on a
GPU.
The numbers themselves are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_capturing = torch.cuda.is_current_stream_capturing

# PyTorch counts offsets in steps of four.
STEP = 4


def _mix(seed: int, offset: int) -> int:
    """One number of 63 bits from two, so that neighbours have nothing in common."""
    z = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


def _next_seed(generator: torch.Generator | None, device: int) -> int:
    """What seeds the CPU's generator for one operator; the CUDA generator moves on."""
    if generator is None:
        if not torch.cuda.default_generators:
            torch.cuda.init()
        generator = torch.cuda.default_generators[device]
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return _mix(generator.initial_seed(), offset)


def draw(generator: torch.Generator | None, device: int) -> torch.Generator:
    """A CPU generator for one operator."""
    made = torch.Generator()
    # What is drawn during a capture is thrown away; each launch draws for itself.
    return made if _capturing() else made.manual_seed(_next_seed(generator, device))


def with_default(device: int, kernel: Callable[[], Any]) -> Any:
    """Run an operator that draws random numbers without taking a generator: the CPU's default one
    gives what the CUDA one would, and is put back."""
    default = torch.default_generator
    state = default.get_state()
    if not _capturing():
        default.manual_seed(_next_seed(None, device))
    try:
        return kernel()
    finally:
        default.set_state(state)
