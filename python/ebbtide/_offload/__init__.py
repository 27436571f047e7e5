"""offload(): any nn.Module, of any size, with one line. docs/offload.md tells the rest."""

import types
from typing import Any

import torch

from ebbtide._offload import gates, handle, host, model, order, parked, station, units
from ebbtide._offload.handle import Offloaded, offload

__all__ = ["Offloaded", "offload"]


def _unseen() -> None:
    """torch.compile() does not look into any of this, but into what it calls."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skip: Any = getattr(frames, "skip_code", None)
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)

        def skip(code: Any) -> None:
            frames.set_code_exec_strategy(code, strategy)

    if skip is None:
        return
    for module in (gates, handle, host, model, order, parked, station, units):
        found = list(vars(module).values())
        found += [f for c in found if isinstance(c, type) for f in vars(c).values()]
        for f in found:
            f = getattr(f, "__func__", getattr(f, "fget", f))
            if isinstance(f, types.FunctionType) and f.__module__ == module.__name__:
                skip(f.__code__)


_unseen()
