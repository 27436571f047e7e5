"""One redirected operator: arguments to the CPU, the CPU's kernel, results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide import _sim
from ebbtide.sim.operators.capture import capture, refuse_capture
from ebbtide.sim.operators.memory import CPU, Ranges, alias, forget
from ebbtide.sim.operators.plan import TENSOR, TENSORS, WRITE, Function, Plan, differ, explained
from ebbtide.sim.operators.randomness import Draw
from ebbtide.sim.operators.results import (
    DEVICES,
    NOT_RESIZABLE,
    finish,
    index_of_outs,
    run_into,
    run_resizing,
    tensors_of,
    to_device,
)

Tensor = torch.Tensor
_stream_of = torch._C._cuda_getCurrentRawStream
_catch_up, _touched, _reach, _convert = _sim.catch_up, _sim.touched, _sim.reach, _sim.convert

_NO_NUMBER = "to Tensor"  # the end of "Unable to cast 5 to Tensor"


# ---- arguments -----------------------------------------------------------------------------------


class _Arguments:
    """Arguments on their way to the CPU, one by one: the cases that _sim.convert() leaves."""

    def __init__(self, plan: Plan, ranges: Ranges) -> None:
        self.plan = plan
        self.ranges = ranges
        self.index = -1  # the device, once a tensor has told
        self.on_cpu = False  # a CPU tensor was there, that may not mix with others

    def tensor(self, value: Tensor, access: int, may_write: bool = True) -> Tensor:
        if not value.is_cuda:
            counts = value.dim() or (may_write and access & WRITE)
            if (self.plan.strict or self.index < 0) and counts:
                if self.index >= 0:
                    raise differ(self.plan.name, DEVICES[self.index], value.device)
                self.on_cpu = True
            return value
        at = value.get_device()
        if self.index < 0:
            if self.on_cpu:
                raise differ(self.plan.name, "cpu", value.device)
            self.index = at
        elif self.index != at:
            raise differ(self.plan.name, DEVICES[self.index], value.device)
        return _reach(value, self.ranges, access)

    def convert(self, value: Any, kind: int, access: int) -> Any:
        if kind == TENSOR:
            return self.tensor(value, access) if isinstance(value, Tensor) else value
        if kind == TENSORS:
            return [v if v is None else self.tensor(v, access, may_write=False) for v in value]
        if self.index < 0 and value.type == "cuda":
            self.index = value.index if value.index is not None else -1
        return CPU


def _slowly(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], ranges: Ranges
) -> tuple[int, list[Any], dict[str, Any]]:
    """The device, and the arguments for the CPU's kernel."""
    arguments = _Arguments(plan, ranges)
    cpu_args, cpu_kwargs = list(args), dict(kwargs)
    for place, name, kind, access in plan.inputs:
        value = plan.argument(name, args, kwargs)
        if value is None:
            continue
        made = arguments.convert(value, kind, access)
        if place < len(cpu_args):
            cpu_args[place] = made
        else:
            cpu_kwargs[name] = made
    index = arguments.index
    if index < 0:
        index = index_of_outs(plan, args, kwargs)
        if arguments.on_cpu:
            raise differ(plan.name, "cpu", DEVICES[index])
    return index, cpu_args, cpu_kwargs


def _as_tensors(inputs: list[tuple[int, str, int, int]], args: tuple[Any, ...]) -> list[Any]:
    """Arguments in which numbers that stand for tensors are tensors. Python is given a number where
    C++ was given one as a tensor; few operators take it back. Of the dtype that the operator will
    compute in, so that it decides nothing by it."""
    made = list(args)
    tensors = [args[i] for i, _, _, _ in inputs if i < len(args) and isinstance(args[i], Tensor)]
    for place, _, kind, _ in inputs:
        if kind == TENSOR and place < len(made) and isinstance(made[place], (int, float, complex)):
            dtype = torch.result_type(tensors[0], made[place]) if tensors else None
            made[place] = torch.scalar_tensor(made[place], dtype=dtype, device=CPU)
    return made


# ---- the call ------------------------------------------------------------------------------------


