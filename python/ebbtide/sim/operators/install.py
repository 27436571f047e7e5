"""Which operators are redirected, and their registration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ebbtide.sim.operators import attention, copies, cudnn, rnn
from ebbtide.sim.operators.redirect import redirect

# Left as they are: they allocate, describe or move memory, and launch nothing.
NATIVE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::record_stream",
    "aten::_local_scalar_dense",
    "aten::is_set_to",
    "aten::_pin_memory",
    "aten::is_pinned",
    "aten::_efficientzerotensor",
    "aten::as_strided",
    "aten::unfold",
    "aten::view",
    "aten::view_as_real",
    "aten::view_as_complex",
    "aten::_reshape_alias",
}

# Composite for the dispatcher, and yet they choose a CUDA library by themselves.
ALSO = {
    "aten::convolution",
    "aten::convolution_backward",
}

# The library must live as long as the process: dropping it would bring the kernels back.
_libraries: list[torch.library.Library] = []


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _overload(qualified: str) -> Any:
    namespace, name = qualified.split("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")


def _wanted() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name in NATIVE or not name.startswith(("aten::", "torchvision::", "quantization::")):
            continue
        if (has(name, "CUDA") and computed(name, "CPU")) or name in ALSO:
            found.append(name)
    return found


def _functions() -> Iterator[tuple[str, Any]]:
    """Every operator to register, with its function."""
    kernels = {**attention.KERNELS, **cudnn.KERNELS, **rnn.KERNELS}
    special = {**copies.OPERATORS, **cudnn.OPERATORS}
    yield from special.items()
    known = set(torch._C._dispatch_get_all_op_names())
    for name, kernel in kernels.items():
        if name in known:
            yield name, redirect(_overload(name), kernel, frozenset(cudnn.WRITES.get(name, ())))
    for name in _wanted():
        if name in special or name in kernels:
            continue
        op = _overload(name)
        if not _is_view(op._schema):
            yield name, redirect(op)


def install() -> int:
    """Redirect the operators; how many there are."""
    libraries: dict[str, torch.library.Library] = {}
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the point
        for name, function in _functions():
            namespace, _, rest = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")
            libraries[namespace].impl(rest, function, "CUDA")
            count += 1
        for name, function in rnn.ENTRIES.items():
            for key in ("AutogradCUDA", "CUDA"):
                libraries["aten"].impl(name.partition("::")[2], function, key)
    _libraries.extend(libraries.values())
    torch._C._jit_set_texpr_fuser_enabled(False)  # it would compile for a GPU that is not there
    return count
