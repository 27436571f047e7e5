"""Quantized and nested tensors: what is cheap to give, and clear errors for the rest.

A quantized tensor carries a scale beside its memory, so that no alias of it can be made: an
operator on one goes by way of the host, which waits. Nested tensors share most kernels with the
CPU; those that have one of their own for a GPU are put together from operators on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

Tensor = torch.Tensor
aten = torch.ops.aten
KEY, HOST = "QuantizedCUDA", "QuantizedCPU"

# They describe a tensor, allocate or copy one, and launch nothing.
NATIVE = {
    "aten::" + name
    for name in (
        "_empty_affine_quantized",
        "_empty_per_channel_affine_quantized",
        "as_strided",
        "clone",
        "copy_",
        "empty.memory_format",
        "empty_like",
        "empty_quantized",
        "empty_strided",
        "fill_.Scalar",
        "_reshape_alias",
        "q_per_channel_axis",
        "q_per_channel_scales",
        "q_per_channel_zero_points",
        "q_scale",
        "q_zero_point",
        "qscheme",
        "resize_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_quantizer_",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "unfold",
        "unsqueeze",
        "view",
        "_to_copy",
    )
}


def by_the_host(op: Any) -> Callable[..., Any]:
    """An operator on copies of its arguments, and a copy of its result on the device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        device = None

        def host(value: Any) -> Any:
            nonlocal device
            if isinstance(value, Tensor) and value.is_cuda:
                device = value.device
                return value.cpu()
            return value

        result = op(*tree_map(host, args), **tree_map(host, kwargs))
        return tree_map(lambda r: r.to(device) if isinstance(r, Tensor) else r, result)

    return call


# Of dense tensors, and yet their results are quantized.
MAKE = (
    "aten::quantize_per_tensor",
    "aten::quantize_per_tensor.tensor_qparams",
    "aten::quantize_per_tensor_dynamic",
    "aten::quantize_per_channel",
)


def matmul(self: Tensor, mat2: Tensor) -> Tensor:
    """Of nested tensors, part by part."""
    ours = self.unbind()
    theirs = mat2.unbind() if mat2.is_nested else [mat2[i] for i in range(mat2.size(0))]
    return torch._nested_tensor_from_tensor_list([a @ b for a, b in zip(ours, theirs, strict=True)])


def to_padded(self: Tensor, padding: float, output_size: list[int] | None = None) -> Tensor:
    parts = self.unbind()
    least = [max(part.size(d) for part in parts) for d in range(parts[0].dim())]
    size = list(output_size)[1:] if output_size is not None else least
    if any(got < wanted for got, wanted in zip(size, least, strict=True)):
        raise RuntimeError(
            "Value in output_size is less than NestedTensor padded size. Truncation is not "
            "supported."
        )
    made = parts[0].new_full([len(parts), *size], padding)
    for row, part in zip(made.unbind(), parts, strict=True):
        row[tuple(slice(0, n) for n in part.shape)].copy_(part)
    return made


NESTED = {"aten::bmm": matmul, "aten::matmul": matmul, "aten::to_padded_tensor": to_padded}


def functions(
    overload: Callable[[str], Any], refuse: Callable[..., Callable[..., Any]]
) -> Iterator[tuple[str, str, Any]]:
    """Every operator to register: its name, the dispatch key, the function."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name in NESTED and has(name, "NestedTensorCUDA"):
            yield name, "NestedTensorCUDA", NESTED[name]
        if name in MAKE:
            yield name, "CUDA", by_the_host(overload(name))
        if name in NATIVE or not has(name, KEY):
            continue
        if name.startswith("aten::") and has(name, HOST):
            schema = overload(name)._schema
            if not any(a.alias_info is not None for a in schema.arguments):
                yield name, KEY, by_the_host(overload(name))
                continue
        if name.startswith(("aten::", "quantized::")):
            why = "it is of quantized tensors, which run on the host: use .cpu() first"
            yield name, KEY, refuse(name, why)
