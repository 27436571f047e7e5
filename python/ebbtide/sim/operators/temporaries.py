"""Memory that GPU kernels take for themselves while they run.

The CPU's kernels need none of it, but a card's memory is what it is about: a training step's peak
is often reached in the middle of a backward pass. What a kernel takes follows from the shapes and
the card, by the rules below, which are those of PyTorch's kernels; it is allocated and given back
in the order in which they do it.

- PyTorch's reduction kernel splits a long reduction over several blocks, which leave their partial
  results in a buffer.
- Memory-efficient attention has a workspace in which blocks add up the gradient of the queries, and
  computes a sum for each row beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch

Tensor = torch.Tensor


def _bytes(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.device)


# ---- reductions ----------------------------------------------------------------------------------

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
                buffers = [_bytes(size, self) for size in (partial, semaphores)]
                del buffers
        return result

    return reduce


# ---- memory-efficient attention ------------------------------------------------------------------

# The backward kernels: the largest head they take, and a block's queries and keys. The first that
# takes the head and fits the card's shared memory is launched. (PyTorch's cutlassB.h)
_ANY = 65536
KERNELS_16_BIT = (
    (32, 64, 64),
    (64, 64, 64),
    (96, 128, 64),
    (128, 128, 128),
    (128, 64, 64),
    (_ANY, 128, 64),
    (_ANY, 64, 64),
)
KERNELS_32_BIT = (
    (32, 64, 64),
    (64, 64, 64),
    (128, 128, 64),
    (128, 64, 64),
    (_ANY, 128, 64),
    (_ANY, 64, 64),
)
# Cards whose shared memory blocks of 128 queries fit in, by capability; the others have 100 KiB.
ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}
ENOUGH_BLOCKS = 256  # above it short sequences are not split by keys
MOST_STAGED = 200  # blocks that may each have an area for the gradients of keys and values
HEADER = 16  # bytes before each tile of the queries' gradient: its lock and counter
SINGLE_PASS = 128  # values of a head that the forward kernel holds in registers


def attention_workspace(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head: int,
    head_value: int,
    half: bool,
    roomy: bool,
    split: bool = True,
) -> int:
    """Bytes of the backward kernel's workspace. `roomy`: blocks of 128 queries fit this card;
    `split`: keys may be split over blocks, which is not deterministic."""
    largest, rows, columns = next(
        kernel
        for kernel in (KERNELS_16_BIT if half else KERNELS_32_BIT)
        if kernel[0] >= max(head, head_value) and (kernel[1] < 128 or roomy)
    )
    tiles = _parts(queries, rows) * _parts(head, columns)
    numbers = tiles * (HEADER // 4 + rows * columns)
    if half and largest > rows:  # gradients of keys and values are added up in float32, outside
        splits = _parts(keys, columns)
        if batch * heads >= ENOUGH_BLOCKS and keys <= 2 * columns:
            splits = 1
        splits = max(1, min(splits, MOST_STAGED // (batch * heads))) if split else 1
        numbers += splits * columns * sum(_parts(n, rows) * rows for n in (head, head_value))
    return batch * heads * _parts(numbers, 4) * 4 * 4


def with_attention_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Memory-efficient attention, and the buffer for outputs too wide for registers."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(query, key, value, *args, **kwargs)
        if query.element_size() == 2 and value.size(3) > SINGLE_PASS:
            _bytes(4 * query.numel() // query.size(3) * value.size(3), query)
        return result

    return forward


def with_attention_workspace(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of memory-efficient attention, and what the kernel takes for a moment."""

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        gradient = None
        if not grad_out.transpose(1, 2).is_contiguous():
            gradient = _bytes(grad_out.nbytes, grad_out)
        result = function(grad_out, query, key, value, *args, **kwargs)
        batch, heads, queries, head = query.shape
        rows = 4 * batch * heads * queries
        half = query.element_size() == 2
        if half:
            delta = _bytes(rows, query)
        else:
            product, delta = _bytes(grad_out.nbytes, query), _bytes(rows, query)
            if heads > 1 and queries > 1:
                delta = _bytes(rows, query)  # the same, transposed
            del product
        size = attention_workspace(
            batch,
            heads,
            queries,
            key.size(2),
            head,
            value.size(3),
            half,
            torch.cuda.get_device_capability(query.device) in ROOMY,
            not torch.are_deterministic_algorithms_enabled(),
        )
        workspace = _bytes(size, query)
        del delta, workspace, gradient
        return result

    return backward


WRAPPERS = {
    "aten::sum.dim_IntList": with_buffers,
    "aten::mean.dim": with_buffers,
    "aten::_scaled_dot_product_efficient_attention": with_attention_output,
    "aten::_scaled_dot_product_efficient_attention_backward": with_attention_workspace,
}
