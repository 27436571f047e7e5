"""What of ours torch.compile() does not look into. Whatever runs while it watches, it would
compile."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
# Whether a function can be left out with all that it calls. In 2.6, it alone can.
by_strategy = hasattr(frames, "set_code_exec_strategy")


def functions(package: str) -> Iterator[types.FunctionType]:
    """Those of a package's modules, as far as they have been imported."""
    for module in [m for name, m in sys.modules.items() if name.startswith(f"{package}.")]:
        found = list(vars(module).values())
        found += [f for c in found if isinstance(c, type) for f in vars(c).values()]
        for f in found:
            f = getattr(f, "__func__", getattr(f, "fget", f))
            if isinstance(f, types.FunctionType) and f.__module__ == module.__name__:
                yield f


def leave_out(function: types.FunctionType, with_all: bool = True) -> None:
    """Do not look into it, nor into functions that it makes; and, `with_all`, nor into what it
    calls."""
    for code in _codes(function.__code__):
        if by_strategy:
            action = frames._FrameAction
            beyond = action.SKIP if with_all else action.DEFAULT
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, beyond))
        else:
            frames.skip_code(code)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)
