"""Operators in a CUDA graph.

On a GPU nothing runs during a capture. Here an operator must run to know the shapes of its results,
so what it wrote is put back afterwards. What the graph keeps is a function over addresses: CPU
tensors that own nothing, like the pointers in a real graph, and the kernel. It runs when the graph
is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ebbtide import _sim
from ebbtide.sim.operators import randomness
from ebbtide.sim.operators.memory import Ranges, alias

Tensor = torch.Tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def refuse_capture(name: str, index: int) -> None:
    """Raise as a GPU does when a captured operator waits for its stream; the capture is lost."""
    try:
        torch.cuda.current_stream(index).synchronize()
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise RuntimeError(
            f"{reason}: {name} cannot be captured in a CUDA graph, on the simulated GPU as on any "
            "other: the shape of its result depends on the data, and it waits for that"
        ) from None


def capture(
    run: Callable[[], Any],
    run_again: Callable[[], Any],
    finish: Callable[[Any], Any],
    written: list[Tensor],
    note: Callable[[Callable[[], None]], None],
) -> Any:
    """Capture one operator. `run` gives CPU results, and so does `run_again` at each launch;
    `finish` makes CUDA results of them, `written` are the CUDA tensors it writes to, `note` tells
    the simulator, once the ranges are known."""
    kept = [(a, a.clone()) for a in map(alias, written)]
    result = finish(run())
    for memory, before in kept:
        memory.copy_(before)
    targets = [alias(t) for t in _tensors(result)]

    def again() -> None:
        # Graphs are launched from anywhere; autograd has no part in it.
        with torch.no_grad():
            for target, source in zip(targets, _tensors(run_again()), strict=True):
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)

    note(again)
    return result


def capture_copy(index: int, stream: int, to: Tensor, source: Tensor, ranges: Ranges) -> None:
    """Capture a copy that a kernel would do."""
    target, origin = alias(to), alias(source)

    def again() -> None:
        with torch.no_grad():
            target.copy_(origin)

    _sim.captured(index, stream, "aten::copy_", 0.0, ranges, again)


def order_seeds() -> None:
    """Let the host wait for a capture's stream when the capture ends.

    PyTorch fills the seed and the offset of a graph's random numbers on that stream as the capture
    begins, and again at a launch, on the launching stream (2.6 at every launch, later versions
    where the graph draws), with no order between the two. It is a race, but PyTorch's own: no
    program could mend it, so none shall be told of it."""
    end = torch.cuda.CUDAGraph.capture_end

    @functools.wraps(end)
    def capture_end(self: torch.cuda.CUDAGraph) -> None:
        randomness.end_capture()
        end(self)
        torch.cuda.current_stream().synchronize()

    torch.cuda.CUDAGraph.capture_end = capture_end  # type: ignore[method-assign]