def redirect(
    op: Any, kernel: Function | None = None, writes: frozenset[str] = frozenset()
) -> Function:
    """The function to register for an operator's CUDA kernel: `kernel`, or the CPU's own, runs."""
    plan = Plan(op, kernel, writes)
    # Locals are found faster than attributes, and this is called for every operator of a program.
    name, signature, flops_of, kernel_of = plan.name, plan.signature, plan.flops, plan.kernel
    outs, waits, indexes, draws = plan.outs, plan.waits, plan.indexes, plan.draws
    plain = not (plan.generator or plan.random)
    only = plan.results[0] if len(plan.results) == 1 else None
    one_new = len(plan.results) == 1 and only is None and not outs

    def call(*args: Any, **kwargs: Any) -> Any:
        ranges = Ranges()
        converted = _convert(signature, args, kwargs, ranges)
        if converted is not None:
            index, cpu_args = converted
            cpu_kwargs = kwargs.copy() if kwargs else kwargs
        else:
            index, cpu_args, cpu_kwargs = _slowly(plan, args, kwargs, ranges)
        stream = _stream_of(index)
        read = len(ranges)
        if _catch_up(index, stream):

            def done(result: Any) -> Any:
                return finish(plan, result, args, kwargs, index, ranges, read)

            try:
                return _capture(plan, args, kwargs, cpu_args, cpu_kwargs, index, ranges, done)
            except (RuntimeError, IndexError) as error:
                if _NO_NUMBER in str(error):
                    return call(*_as_tensors(plan.inputs, args), **kwargs)
                other = explained(name, error)
                if other is error:
                    raise
                raise other from None
        flops = flops_of(*cpu_args, **cpu_kwargs) if flops_of is not None else 0.0
        try:
            if outs:
                result = run_into(plan, cpu_args, cpu_kwargs, index, ranges)
            elif plain or not draws(cpu_args, cpu_kwargs):
                result = kernel_of(*cpu_args, **cpu_kwargs)
            else:
                result = plan.run(cpu_args, cpu_kwargs, index)
        except (RuntimeError, IndexError) as error:
            if _NO_NUMBER in str(error):
                return call(*_as_tensors(plan.inputs, args), **kwargs)
            if only is None or outs or NOT_RESIZABLE not in str(error):
                other = explained(name, error)
                if other is error:
                    raise
                raise other from None
            forget()  # an alias may have got another shape
            result = plan.argument(only, args, kwargs)
            run_resizing(plan, cpu_args, cpu_kwargs, result, index)
        if one_new:
            result = to_device(result, args, DEVICES[index], ranges, read)
        else:
            result = finish(plan, result, args, kwargs, index, ranges, read, plan.host)
        _touched(index, stream, name, flops, ranges)
        if waits or (indexes and plan.waits_for(args)):
            torch.cuda.current_stream(index).synchronize()
        return result

    return call


def _capture(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cpu_args: list[Any],
    cpu_kwargs: dict[str, Any],
    index: int,
    ranges: Ranges,
    done: Callable[[Any], Any],
) -> Any:
    """The operator becomes a part of the graph that its stream is capturing (capture.py)."""
    if plan.waits_for(args):
        refuse_capture(plan.name, index)
    names = {*plan.outs, *(name for _, name, _, access in plan.inputs if access & WRITE)}
    written = [t for name in names for t in tensors_of(plan.argument(name, args, kwargs))]
    flops = plan.flops(*cpu_args, **cpu_kwargs) if plan.flops is not None else 0.0
    generator = plan.argument("generator", args, kwargs) if plan.generator else None
    dice = Draw(generator, index) if plan.draws(args, kwargs) else None

    def run() -> Any:
        return plan.run(cpu_args, cpu_kwargs, index, dice)

    def run_first() -> Any:
        if not plan.outs:
            return run()
        made = run_into(plan, cpu_args, cpu_kwargs, index, ranges)
        # What the graph keeps may own no memory, so it knows the outputs by aliases.
        for name, out in zip(plan.outs, made, strict=True):
            aliases = [alias(o) for o in tensors_of(out)]
            cpu_kwargs[name] = aliases if isinstance(out, (list, tuple)) else aliases[0]
        return made

    def note(again: Callable[[], None]) -> None:
        _sim.captured(index, _stream_of(index), plan.name, flops, ranges, again)

    return capture(run_first, run, done, written, note)
