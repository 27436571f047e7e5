"""Which operators are redirected, and their registration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from ebbtide import _unseen
from ebbtide.sim.operators import (
    attention,
    batchnorm,
    capture,
    comm,
    composed,
    copies,
    cudnn,
    quantized,
    rnn,
    sparse,
    temporaries,
)
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
    "aten::mode.values",
    "aten::conj_physical_",
}

_STATISTICS = frozenset({"running_mean", "running_var"})
# Arguments that are written although the schema does not say so.
WRITES = {
    "aten::native_batch_norm": _STATISTICS,
    "aten::native_batch_norm.out": _STATISTICS,
    "aten::batch_norm_update_stats": _STATISTICS,
    **{name: frozenset(who) for name, who in (cudnn.WRITES | batchnorm.WRITES).items()},
}

NAMESPACES = ("aten::", "torchvision::", "quantization::")

# The library must live as long as the process: dropping it would bring the kernels back.
_libraries: list[torch.library.Library] = []


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _overload(qualified: str) -> Any:
    namespace, name = qualified.split("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")


def _refuse(
    name: str,
    why: str = "PyTorch has a CUDA kernel for it and no CPU kernel that could stand in for it",
) -> Callable[..., Any]:
    """For an operator that nothing can stand in for."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} cannot run on the simulated GPU: {why}")

    return refuse


def _redirected(name: str, kernel: Callable[..., Any] | None) -> Callable[..., Any]:
    function = redirect(_overload(name), kernel, WRITES.get(name, frozenset()))
    wrapper = temporaries.WRAPPERS.get(name)
    return function if wrapper is None else wrapper(function)


def _functions() -> Iterator[tuple[str, str, Any]]:
    """Every operator to register: its name, the dispatch key, the function."""
    kernels = {
        **attention.KERNELS,
        **batchnorm.KERNELS,
        **composed.KERNELS,
        **cudnn.KERNELS,
        **rnn.KERNELS,
    }
    special = {**copies.OPERATORS, **cudnn.OPERATORS, **composed.OPERATORS}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(NAMESPACES):
            continue
        if name in quantized.MAKE:
            pass
        elif name in special:
            yield name, "CUDA", special[name]
        elif name in kernels:
            yield name, "CUDA", _redirected(name, kernels[name])
        elif name not in NATIVE and (has(name, "CUDA") or name in ALSO):
            if not computed(name, "CPU"):
                yield name, "CUDA", _refuse(name)
            elif not _is_view(_overload(name)._schema):
                yield name, "CUDA", _redirected(name, None)
        if name in sparse.NATIVE:
            continue
        for key, host in sparse.KEYS.items():
            if has(name, key):
                op = _overload(name)
                if not computed(name, host):
                    yield name, key, _refuse(f"{name} on {key} tensors")
                elif not _is_view(op._schema):
                    yield name, key, sparse.redirect_sparse(op)


def install() -> int:
    """Redirect the operators; how many there are."""
    libraries: dict[str, torch.library.Library] = {}
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the point
        extra = quantized.functions(_overload, _refuse)
        for name, key, function in chain(_functions(), extra):
            namespace, _, rest = name.partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")
            libraries[namespace].impl(rest, function, key)
            count += 1
        for name, function in rnn.ENTRIES.items():
            for key in ("AutogradCUDA", "CUDA"):
                libraries["aten"].impl(name.partition("::")[2], function, key)
        libraries["aten"].impl("_cudnn_rnn", rnn.autocast, "AutocastCUDA")
    _libraries.extend(libraries.values())
    # Compiles what it launches at run time; nothing else tells whose it is.
    torch._C._cuda_jiterator_compile_and_launch_kernel = _refuse(
        "torch.cuda.jiterator", "it makes code for a GPU at run time"
    )
    torch.cuda._compile_kernel = _refuse("torch.cuda._compile_kernel", "NVRTC makes code for a GPU")
    capture.order_seeds()
    comm.install()
    torch._C._jit_set_texpr_fuser_enabled(False)  # it would compile for a GPU that is not there
    # A kernel is nothing that torch.compile() looks into.
    for function in _unseen.functions(__package__):
        _unseen.leave_out(function)
    return count
