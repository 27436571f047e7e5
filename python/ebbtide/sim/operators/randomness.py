"""Random numbers: a CUDA generator's seed and offset decide what a CPU generator gives.

So manual_seed, saved and restored states, per-device generators and checkpointing behave as on a
GPU. The numbers themselves are the CPU's.

In a graph an operator draws at each launch. As on a GPU, what it draws follows from the seed and
the offset that the generator's state has at the launch, and from how far into the graph it is:
PyTorch counts that from 0 while it captures, and moves the state on by the whole at each launch.
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


def _of(generator: torch.Generator | None, device: int) -> torch.Generator:
    if generator is not None:
        return generator
    if not torch.cuda.default_generators:
        torch.cuda.init()
    return torch.cuda.default_generators[device]


def next_seed(generator: torch.Generator | None, device: int) -> int | None:
    """What seeds the CPU's generator for one operator; the CUDA generator moves on. None during a
    capture: what is drawn then is thrown away, and each launch draws for itself."""
    if _capturing():
        return None
    generator = _of(generator, device)
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return _mix(generator.initial_seed(), offset)


def generator_of(seed: int | None) -> torch.Generator:
    """A CPU generator for one operator."""
    made = torch.Generator()
    return made if seed is None else made.manual_seed(seed)


def with_default(seed: int | None, kernel: Callable[[], Any]) -> Any:
    """Run an operator that draws random numbers without taking a generator: the CPU's default one
    gives what a CUDA one would, and is put back."""
    default = torch.default_generator
    state = default.get_state()
    if seed is not None:
        default.manual_seed(seed)
    try:
        return kernel()
    finally:
        default.set_state(state)


# ---- in graphs -----------------------------------------------------------------------------------


class _Whole:
    """How far one capture moves one generator's state on; known when the capture ends."""

    def __init__(self, state: torch.Generator) -> None:
        self.state = state
        self.steps = 0


_wholes: list[_Whole] = []


def _inside(state: torch.Generator, move: int = 0) -> int | None:
    """How far into its capture a state is, and move it on; None: this PyTorch does not say."""
    try:
        seed_and_offset = state.get_state()
    except RuntimeError:  # before 2.8 or so
        return None
    numbers = seed_and_offset.view(torch.int64)
    offset = int(numbers[1])
    if move:
        numbers[1] = offset + move
        state.set_state(seed_and_offset)
    return offset


class Draw:
    """What seeds a captured operator, at each launch of its graph."""

    def __init__(self, generator: torch.Generator | None, device: int) -> None:
        # A generator can be given another state later; this operator keeps the one it was
        # captured with.
        self.state = _of(generator, device).graphsafe_get_state()
        self.offset = _inside(self.state, STEP)
        self.whole = _Whole(self.state)
        if self.offset is not None:
            _wholes.append(self.whole)

    def __call__(self) -> int | None:
        if self.offset is None or _capturing():
            return next_seed(self.state, 0)
        # PyTorch has moved the state on before it launched the graph.
        start = self.state.get_offset() - self.whole.steps
        return _mix(self.state.initial_seed(), start + self.offset)


def end_capture() -> None:
    """Called before a capture ends, while its stream still captures."""
    for whole in _wholes:
        whole.steps = _inside(whole.state) or 0
    _wholes.clear()
