"""One redirected operator: arguments to the CPU, the CPU's kernel, results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide import _sim
from ebbtide.sim.operators.capture import capture
from ebbtide.sim.operators.cost import formula
from ebbtide.sim.operators.memory import CPU, alias, lift, span
from ebbtide.sim.operators.randomness import default_from, draw

READ, WRITE = 1, 2

Tensor = torch.Tensor
_stream_of = torch._C._cuda_getCurrentRawStream

# Operators that take tensors of another device on purpose: indices, lengths, small parameters.
MIXES_DEVICES = {
    "aten::index.Tensor",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::_pack_padded_sequence",
    "aten::_ctc_loss.Tensor",
    "aten::_ctc_loss",
    "aten::ctc_loss_backward",
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
}


class Devices:
    """The one CUDA device of an operator's arguments, found while they are walked through."""

    __slots__ = ("cpu", "index", "strict")

    def __init__(self, strict: bool) -> None:
        self.index = -1
        self.strict = strict
        self.cpu = False

    def see(self, tensor: Tensor) -> bool:
        """True: a CUDA tensor, to be aliased. Mixed devices raise as they do on a GPU."""
        if tensor.is_cuda:
            index = tensor.device.index
            if self.index < 0:
                self.index = index
            elif self.index != index and self.strict:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, cuda:{self.index} and cuda:{index}!"
                )
            return True
        if tensor.dim() > 0 and tensor.device == CPU:
            self.cpu = True
        return False

    def settle(self) -> int:
        if self.strict and self.cpu and self.index >= 0:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{self.index} and cpu!"
            )
        return self.index


