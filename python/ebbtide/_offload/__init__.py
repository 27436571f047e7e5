"""offload(): any nn.Module, of any size, with one line. docs/offload.md tells the rest."""

from ebbtide import _unseen
from ebbtide._offload import gates
from ebbtide._offload.handle import Offloaded, offload

__all__ = ["Offloaded", "offload"]

# Functions of gates.py that call what may be compiled.
LEAD_ON = ("_call", "_visit", "_pass", "_run", "_forwards", "_with_grad")


def _leave_out() -> None:
    """torch.compile() does not look into any of this, but into what gates call."""
    if not _unseen.by_strategy:  # gates switch it off and on themselves
        for function in (gates.Gate._call, gates.Gate._lasting, gates.Gate._over):
            _unseen.leave_out(function)
        return
    for function in _unseen.functions(__name__):  # handle.py has brought all of them
        leads_on = function.__module__ == gates.__name__ and function.__name__ in LEAD_ON
        _unseen.leave_out(function, with_all=not leads_on)


_leave_out()
