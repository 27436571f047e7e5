"""The way into a module of an offloaded model: in the place of its forward().

A gate goes into the module's own attributes, not on its list of hooks: that costs a tenth of it,
and a forward that raises is left like one that does not.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ebbtide import _core, _unseen
from ebbtide._offload import lasting
from ebbtide._offload.parked import Parked

if TYPE_CHECKING:
    from ebbtide._offload.model import Model


# How torch.compile() is told what to compile, where it cannot be told what to leave alone (2.6).
_compiler = None if _unseen.by_strategy else _unseen.frames.set_eval_frame


def not_pickled(_: Any, protocol: Any) -> NoReturn:
    """What an offloaded model consists of, its handle too, says so."""
    raise TypeError(
        "an offloaded model and its handle cannot be pickled: save its state_dict(), or "
        ".restore() it first"
    )


class Gate(_core.Gate):
    """Stands for a module's forward()."""

    def __init__(self, module: nn.Module, model: Model, name: str, root: bool = False) -> None:
        # An instance may have a forward() of its own already; that of a copy is its class's.
        own = module.__dict__.get("forward")
        self._own = None if type(own) is Forward else own
        self._module = weakref.ref(module)
        # What is called as it is: that, or a static method, or one of the class.
        plain = _of_class(module) if self._own is None else self._own
        takes_module = self._own is None and getattr(plain, "__self__", None) is module
        self._bare = None if takes_module else plain
        self._forward = type(module).forward if takes_module else None
        super().__init__(
            self._module,
            self._forward,
            self._bare,
            torch.is_grad_enabled,
            torch._C._get_tracing_state,
            model.running,
            torch.Tensor,
            lasting.parts,
            root,
        )
        self.compiled = _compiler is not None
        self.model = model
        self.name = name
        module.__dict__["forward"] = self

    def remove(self) -> None:
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._own is not None:
            module.__dict__["forward"] = self._own
        else:
            del module.__dict__["forward"]

    # ---- what a forward() is asked for ----

    @property
    def __wrapped__(self) -> Any:
        return self._plain()

    @property
    def __self__(self) -> Any:
        return self._module()

    @property
    def __func__(self) -> Any:
        return self._forward if self._bare is None else getattr(self._bare, "__func__", self._bare)

    @property
    def __name__(self) -> str:
        return "forward"

    def _plain(self) -> Any:
        return self._bare if self._bare is not None else self._forward.__get__(self._module())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is not offloaded, though its weights are parked: they come when
        used."""
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        # It is in the copy's own attributes, and would keep it: what a class has is found anyway.
        copied = memo.get(id(self._module()))
        return None if copied is None else Forward(copied)

    __reduce_ex__ = not_pickled

    # ---- the call, where it is not the plain case ----

    def _call(self, args: Any, kwargs: Any) -> Any:
        if _compiler is None:
            return (self._pass if self.root else self._visit)(args, kwargs)
        before = self.model.local.compiling = _compiler(None)
        try:
            return (self._pass if self.root else self._visit)(args, kwargs)
        finally:
            _compiler(before)

    def _in(self) -> Any:
        return self.model.enter(self)

    def _out(self, unit: Any) -> None:
        self.model.leave(unit)

    def _visit(self, args: Any, kwargs: Any) -> Any:
        """A module of the model."""
        model, unit = self.model, self.unit
        if self.enters or (self.run and model.running.strays(unit)):
            unit = model.enter(self)
        member = self.run and unit is not None and unit.step(True)
        try:
            return self._checked(unit, self._run(args, kwargs))
        finally:
            if member:
                unit.step(False)
            if self.leaves and unit is not None:
                model.leave(unit)

    def _pass(self, args: Any, kwargs: Any) -> Any:
        """The model itself."""
        model = self.model
        model.begin()
        try:
            if not model.share.fits:
                # Under autocast PyTorch keeps what it makes of each weight, until all are there.
                model.running.forgo()
            unit = model.enter(self) if self.unit is not None else None
            try:
                return self._checked(unit, self._run(args, kwargs))
            except BaseException as error:
                model.failed(isinstance(error, torch.OutOfMemoryError))
                raise
            finally:
                if unit is not None:
                    model.leave(unit)
        finally:
            model.end()

    def _rest(self, _: type[BaseException] | None) -> None:
        """The outermost call of this thread has ended in a run, without a call of the model."""
        before = None if _compiler is None else _compiler(None)
        try:
            self.model.rest()
        finally:
            if _compiler is not None:
                _compiler(before)

    def _over(self, error: type[BaseException] | None) -> None:
        """A call of the model that went the plain way is over, and has something to tell."""
        before = None if _compiler is None else _compiler(None)
        try:
            if error is not None:
                self.model.failed(issubclass(error, torch.OutOfMemoryError))
            self.model.end()
        finally:
            if _compiler is not None:
                _compiler(before)

    def _checked(self, unit: Any, result: Any) -> Any:
        """A result that does not end with the use of the unit."""
        if unit is not None and self._holds(unit, result):
            return self._lasting(unit, result)
        return result

    def _lasting(self, unit: Any, result: Any) -> Any:
        self.model.gives.add(self.name)
        if _compiler is None:
            return lasting.copied(result, lambda value: self._holds(unit, value))
        before = _compiler(None)
        try:
            return lasting.copied(result, lambda value: self._holds(unit, value))
        finally:
            _compiler(before)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self._with_grad(args, kwargs)
        return self._forwards(args, kwargs)

    def _forwards(self, args: Any, kwargs: Any) -> Any:
        """The module's own, which may be compiled."""
        if _compiler is None:
            return self._plain()(*args, **kwargs)
        plain, local = self._plain(), self.model.local
        before = local.compiling
        _compiler(before)
        try:
            return plain(*args, **kwargs)
        finally:
            _compiler(None)
            local.compiling = before  # others have been called in between

    def _with_grad(self, args: Any, kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self.model.keep, _unpack):
            result = self._forwards(args, kwargs)

        def refuse(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.requires_grad:
                return t
            return _Refuse.apply(torch.zeros(0, device=t.device, requires_grad=True), t)

        return tree_map(refuse, result)


def _of_class(module: nn.Module) -> Any:
    """The forward() that a module has if it has none of its own."""
    found = inspect.getattr_static(type(module), "forward")
    return found.__get__(module, type(module)) if hasattr(found, "__get__") else found


class Forward:
    """The forward() of a copy, in its own attributes because there was a gate in the original's. It
    does not keep the copy, which a bound method would."""

    __name__ = "forward"

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __self__(self) -> Any:
        return self._module()

    @property
    def __func__(self) -> Any:
        return type(self._module()).forward

    @property
    def __wrapped__(self) -> Any:
        return _of_class(self._module())

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return type(self)(memo.get(id(self._module()), self._module()))

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")


MESSAGE = (
    "no backward through a model that ebbtide.offload() has: its weights are not where they were "
    "in forward. Run it under torch.no_grad(), or .restore() it to train"
)


class _Refuse(torch.autograd.Function):
    """What it was given; its backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return t.detach()  # not a view: whoever gets it may write to it

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(MESSAGE)


class Gone:
    """What autograd keeps in the place of a weight."""


class Keep:
    """What autograd keeps of what it is given: no weights. It knows no model: a graph may outlive
    that."""

    def __init__(self, resident: tuple[int, int], passing: Sequence[tuple[int, int]]) -> None:
        self.resident = resident  # the addresses of the VBAR,
        self.passing = passing  # and of the ring

    def __call__(self, tensor: torch.Tensor) -> Any:
        plain = tensor.device.type == "cuda" and not isinstance(tensor, Parked)
        if plain and self.knows(tensor.data_ptr()):
            return Gone()
        return tensor.detach(), tensor._version

    def knows(self, at: int) -> bool:
        """Whether an address is one of weights in use."""
        return any(low <= at < high for low, high in (self.resident, *self.passing))


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, Gone):
        raise RuntimeError(MESSAGE)
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError("a tensor that is needed for the gradient was changed in place")
    return tensor