class Redirect:
    """The function that PyTorch calls in place of the CUDA kernel of one operator."""

    def __init__(self, op: Any, kernel: Any = None, writes: frozenset[str] = frozenset()) -> None:
        schema = op._schema
        self.kernel = op if kernel is None else kernel
        self.name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.strict = self.name not in MIXES_DEVICES
        self.flops = formula(schema.name)
        arguments = schema.arguments
        self.positions = {a.name: i for i, a in enumerate(arguments)}
        self.names = [a.name for a in arguments]
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.written = writes | {a.name for a, w in zip(arguments, written, strict=True) if w}
        # out= arguments may have to be resized: the kernel gets buffers of its own.
        self.outs = frozenset(a.name for a in arguments if a.is_out)
        # Which argument each result is, where it is one.
        sets = {
            next(iter(a.alias_info.before_set)): a.name
            for a, w in zip(arguments, written, strict=True)
            if w and a.alias_info.before_set
        }
        self.results = [
            sets.get(next(iter(r.alias_info.before_set), None))
            if r.alias_info is not None
            else None
            for r in schema.returns
        ]
        self.generator = any(str(a.type) == "Optional[Generator]" for a in arguments)
        self.random = torch.Tag.nondeterministic_seeded in op.tags and not self.generator

    # -- arguments ---------------------------------------------------------------------------------

    def _convert(self, name: str, value: Any, devices: Devices, ranges: list[int]) -> Any:
        if isinstance(value, Tensor):
            if not devices.see(value):
                return value
            if name in self.outs:
                return torch.empty(0, dtype=value.dtype)
            start, size = span(value)
            if size:
                ranges += (start, size, READ | WRITE if name in self.written else READ)
            return alias(value)
        if isinstance(value, (list, tuple)):
            if value and isinstance(value[0], (Tensor, type(None))):
                return [self._convert(name, v, devices, ranges) for v in value]
            return value
        if isinstance(value, torch.device) and value.type == "cuda":
            if devices.index < 0:
                devices.index = (
                    value.index if value.index is not None else torch.cuda.current_device()
                )
            return CPU
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices = Devices(self.strict)
        ranges: list[int] = []
        convert = self._convert
        names = self.names
        cpu_args = [convert(names[i], a, devices, ranges) for i, a in enumerate(args)]
        cpu_kwargs = {k: convert(k, a, devices, ranges) for k, a in kwargs.items()}
        index = devices.settle()
        if index < 0:
            index = torch.cuda.current_device()
        stream = _stream_of(index)
        if _sim.catch_up(index, stream):
            return self._capture(args, kwargs, cpu_args, cpu_kwargs, index, ranges)
        flops = self.flops(*cpu_args, **cpu_kwargs) if self.flops is not None else 0.0
        result = self._run(cpu_args, cpu_kwargs, index)
        result = self._return(result, args, kwargs, cpu_kwargs, index, ranges)
        _sim.touched(index, stream, self.name, flops, *ranges)
        return result

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cpu_args: list[Any],
        cpu_kwargs: dict[str, Any],
        index: int,
        ranges: list[int],
    ) -> Any:
        flops = self.flops(*cpu_args, **cpu_kwargs) if self.flops is not None else 0.0
        written = [
            tensor
            for name in {*self.written, *self.outs}
            for value in [self._argument(name, args, kwargs)]
            for tensor in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(tensor, Tensor) and tensor.is_cuda
        ]

        def note(again: Callable[[], None]) -> None:
            _sim.captured(index, _stream_of(index), self.name, flops, again, *ranges)

        return capture(
            lambda: self._run(list(cpu_args), dict(cpu_kwargs), index),
            lambda result: self._return(result, args, kwargs, cpu_kwargs, index, ranges),
            written,
            note,
        )

    def _run(self, args: list[Any], kwargs: dict[str, Any], index: int) -> Any:
        if self.generator:
            place = self.positions["generator"]
            if place < len(args):
                args[place] = draw(args[place], index)
            else:
                kwargs["generator"] = draw(kwargs.get("generator"), index)
        elif self.random:
            with default_from(index):
                return self.kernel(*args, **kwargs)
        return self.kernel(*args, **kwargs)

    # -- results -----------------------------------------------------------------------------------

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self.positions[name]
        return args[place] if place < len(args) else kwargs.get(name)

    def _fill_out(self, out: Tensor, result: Tensor, ranges: list[int]) -> Tensor:
        """An out= argument gets the result: resized as PyTorch does it, strides kept."""
        if out.size() != result.size():
            torch.ops.aten._resize_output_(out, result.size(), out.device)
        alias(out).copy_(result)
        start, size = span(out)
        if size:
            ranges += (start, size, WRITE)
        return out

    def _lift(self, result: Any, device: torch.device, ranges: list[int]) -> Any:
        if isinstance(result, Tensor):
            if result.is_cuda:
                return result
            lifted = lift(result, device)
            start, size = span(lifted)
            if size:
                ranges += (start, size, WRITE)
            return lifted
        if isinstance(result, (list, tuple)):
            return type(result)(self._lift(r, device, ranges) for r in result)
        return result

    def _return(
        self,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cpu_kwargs: dict[str, Any],
        index: int,
        ranges: list[int],
    ) -> Any:
        for name in self.outs:
            out = self._argument(name, args, kwargs)
            if isinstance(out, Tensor):
                self._fill_out(out, cpu_kwargs[name], ranges)
            elif out is not None:
                for o, r in zip(out, cpu_kwargs[name], strict=True):
                    self._fill_out(o, r, ranges)
        if not self.results:
            return None
        device = torch.device("cuda", index)
        if len(self.results) == 1:
            name = self.results[0]
            if name is not None:
                return self._argument(name, args, kwargs)
            return self._lift(result, device, ranges)
        return tuple(
            self._argument(name, args, kwargs)
            if name is not None
            else self._lift(r, device, ranges)
            for name, r in zip(self.results, result, strict=True)
        )


def redirect(
    op: Any, kernel: Callable[..., Any] | None = None, writes: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """The function to register for an operator's CUDA kernel: `kernel`, or the CPU's own, runs."""
    return Redirect(op, kernel, writes).__call__
