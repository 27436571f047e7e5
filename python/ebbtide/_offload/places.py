"""The dicts in which an offloaded module has its parameters, its buffers and its modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ebbtide import _core
from ebbtide._offload import changed
from ebbtide._offload.lasting import settled

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

NAMES = ("_parameters", "_buffers")


class _Written:
    """Ways to write to a dict that would not ask its __setitem__()."""

    __slots__ = ()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


class Places(_Written, _core.Places):
    """A dict of parked tensors, in which real ones are found while their unit is entered."""

    __slots__ = ()

    # ---- reading, where dict would not ask __getitem__ ----

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def values(self) -> Any:
        return self._now().values()

    def items(self) -> Any:
        return self._now().items()

    def copy(self) -> dict[Any, Any]:
        return self._now()

    def __reduce__(self) -> Any:
        """A copy, or what was pickled, is a plain dict."""
        return dict, (self._now(),)

    # ---- writing, where dict would not ask __setitem__ ----

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, settled(value))

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        found = settled(self[key])
        del self[key]
        return found

    def popitem(self) -> Any:
        key = next(reversed(self), None)
        return super().popitem() if key is None else (key, self.pop(key))

    def clear(self) -> None:
        self._changed()
        super().clear()


class Buffers(Places):
    """Some modules have another buffer in every pass: a count, a cache. As long as it is one that
    stays on the GPU, that is nothing to the unit."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        value = settled(value)
        if changed.matters(dict.get(self, key), value, changed.models()):
            super().__setitem__(key, value)
        else:
            dict.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        if changed.matters(dict.get(self, key), None, ()):
            super().__delitem__(key)
        else:
            dict.__delitem__(self, key)


class Children(_Written, dict[str, Any]):
    """The modules in a module. Most ways to put one in are seen by PyTorch's own hooks, but
    nn.ModuleList.insert() and some libraries write to this dict itself."""

    __slots__ = ("_model",)

    def __init__(self, found: dict[str, Any], model: Model) -> None:
        super().__init__(found)
        self._model = weakref.ref(model)

    def _see(self, *modules: Any) -> None:
        model = self._model()
        if model is not None and any(changed.weighs(module) for module in modules):
            model.dirty()

    def __setitem__(self, key: str, module: Any) -> None:
        old = self.get(key)
        super().__setitem__(key, module)
        if old is not module:
            self._see(old, module)

    def __delitem__(self, key: str) -> None:
        old = self.get(key)
        super().__delitem__(key)
        self._see(old)

    def pop(self, key: str, *default: Any) -> Any:
        found = super().pop(key, *default)
        self._see(found)
        return found

    def popitem(self) -> Any:
        key, found = super().popitem()
        self._see(found)
        return key, found

    def clear(self) -> None:
        were = list(self.values())
        super().clear()
        self._see(*were)

    def __reduce__(self) -> Any:
        """A copy, or what was pickled, is a plain dict."""
        return dict, (dict(self),)


def watch_children(module: nn.Module, model: Model) -> None:
    found = module.__dict__.get("_modules")
    # That of a module of torch.jit, if there is one, is no dict, and stays as it is.
    if found and isinstance(found, dict) and not isinstance(found, Children):
        module.__dict__["_modules"] = Children(found, model)


def take(module: nn.Module, name: str) -> Places:
    """A module's dict of this name, which is one of these from now on."""
    found = module.__dict__[name]
    if not isinstance(found, Places):
        found = (Buffers if name == "_buffers" else Places)(found)
        module.__dict__[name] = found
    return found


def give_back(module: nn.Module) -> None:
    for name in (*NAMES, "_modules"):
        if isinstance(module.__dict__.get(name), (Places, Children)):
            module.__dict__[name] = dict(module.__dict__[name])
