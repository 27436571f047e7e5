"""Memory that GPU kernels take for themselves while they run.

The CPU's kernels need none of it, but a card's memory is what it is about: a training step's peak
is
often reached in the middle of a bias's gradient. PyTorch's reduction kernel splits a long reduction
over several blocks, which leave their partial results in a buffer from PyTorch's own allocator. How
many blocks follows from the shape and the card, by the rules below, which are those of the kernel's
launch configuration; the buffer is allocated and given back like the kernel does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch

Tensor = torch.Tensor

WARP = 32
MOST_THREADS = 512  # of a block of this kernel
LEAST_VALUES, MOST_VALUES = 16, 256  # per thread
VECTOR = 4  # elements a thread reads at once


def _last_power(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _parts(n: int, size: int) -> int:
    return -(-n // size)


def buffer_sizes(
    outputs: int,
    inputs: int,
    along_rows: bool,
    element: int,
    processors: int,
    threads: int = 2048,
    flat: bool = True,
) -> tuple[int, int]:
    """Bytes of the partial results and of the semaphores for `outputs` sums of `inputs` numbers.

    `along_rows`: the numbers of one sum lie side by side; else the sums do. (0, 0): one block does
    it.
    """
    width, height = (inputs, outputs) if along_rows else (outputs, inputs)
    vector = 1
    if along_rows:
        if width > 128 and outputs == 1 and flat:
            width //= VECTOR
    elif outputs % VECTOR == 0:
        vector = VECTOR
        width //= vector
    most = MOST_THREADS // vector
    wide = min(_last_power(width), most)
    high = min(_last_power(height), most)
    block_x = min(wide, WARP)
    block_y = min(high, most // block_x)
    block_x = min(wide, most // block_y)
    step_in, step_out = (block_x, 1) if along_rows else (1, block_x)
    values = _parts(inputs, step_in)
    split_y = values >= block_y * LEAST_VALUES or values >= MOST_VALUES
    if split_y:
        step_in *= block_y
    else:
        step_out *= block_y
    values = _parts(inputs, step_in)
    grid = _parts(outputs // vector, step_out)
    wanted = processors * (threads // (block_x * block_y))
    if not (split_y and values >= MOST_VALUES and grid <= wanted):
        return 0, 0
    blocks = max(
        min(_parts(wanted, grid), _parts(values, LEAST_VALUES)), _parts(values, MOST_VALUES)
    )
    if blocks <= 1:
        return 0, 0
    size = element * outputs * blocks
    if not along_rows:
        size *= block_x * vector
    return size, 4 * grid


@lru_cache(maxsize=4096)
def _of_shape(
    shape: tuple[int, ...], dims: tuple[int, ...], element: int, processors: int
) -> tuple[int, int]:
    """For a contiguous tensor, where the reduced dimensions are the first ones or the last ones."""
    kept = [i for i in range(len(shape)) if i not in dims and shape[i] != 1]
    gone = [i for i in dims if shape[i] != 1]
    if not gone:
        return 0, 0
    outputs, inputs = prod(shape[i] for i in kept), prod(shape[i] for i in gone)
    if not kept or min(gone) > max(kept):
        return buffer_sizes(outputs, inputs, True, element, processors)
    if max(gone) < min(kept):
        return buffer_sizes(outputs, inputs, False, element, processors)
    return 0, 0  # the middle of a tensor: more cases than are worth it


def with_buffers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that also takes, for a moment, what the GPU's kernel would."""

    def reduce(self: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = function(self, dim, *args, **kwargs)
        if self.is_contiguous() and self.numel() > MOST_VALUES and self.is_floating_point():
            rank = self.dim()
            dims = tuple(range(rank)) if not dim else tuple(sorted(d % rank for d in dim))
            element = max(4, self.element_size())  # partial sums are at least float32
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            partial, semaphores = _of_shape(tuple(self.shape), dims, element, processors)
            if partial:
                buffers = [
                    torch.empty(size, dtype=torch.uint8, device=self.device)
                    for size in (partial, semaphores)
                ]
                del buffers
        return result

    return reduce


REDUCTIONS = {"aten::sum.dim_IntList", "aten::mean.dim"}
