"""One redirected operator: arguments to the CPU, the CPU's kernel, results back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ebbtide import _sim
from ebbtide.sim.operators.asserts import asserted
from ebbtide.sim.operators.capture import capture, refuse_capture
from ebbtide.sim.operators.cost import formula
from ebbtide.sim.operators.memory import CPU, alias, forget, lift, lifted, reach, reach_all, span
from ebbtide.sim.operators.randomness import Draw, default_from, draw

READ, WRITE = 1, 2
MOST_RANGES = 1024  # that one call of touched() takes
# What an argument can be, by its type in the schema.
TENSOR, TENSORS, DEVICE = 0, 1, 2
KINDS = {
    "Tensor": TENSOR,
    "Optional[Tensor]": TENSOR,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": TENSORS,
    "Optional[List[Tensor]]": TENSORS,
    "Device": DEVICE,
    "Optional[Device]": DEVICE,
}

Tensor = torch.Tensor
Function = Callable[..., Any]
_stream_of = torch._C._cuda_getCurrentRawStream
_catch_up, _touched = _sim.catch_up, _sim.touched
_devices = [torch.device("cuda", i) for i in range(16)]

# Operators that take tensors of another device on purpose: indices, lengths, small parameters.
# The first tensor says where they run.
MIXES_DEVICES = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
    "aten::_foreach_copy_",
    "aten::_ctc_loss.Tensor",
    "aten::_ctc_loss",
    "aten::_ctc_loss_backward",
    "aten::_ctc_loss_backward.Tensor",
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
}

# On a GPU these wait for the stream: what they return has a shape that only the data decides.
WAITS = {
    "aten::nonzero",
    "aten::nonzero.out",
    "aten::masked_select",
    "aten::masked_select.out",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
    "aten::equal",
    "aten::_to_sparse",
    "aten::_to_sparse.sparse_dim",
    "aten::_to_sparse_csr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_bsc",
}

# These wait where an index is a mask, of which the data decides how much it selects.
INDEXES = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::_unsafe_index.Tensor",
    "aten::index_put_",
    "aten::_index_put_impl_",
}

# The CPU's kernels write past the end of an out= whose strides they did not expect.
FRESH_OUT = {"aten::tril.out", "aten::triu.out"}

_NO_KERNEL = re.compile(r"not implemented for '|Could not run 'aten::|not (?:been )?implemented")
_NOT_RESIZABLE = "that is not resizable"
_NO_NUMBER = "to Tensor"  # the end of "Unable to cast 5 to Tensor"


def _differ(name: str, one: Any, other: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (when checking the arguments of {name})"
    )


def _explained(name: str, error: Exception) -> Exception:
    """The CPU's refusal of a dtype, with the operator's name; any other error as it is."""
    if "simulated GPU" in str(error):
        return error  # it has been explained
    on_device = asserted(name, error)
    if on_device is not None:
        return on_device
    if isinstance(error, NotImplementedError) or _NO_KERNEL.search(str(error)):
        first = str(error).split("\n", 1)[0]
        return type(error)(
            f"{name} cannot run on the simulated GPU: the CPU has no kernel for it with these "
            f"dtypes and layouts ({first})"
        )
    return error


class Plan:
    """What is known of an operator before it is called."""

    def __init__(self, op: Any, kernel: Function | None, writes: frozenset[str]) -> None:
        schema = op._schema
        self.name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.kernel = op._op if kernel is None else kernel
        self.strict = self.name not in MIXES_DEVICES
        self.flops = formula(schema.name)
        arguments = schema.arguments
        self.names = [a.name for a in arguments]
        self.positions = {name: i for i, name in enumerate(self.names)}
        infos = [a.alias_info for a in arguments]
        written = [
            (info is not None and info.is_write) or name in writes
            for info, name in zip(infos, self.names, strict=True)
        ]
        self.outs = [a.name for a in arguments if a.is_out]
        # (place, name, kind, access) of each argument that may have to be converted.
        self.inputs = [
            (i, a.name, KINDS[str(a.type)], READ | WRITE if written[i] else READ)
            for i, a in enumerate(arguments)
            if str(a.type) in KINDS and not a.is_out
        ]
        # Which argument each result is, where it is one.
        sets = {
            next(iter(info.before_set)): name
            for info, name in zip(infos, self.names, strict=True)
            if info is not None and info.is_write and info.before_set
        }
        self.results = [
            sets.get(next(iter(r.alias_info.before_set), "")) if r.alias_info is not None else None
            for r in schema.returns
        ]
        self.generator = any(str(a.type) == "Optional[Generator]" for a in arguments)
        self.random = torch.Tag.nondeterministic_seeded in op.tags and not self.generator
        self.waits = self.name in WAITS
        self.indexes = self.name in INDEXES

    def waits_for(self, args: Any) -> bool:
        """Whether a GPU's operator would wait for the stream."""
        return self.waits or (
            self.indexes
            and len(args) > 1
            and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            and not (len(args) > 2 and args[2].numel() == 1)  # that is masked_fill_
        )

    def argument(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        place = self.positions[name]
        return args[place] if place < len(args) else kwargs.get(name)

    def run(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        index: int,
        dice: Callable[[], torch.Generator] | None = None,
    ) -> Any:
        """The kernel, with the random numbers of a device, or those of `dice`."""
        if self.generator:
            place = self.positions["generator"]
            given = args[place] if place < len(args) else kwargs.get("generator")
            made = draw(given, index) if dice is None else dice()
            if place < len(args):
                args[place] = made
            else:
                kwargs["generator"] = made
            return self.kernel(*args, **kwargs)
        if self.random:
            with default_from(draw(None, index) if dice is None else dice()):
                return self.kernel(*args, **kwargs)
        return self.kernel(*args, **kwargs)


def tell(index: int, stream: int, name: str, flops: float, ranges: list[int]) -> None:
    """Tell the stream what an operator has read and written."""
    if len(ranges) <= 3 * MOST_RANGES:
        _touched(index, stream, name, flops, *ranges)
        return
    for start in range(0, len(ranges), 3 * MOST_RANGES):
        part = ranges[start : start + 3 * MOST_RANGES]
        _touched(index, stream, name, 0.0 if start else flops, *part)


# ---- results -------------------------------------------------------------------------------------


def _origin(tensor: Tensor, value: Any) -> Tensor | None:
    """The CUDA tensor among the arguments whose storage a result lies in."""
    if isinstance(value, Tensor):
        if value.is_cuda and value.layout == torch.strided:
            storage = value.untyped_storage()
            if storage.data_ptr() == tensor.untyped_storage().data_ptr() and storage.nbytes():
                return value
    elif isinstance(value, (list, tuple)):
        for v in value:
            found = _origin(tensor, v)
            if found is not None:
                return found
    return None


def _again(result: Tensor, args: Any, device: torch.device) -> Tensor:
    """A result that lies in an argument's memory: a CUDA tensor over that memory."""
    origin = _origin(result, args)
    if origin is None or result.is_conj() or result.is_neg():
        return lift(result, device)
    other = torch.empty(0, dtype=result.dtype, device=device)
    storage = origin.untyped_storage()
    return other.set_(storage, result.storage_offset(), result.size(), result.stride())


def to_device(result: Any, args: Any, device: torch.device, ranges: list[int], inputs: int) -> Any:
    """New results as CUDA tensors; `ranges` gets what was written. The first `inputs` entries of
    it are what the arguments reach over."""
    if isinstance(result, Tensor):
        if result.is_cuda:
            return result
        if result.layout != torch.strided:
            from ebbtide.sim.operators.sparse import to_cuda

            return to_cuda(result, device, ranges)
        at = result.data_ptr()
        for i in range(0, inputs, 3):
            if 0 <= at - ranges[i] < ranges[i + 1]:
                return _again(result, args, device)
        made, start, size = lifted(result, device)
        if size:
            ranges += (start, size, WRITE)
        return made
    if isinstance(result, (list, tuple)):
        made = [to_device(r, args, device, ranges, inputs) for r in result]
        return made if isinstance(result, list) else tuple(made)
    return result


def _finish(
    plan: Plan,
    result: Any,
    args: Any,
    kwargs: dict[str, Any],
    index: int,
    ranges: list[int],
    read: int,
) -> Any:
    """What the operator returns: arguments where its schema says so, else new CUDA tensors."""
    results = plan.results
    if not results:
        return None
    device = _devices[index]
    if len(results) == 1:
        if results[0] is None:
            return to_device(result, args, device, ranges, read)
        own = plan.argument(results[0], args, kwargs)
        if isinstance(result, Tensor) and result.size() != own.size():
            # The kernel gave its alias another shape, within the memory there was.
            own.as_strided_(result.size(), result.stride(), result.storage_offset())
            forget()
        return own
    return tuple(
        plan.argument(name, args, kwargs)
        if name is not None
        else to_device(result[i], args, device, ranges, read)
        for i, name in enumerate(results)
    )


# ---- out= ----------------------------------------------------------------------------------------


def _buffer(out: Any, fresh: bool) -> Any:
    """What the kernel gets in place of an out= tensor: the same memory, or a buffer of its own that
    it can make as large as it needs."""
    if isinstance(out, (list, tuple)):
        return [_buffer(o, fresh) for o in out]
    if not isinstance(out, Tensor) or not out.is_cuda:
        return out
    if fresh or out.numel() == 0:
        return torch.empty(0, dtype=out.dtype, device=CPU)
    return alias(out)


def _settle(out: Any, buffer: Any, ranges: list[int]) -> None:
    """Give an out= tensor the shape that the kernel gave its buffer, and the values."""
    if isinstance(out, (list, tuple)):
        for o, b in zip(out, buffer, strict=True):
            _settle(o, b, ranges)
        return
    if not isinstance(out, Tensor) or not out.is_cuda:
        return
    shared = buffer.data_ptr() == out.data_ptr() and buffer.numel() > 0
    if out.size() != buffer.size():
        if not shared:
            # As large as the strides need it, which may leave gaps.
            out.resize_(span(buffer)[1] // buffer.element_size())
            # What it held is copied by the stream, and may not come after what is written now.
            _catch_up(out.get_device(), _stream_of(out.get_device()))
        out.as_strided_(buffer.size(), buffer.stride(), out.storage_offset())
    if not shared and buffer.numel():
        alias(out).copy_(buffer)
    start, size = span(out)
    if size:
        ranges += (start, size, WRITE)


def _run_into(
    plan: Plan, args: list[Any], kwargs: dict[str, Any], index: int, ranges: list[int]
) -> list[Any]:
    """Run an operator with out= arguments. Their memory is used as it is where the result fits;
    where a kernel finds it too small, it runs again into buffers of its own."""
    outs = {name: plan.argument(name, args, kwargs) for name in plan.outs}
    for out in outs.values():
        for o in out if isinstance(out, (list, tuple)) else [out]:
            if o is not None and o.get_device() != index:
                raise _differ(plan.name, _devices[index], o.device)
    for fresh in (True,) if plan.name in FRESH_OUT else (False, True):
        buffers = {name: _buffer(out, fresh) for name, out in outs.items()}
        kwargs.update(buffers)
        try:
            plan.run(args, kwargs, index)
            break
        except RuntimeError as error:
            if fresh or _NOT_RESIZABLE not in str(error):
                raise
    for name, out in outs.items():
        _settle(out, buffers[name], ranges)
    return list(outs.values())


def _run_resizing(
    plan: Plan, args: list[Any], kwargs: dict[str, Any], own: Tensor, index: int
) -> Any:
    """Run an in-place operator that makes its tensor larger: on a copy of it."""
    name = plan.results[0]
    place = plan.positions[name]
    copy = alias(own).clone()
    if place < len(args):
        args[place] = copy
    else:
        kwargs[name] = copy
    result = plan.run(args, kwargs, index)
    _settle(own, copy, [])
    return result


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


# ---- captured ------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


def _flat(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.is_cuda]


def _capture(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cpu_args: list[Any],
    cpu_kwargs: dict[str, Any],
    index: int,
    ranges: list[int],
    finish: Callable[[Any], Any],
) -> Any:
    """The operator becomes a part of the graph that its stream is capturing (capture.py)."""
    stream = _stream_of(index)
    if plan.waits_for(args):
        refuse_capture(plan.name, index)
    flops = plan.flops(*cpu_args, **cpu_kwargs) if plan.flops is not None else 0.0
    names = {*plan.outs, *(name for _, name, _, access in plan.inputs if access & WRITE)}
    written = [t for name in names for t in _flat(plan.argument(name, args, kwargs))]
    generator = plan.argument("generator", args, kwargs) if plan.generator else None
    dice = Draw(generator, index) if plan.generator or plan.random else None
    # What the graph keeps may own no memory, so the outputs are known to it by aliases.
    outputs: list[Tensor] = []

    def run() -> Any:
        if outputs:
            plan.run(list(cpu_args), dict(cpu_kwargs), index, dice)
            return outputs
        if not plan.outs:
            return plan.run(list(cpu_args), dict(cpu_kwargs), index, dice)
        made = _run_into(plan, cpu_args, cpu_kwargs, index, ranges)
        for name, out in zip(plan.outs, made, strict=True):
            aliases = [alias(o) for o in _flat(out)]
            outputs.extend(aliases)
            cpu_kwargs[name] = aliases if isinstance(out, (list, tuple)) else aliases[0]
        return outputs

    def note(again: Callable[[], None]) -> None:
        most = 3 * MOST_RANGES
        _sim.captured(index, stream, plan.name, flops, again, *ranges[:most])
        for start in range(most, len(ranges), most):  # the rest is touched by works without effect
            part = ranges[start : start + most]
            _sim.captured(index, stream, plan.name, 0.0, _nothing, *part)

    return capture(run, finish, written, note)


def _mixed(
    plan: Plan, value: list[Any], index: int, on_cpu: bool, ranges: list[int], access: int
) -> tuple[list[Any], int, bool]:
    """A list in which tensors are missing or on several devices; what is known of those by now."""
    made = []
    for v in value:
        if v is not None and v.is_cuda:
            at = v.get_device()
            if index < 0:
                if on_cpu:
                    raise _differ(plan.name, "cpu", v.device)
                index = at
            elif index != at:
                raise _differ(plan.name, _devices[index], v.device)
            v, start, size = reach(v)
            if size:
                ranges += (start, size, access)
        elif v is not None and (plan.strict or index < 0) and v.dim():
            if index >= 0:
                raise _differ(plan.name, _devices[index], v.device)
            on_cpu = True
        made.append(v)
    return made, index, on_cpu


# ---- the call ------------------------------------------------------------------------------------


def redirect(
    op: Any, kernel: Function | None = None, writes: frozenset[str] = frozenset()
) -> Function:
    """The function to register for an operator's CUDA kernel: `kernel`, or the CPU's own, runs."""
    plan = Plan(op, kernel, writes)
    # Locals are found faster than attributes, and this is called for every operator of a program.
    name, inputs, strict, flops_of, run = plan.name, plan.inputs, plan.strict, plan.flops, plan.run
    plain = not (plan.generator or plan.random)
    kernel_of = plan.kernel
    results, outs, waits, indexes = plan.results, plan.outs, plan.waits, plan.indexes
    only = results[0] if len(results) == 1 else None
    one_new = len(results) == 1 and only is None and not outs

    def call(*args: Any, **kwargs: Any) -> Any:
        index = -1
        on_cpu = False
        ranges: list[int] = []
        cpu_args = list(args)
        count = len(cpu_args)
        cpu_kwargs = kwargs.copy() if kwargs else kwargs
        for place, argument, kind, access in inputs:
            if place < count:
                value = cpu_args[place]
            elif kwargs:
                value = kwargs.get(argument)
            else:
                break
            if value is None:
                continue
            if kind == TENSOR:
                if not isinstance(value, Tensor):
                    continue  # a number
                if value.is_cuda:
                    at = value.get_device()
                    if index < 0:
                        if on_cpu:
                            raise _differ(name, "cpu", value.device)
                        index = at
                    elif index != at:
                        raise _differ(name, _devices[index], value.device)
                    new, start, size = reach(value)
                    if size:
                        ranges += (start, size, access)
                else:
                    if (strict or index < 0) and (value.dim() or access & WRITE):
                        if index >= 0:
                            raise _differ(name, _devices[index], value.device)
                        on_cpu = True
                    continue
            elif kind == TENSORS:
                if index < 0:
                    for v in value:
                        if v is not None:
                            index = v.get_device()
                            break
                read = len(ranges)
                new = reach_all(value, index, ranges, access) if index >= 0 else None
                if new is None:
                    del ranges[read:]
                    new, index, on_cpu = _mixed(plan, value, index, on_cpu, ranges, access)
                elif on_cpu:
                    raise _differ(name, "cpu", _devices[index])
            else:
                new = CPU
                if index < 0 and value.type == "cuda":
                    index = value.index if value.index is not None else -1
            if place < count:
                cpu_args[place] = new
            else:
                cpu_kwargs[argument] = new
        if index < 0:
            index = _index_of_outs(plan, args, kwargs)
            if on_cpu:
                raise _differ(name, "cpu", _devices[index])
        stream = _stream_of(index)
        read = len(ranges)
        if _catch_up(index, stream):

            def finish(result: Any) -> Any:
                return _finish(plan, result, args, kwargs, index, ranges, read)

            try:
                return _capture(plan, args, kwargs, cpu_args, cpu_kwargs, index, ranges, finish)
            except (RuntimeError, IndexError) as error:
                if _NO_NUMBER in str(error):
                    return call(*_as_tensors(inputs, args), **kwargs)
                other = _explained(name, error)
                if other is error:
                    raise
                raise other from None
        flops = flops_of(*cpu_args, **cpu_kwargs) if flops_of is not None else 0.0
        try:
            if outs:
                result = _run_into(plan, cpu_args, cpu_kwargs, index, ranges)
            elif plain:
                result = kernel_of(*cpu_args, **cpu_kwargs)
            else:
                result = run(cpu_args, cpu_kwargs, index)
        except (RuntimeError, IndexError) as error:
            if _NO_NUMBER in str(error):
                return call(*_as_tensors(inputs, args), **kwargs)
            if only is None or outs or _NOT_RESIZABLE not in str(error):
                other = _explained(name, error)
                if other is error:
                    raise
                raise other from None
            forget()  # an alias may have got another shape
            own = plan.argument(only, args, kwargs)
            result = own
            _run_resizing(plan, cpu_args, cpu_kwargs, own, index)
        if one_new:
            result = to_device(result, args, _devices[index], ranges, read)
        else:
            result = _finish(plan, result, args, kwargs, index, ranges, read)
        tell(index, stream, name, flops, ranges)
        if waits or (indexes and plan.waits_for(args)):
            torch.cuda.current_stream(index).synchronize()
        return result

    return call


def _index_of_outs(plan: Plan, args: Any, kwargs: dict[str, Any]) -> int:
    """The device of an operator without tensors to read: that of its out=, or the current one."""
    for name in plan.outs:
        out = plan.argument(name, args, kwargs)
        for o in out if isinstance(out, (list, tuple)) else [out]:
            if o is not None and o.is_cuda:
                return o.get_device()
    return torch.cuda.current_device()
