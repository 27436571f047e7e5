"""What a redirected operator returns, and what it was given to write to (`out=`)."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide import _sim
from ebbtide.sim.operators.memory import CPU, Ranges, alias, forget, lift, span, storage_of
from ebbtide.sim.operators.plan import WRITE, Plan, differ

Tensor = torch.Tensor
DEVICES = [torch.device("cuda", i) for i in range(16)]
NOT_RESIZABLE = "that is not resizable"

_stream_of = torch._C._cuda_getCurrentRawStream
_lift = _sim.lift

# The CPU's kernels write past the end of an out= whose strides they did not expect.
FRESH_OUT = {"aten::tril.out", "aten::triu.out"}


# ---- new -------------------------------------------------------------------------------------


def _origin(tensor: Tensor, value: Any) -> Tensor | None:
    """The CUDA tensor among the arguments whose storage a result lies in."""
    if isinstance(value, Tensor):
        if value.is_cuda and value.layout == torch.strided:
            address, size = storage_of(value)
            if address == tensor.untyped_storage().data_ptr() and size:
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


def to_device(result: Any, args: Any, device: torch.device, ranges: Ranges, inputs: int) -> Any:
    """New results as CUDA tensors; `ranges` gets what was written. The first `inputs` of them are
    what the arguments reach over."""
    if isinstance(result, Tensor):
        made = _lift(result, device, ranges, inputs)
        if made is not None:
            return made
        if result.is_cuda:
            return result
        if result.layout != torch.strided:
            from ebbtide.sim.operators.sparse import to_cuda

            return to_cuda(result, device, ranges)
        return _again(result, args, device)
    if isinstance(result, (list, tuple)):
        made = [to_device(r, args, device, ranges, inputs) for r in result]
        return made if isinstance(result, list) else tuple(made)
    return result


def finish(
    plan: Plan,
    result: Any,
    args: Any,
    kwargs: dict[str, Any],
    index: int,
    ranges: Ranges,
    read: int,
    host: tuple[int, ...] = (),
) -> Any:
    """What the operator returns: arguments where its schema says so, else new CUDA tensors. The
    results at the places `host` stay where they are."""
    results = plan.results
    if not results:
        return None
    device = DEVICES[index]
    if len(results) == 1:
        if results[0] is None:
            return to_device(result, args, device, ranges, read)
        own = plan.argument(results[0], args, kwargs)
        if isinstance(result, Tensor) and result.size() != own.size():
            # The kernel gave its alias another shape, within the memory there was.
            own.as_strided_(result.size(), result.stride(), result.storage_offset())
            forget()
        return own
    made = []
    for place, name in enumerate(results):
        if name is not None:
            made.append(plan.argument(name, args, kwargs))
        elif place in host:
            made.append(result[place])
        else:
            made.append(to_device(result[place], args, device, ranges, read))
    return tuple(made)


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


def _settle(out: Any, buffer: Any, ranges: Ranges) -> None:
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
            _sim.catch_up(out.get_device(), _stream_of(out.get_device()))
        out.as_strided_(buffer.size(), buffer.stride(), out.storage_offset())
    if not shared and buffer.numel():
        alias(out).copy_(buffer)
    ranges.add(*span(out), WRITE)


def run_into(
    plan: Plan, args: list[Any], kwargs: dict[str, Any], index: int, ranges: Ranges
) -> list[Any]:
    """Run an operator with out= arguments. Their memory is used as it is where the result fits;
    where a kernel finds it too small, it runs again into buffers of its own."""
    outs = {name: plan.argument(name, args, kwargs) for name in plan.outs}
    for out in outs.values():
        for o in out if isinstance(out, (list, tuple)) else [out]:
            if o is not None and o.get_device() != index:
                raise differ(plan.name, DEVICES[index], o.device)
    for fresh in (True,) if plan.name in FRESH_OUT else (False, True):
        buffers = {name: _buffer(out, fresh) for name, out in outs.items()}
        kwargs.update(buffers)
        try:
            plan.run(args, kwargs, index)
            break
        except RuntimeError as error:
            if fresh or NOT_RESIZABLE not in str(error):
                raise
    for name, out in outs.items():
        _settle(out, buffers[name], ranges)
    return list(outs.values())


def run_resizing(
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
    _settle(own, copy, Ranges())
    return result


def index_of_outs(plan: Plan, args: Any, kwargs: dict[str, Any]) -> int:
    """The device of an operator without tensors to read: that of its out=, or the current one."""
    for name in plan.outs:
        for out in tensors_of(plan.argument(name, args, kwargs)):
            return out.get_device()
    return torch.cuda.current_device()


def tensors_of(value: Any) -> list[Tensor]:
    """The CUDA tensors that an argument is or holds."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.is_cuda]
