"""What is known of an operator before it is called, and the errors that name it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.sim.operators import attention
from ebbtide.sim.operators.asserts import asserted
from ebbtide.sim.operators.cost import formula
from ebbtide.sim.operators.randomness import generator_of, next_seed, with_default

READ, WRITE = 1, 2
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

Function = Callable[..., Any]

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

# Called by torch's own function of that name: it takes in arguments faster, and lists of tensors
# twice as fast. Other overloads of a name are not, or the function would choose between them anew.
BY_FUNCTION = {
    "aten::native_dropout",
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

# Results that are on the host on a GPU too, except in a graph, by their places: seeds.
HOST_RESULTS = {"aten::_scaled_dot_product_efficient_attention": (2, 3)}

_NO_KERNEL = re.compile(r"not implemented for '|Could not run 'aten::|not (?:been )?implemented")


def differ(name: str, one: Any, other: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (when checking the arguments of {name})"
    )


def explained(name: str, error: Exception) -> Exception:
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


def _function_of(op: Any, name: str) -> Function:
    """What calls the CPU's kernel."""
    if name in BY_FUNCTION:
        return getattr(torch, op._schema.name.partition("::")[2], op._op)
    return op._op


class Plan:
    """What is known of an operator before it is called."""

    def __init__(self, op: Any, kernel: Function | None, writes: frozenset[str]) -> None:
        schema = op._schema
        self.name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.kernel = _function_of(op, self.name) if kernel is None else kernel
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
        # (place, name, kind, access) of each argument that may have to be converted, and the same
        # as _sim.convert() wants it.
        self.inputs = [
            (i, a.name, KINDS[str(a.type)], READ | WRITE if written[i] else READ)
            for i, a in enumerate(arguments)
            if str(a.type) in KINDS and not a.is_out
        ]
        self.signature = (
            bytes(n for place, _, kind, access in self.inputs for n in (place, kind, access)),
            tuple(name for _, name, _, _ in self.inputs),
        )
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
        self.drops = self.name in attention.FORWARD  # draws for dropout, and nothing without
        seeded = torch.Tag.nondeterministic_seeded in op.tags
        draws = self.drops or (seeded and self.name not in attention.KERNELS)
        self.random = draws and not self.generator
        self.waits = self.name in WAITS
        self.indexes = self.name in INDEXES
        self.host = HOST_RESULTS.get(self.name, ())

    def argument(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        place = self.positions[name]
        return args[place] if place < len(args) else kwargs.get(name)

    def waits_for(self, args: Any) -> bool:
        """Whether a GPU's operator would wait for the stream."""
        return self.waits or (
            self.indexes
            and len(args) > 1
            and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            and not (len(args) > 2 and args[2].numel() == 1)  # that is masked_fill_
        )

    def draws(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the operator draws random numbers."""
        if self.drops:
            return bool(self.argument("dropout_p", args, kwargs))
        return self.generator or self.random

    def run(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        index: int,
        dice: Callable[[], int | None] | None = None,
    ) -> Any:
        """The kernel, with the random numbers of a device, or those of `dice`."""
        if self.generator:
            place = self.positions["generator"]
            given = self.argument("generator", args, kwargs)
            made = generator_of(next_seed(given, index) if dice is None else dice())
            # An operator can run again, with the generator that it was given.
            if place < len(args):
                args = [*args]
                args[place] = made
            else:
                kwargs = {**kwargs, "generator": made}
        elif self.draws(args, kwargs):
            seed = next_seed(None, index) if dice is None else dice()
            return with_default(seed, lambda: self.kernel(*args, **kwargs))
        return self.kernel(*args, **kwargs)
