"""nn.RNN, nn.LSTM and nn.GRU have their weights in a list, too.

They know by weak references whether those are still the module's own, and make the list anew if
not; then cuDNN would put the weights side by side, into memory of its own. While such a module is
offloaded, its list and its references are exchanged with its weights, and nothing is put anywhere.

And cuDNN asks where weights are before any operator could bring them. So where they come one by
one, those in the list do so first (Brings).
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ebbtide._offload.gates import Forward, Gate
from ebbtide._offload.parked import Parked


def let_go(module: nn.Module) -> None:
    """A tensor that is referred to cannot become a parked one, or a plain one again."""
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = [None] * len(module._flat_weights_names)


def take(module: nn.Module) -> None:
    """Its list has what it has, and that is referred to."""
    if isinstance(module, nn.RNNBase):
        module.__dict__["flatten_parameters"] = _lie_where_they_are
        stand_in(module)
        _refer(module)


def stand_in(module: nn.Module) -> None:
    """Before there is a gate: it leads to what is there."""
    if isinstance(module, nn.RNNBase) and "forward" not in module.__dict__:
        module.__dict__["forward"] = Brings(module)


def give_back(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        if module.__dict__.get("flatten_parameters") is _lie_where_they_are:
            del module.__dict__["flatten_parameters"]
        forward = module.__dict__.get("forward")
        if isinstance(forward, Brings):
            del module.__dict__["forward"]
        elif isinstance(forward, Gate) and isinstance(forward._own, Brings):
            forward._own = None  # what it is to put back
        _refer(module)


class Brings(Forward):
    """Their forward(), with tensors in the list in any case; and that of their copies."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        flat = module._flat_weights
        parked = [(i, w) for i, w in enumerate(flat) if isinstance(w, Parked)]
        for i, w in parked:
            flat[i] = w.clone()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            for i, w in parked:
                flat[i] = w


def _refer(module: nn.RNNBase) -> None:
    flat = module._flat_weights
    for i, name in enumerate(module._flat_weights_names):
        if name in module._parameters and i < len(flat):
            flat[i] = module._parameters[name]
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in flat]


def _lie_where_they_are() -> None:
    """In the place of flatten_parameters()."""
