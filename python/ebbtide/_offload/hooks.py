"""What PyTorch calls when somebody looks at a model's modules, or changes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ebbtide._offload import changed
from ebbtide._offload.lasting import settled
from ebbtide._offload.parked import Parked, given_of

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

_watching: list[Any] = []


def watch() -> None:
    """From now on it is seen when a module is given another weight, or another module."""
    if not _watching:
        _watching.append(register_module_parameter_registration_hook(_parameter))
        _watching.append(register_module_buffer_registration_hook(_buffer))
        _watching.append(register_module_module_registration_hook(_module))


def _models(module: nn.Module) -> list[Model]:
    """Those that a module is of."""
    return [model for model in changed.models() if module in model.weights.names]


# Each of these gives what is to be there instead, or None.


def _parameter(module: nn.Module, name: str, what: Any) -> Any:
    for model in _models(module):
        model.dirty()
    lasts = settled(what)
    return None if lasts is what else lasts


def _buffer(module: nn.Module, name: str, what: Any) -> Any:
    """Most are small, and stay on the GPU: nothing has to be planned for another one."""
    lasts = settled(what)
    for model in _models(module):
        if changed.is_made(model, lasts):
            model.weights.staying[lasts] = True
        if changed.matters(dict.get(module._buffers, name), lasts, [model]):
            model.dirty()
    return None if lasts is what else lasts


def _module(module: nn.Module, name: str, what: Any) -> None:
    """One without weights is nothing to plan for. But it may be given some."""
    models = _models(module)
    weighs = models and (changed.weighs(module._modules.get(name)) or changed.weighs(what))
    for model in models:
        if weighs:
            model.dirty()
        elif what is not None:
            names = model.weights.names
            for full, part in what.named_modules(prefix=f"{names[module]}.{name}".lstrip(".")):
                names.setdefault(part, full)


def hook_state(modules: Iterable[nn.Module]) -> None:
    """From now on their state_dict() gives values, not parked tensors."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes none, and has no weights
        if not any(getattr(h, "ebbtide", False) for h in module._state_dict_hooks.values()):
            module._register_state_dict_hook(_real_values)


def unhook_state(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for key, hook in list(module._state_dict_hooks.items()):
            if getattr(hook, "ebbtide", False):
                del module._state_dict_hooks[key]


def _real_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """state_dict() gives the values: where they are, on the host. With keep_vars=True it gives the
    parameters and buffers themselves, and so they stay."""
    for key in (*module._parameters, *module._buffers):
        name = prefix + key
        value = state.get(name)
        themselves = value is module._buffers.get(key)
        if isinstance(value, Parked) and not (value._is_param or themselves):
            piece = value._piece
            with piece.still():
                if piece.given is None and not torch.cuda.is_current_stream_capturing():
                    torch.cuda.synchronize(piece.device)  # it may be read still, for a pass
                state[name] = given_of(value)
                for model in list(piece.models):
                    model.handed[id(piece)] = piece
                    model.watch()


_real_values.ebbtide = True  # type: ignore[attr-defined]
