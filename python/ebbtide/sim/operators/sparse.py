"""Operators on sparse tensors: the same redirection, for tensors that consist of several."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide import _sim
from ebbtide.sim.operators.memory import CPU, Ranges, alias, span
from ebbtide.sim.operators.plan import READ, WRITE, Function, Plan, differ, explained

Tensor = torch.Tensor
aten = torch.ops.aten
_stream_of = torch._C._cuda_getCurrentRawStream
COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)

# The dispatch keys of sparse CUDA tensors, and those of the CPU that stand in for them.
KEYS = {"SparseCUDA": "SparseCPU", "SparseCsrCUDA": "SparseCsrCPU"}

# They describe a tensor, or put it together, and launch nothing.
NATIVE = {
    "aten::" + name
    for name in (
        "_indices",
        "_values",
        "indices",
        "values",
        "_nnz",
        "crow_indices",
        "col_indices",
        "ccol_indices",
        "row_indices",
        "sparse_dim",
        "dense_dim",
        "_dimI",
        "_dimV",
        "is_coalesced",
        "_coalesced_",
        "empty.memory_format",
        "empty_like",
        "clone",
        "copy_",
        "copy_sparse_to_sparse_",
        "resize_",
        "resize_as_sparse_",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_sparse_compressed_tensor_with_dims",
        "_pin_memory",
        "is_pinned",
        "_to_copy",
    )
}


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that a tensor consists of, its values last."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return aten._indices(tensor), aten._values(tensor)
    if tensor.layout in COMPRESSED_ROWS:
        return aten.crow_indices(tensor), aten.col_indices(tensor), aten.values(tensor)
    return aten.ccol_indices(tensor), aten.row_indices(tensor), aten.values(tensor)


def rebuild(like: Tensor, made: list[Tensor], device: torch.device) -> Tensor:
    """A tensor of another's layout and shape from other parts."""
    if like.layout == torch.strided:
        return made[0]
    if like.layout == torch.sparse_coo:
        return aten._sparse_coo_tensor_with_dims_and_tensors(
            like.sparse_dim(),
            like.dense_dim(),
            like.size(),
            made[0],
            made[1],
            dtype=made[1].dtype,
            layout=like.layout,
            device=device,
            is_coalesced=like.is_coalesced(),
        )
    return aten._sparse_compressed_tensor_unsafe(
        *made, like.size(), dtype=made[-1].dtype, layout=like.layout, device=device
    )


def to_cpu(tensor: Tensor, ranges: Ranges, access: int) -> Tensor:
    """A CPU tensor of the same layout over the same memory."""
    made = []
    for part in parts(tensor):
        ranges.add(*span(part), access)
        made.append(alias(part))
    return rebuild(tensor, made, CPU)


def to_cuda(result: Any, device: torch.device, ranges: Ranges) -> Any:
    """New results, of any layout, as CUDA tensors."""
    if isinstance(result, (list, tuple)):
        return type(result)(to_cuda(r, device, ranges) for r in result)
    if not isinstance(result, Tensor) or result.is_cuda:
        return result
    made = [_sim.lift(part, device, ranges, 0) for part in parts(result)]
    return rebuild(result, made, device)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    pairs = zip(parts(a), parts(b), strict=True)
    return all(x.data_ptr() == y.data_ptr() and x.size() == y.size() for x, y in pairs)


def write_back(own: Tensor, result: Tensor, ranges: Ranges) -> None:
    """What a kernel made of an alias of `own` becomes its contents, if it is not already."""
    if own.layout == torch.strided:
        if own.size() != result.size():
            own.resize_(result.size())
        if own.data_ptr() != result.data_ptr():
            alias(own).copy_(result)
        return
    if own.size() == result.size() and _same_memory(own, result):
        if own.layout == torch.sparse_coo:
            aten._coalesced_(own, result.is_coalesced())
        return
    lifted = to_cuda(result, own.device, ranges)
    if own.layout == torch.sparse_coo:
        aten.sparse_resize_and_clear_(own, result.size(), result.sparse_dim(), result.dense_dim())
        aten.copy_sparse_to_sparse_(own, lifted)
        aten._coalesced_(own, result.is_coalesced())
    else:
        aten.resize_as_sparse_(own, lifted)
        for mine, new in zip(parts(own), parts(lifted), strict=True):
            mine.copy_(new)


def redirect_sparse(op: Any) -> Function:
    """The function to register for an operator's sparse CUDA kernel: the CPU's own runs."""
    plan = Plan(op, None, frozenset())
    access = {name: flags for _, name, _, flags in plan.inputs}
    access.update({name: WRITE for name in plan.outs})

    def call(*args: Any, **kwargs: Any) -> Any:
        ranges = Ranges()
        index = -1
        written: list[tuple[Tensor, Tensor]] = []

        def convert(name: str, value: Any) -> Any:
            nonlocal index
            if isinstance(value, (list, tuple)):
                return [convert(name, v) for v in value]
            if isinstance(value, torch.device):
                return CPU
            if not isinstance(value, Tensor) or not value.is_cuda:
                return value
            if index < 0:
                index = value.get_device()
            elif index != value.get_device():
                raise differ(plan.name, f"cuda:{index}", value.device)
            flags = access.get(name, READ)
            if name in plan.outs and value.layout == torch.strided:
                made = torch.empty(0, dtype=value.dtype, device=CPU)
            else:
                made = to_cpu(value, ranges, flags)
            if flags & WRITE:
                written.append((value, made))
            return made

        cpu_args = [convert(name, a) for name, a in zip(plan.names, args, strict=False)]
        cpu_kwargs = {name: convert(name, a) for name, a in kwargs.items()}
        if index < 0:
            index = torch.cuda.current_device()
        stream = _stream_of(index)
        if _sim.catch_up(index, stream):
            raise RuntimeError(
                f"{plan.name} on a sparse tensor cannot be captured in a CUDA graph on the "
                "simulated GPU"
            )
        try:
            result = plan.run(cpu_args, cpu_kwargs, index)
        except RuntimeError as error:
            other = explained(plan.name, error)
            if other is error:
                raise
            raise other from None
        for own, made in written:
            write_back(own, made, ranges)
        device = torch.device("cuda", index)
        if len(plan.results) == 1:
            name = plan.results[0]
            if name is not None:
                result = plan.argument(name, args, kwargs)
            else:
                result = to_cuda(result, device, ranges)
        else:
            result = tuple(
                to_cuda(r, device, ranges) if name is None else plan.argument(name, args, kwargs)
                for name, r in zip(plan.results, result or (), strict=True)
            )
        _sim.touched(index, stream, plan.name, 0.0, ranges)
        return result

    return call
