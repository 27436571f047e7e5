"""offload(): any nn.Module, of any size, with one line. docs/offload.md tells the rest."""

import sys
import types

import torch

from ebbtide._offload import gates
from ebbtide._offload.handle import Offloaded, offload

__all__ = ["Offloaded", "offload"]

# Functions of gates.py that call what may be compiled.
LEAD_ON = ("_call", "_visit", "_pass", "_run", "_forwards", "_with_grad")


def _unseen() -> None:
    """torch.compile() does not look into any of this, but into what gates call."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        # Of 2.6: gates switch it off and on themselves.
        frames.skip_code(gates.Gate._call.__code__)
        frames.skip_code(gates.Gate._lasting.__code__)
        frames.skip_code(gates.Gate._over.__code__)
        return
    action, strategy = frames._FrameAction, frames._FrameExecStrategy
    alone, with_all = strategy(action.SKIP, action.DEFAULT), strategy(action.SKIP, action.SKIP)
    # handle.py has brought all of them.
    for module in [m for name, m in sys.modules.items() if name.startswith(f"{__name__}.")]:
        found = list(vars(module).values())
        found += [f for c in found if isinstance(c, type) for f in vars(c).values()]
        for f in found:
            f = getattr(f, "__func__", getattr(f, "fget", f))
            if isinstance(f, types.FunctionType) and f.__module__ == module.__name__:
                leads_on = module is gates and f.__name__ in LEAD_ON
                frames.set_code_exec_strategy(f.__code__, alone if leads_on else with_all)


_unseen()
