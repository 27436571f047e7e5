"""nn.RNN, nn.LSTM and nn.GRU have their weights in a list, too.

They know by weak references whether those are still the module's own, and make the list anew if
not; then cuDNN would put the weights side by side, into memory of its own. While such a module is
offloaded, its list and its references are exchanged with its weights, and nothing is put anywhere.
"""

from __future__ import annotations

import weakref

from torch import nn


def let_go(module: nn.Module) -> None:
    """A tensor that is referred to cannot become a parked one, or a plain one again."""
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = [None] * len(module._flat_weights_names)


def take(module: nn.Module) -> None:
    """Its list has what it has, and that is referred to."""
    if isinstance(module, nn.RNNBase):
        module.__dict__["flatten_parameters"] = _lie_where_they_are
        _refer(module)


def give_back(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        if module.__dict__.get("flatten_parameters") is _lie_where_they_are:
            del module.__dict__["flatten_parameters"]
        _refer(module)


def _refer(module: nn.RNNBase) -> None:
    flat = module._flat_weights
    for i, name in enumerate(module._flat_weights_names):
        if name in module._parameters and i < len(flat):
            flat[i] = module._parameters[name]
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in flat]


def _lie_where_they_are() -> None:
    """In the place of flatten_parameters()."""
