"""Operators that only a GPU has, put together from the CPU's: norms, grids, convolutions, products.

Each function is the CPU's side of one: CPU tensors in, CPU tensors out, in the operator's own
signature. SyncBatchNorm's are in batchnorm.py.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten


def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Step by step as autograd does it for the CPU's rms_norm, so that the gradients are equal to
    the bit."""
    exact = torch.promote_types(input.dtype, torch.float32)
    x, grad, scale = input.to(exact), grad_out.to(exact), rstd.to(exact)
    outer = input.dim() - len(normalized_shape)
    inner = list(range(outer, input.dim()))
    normed = x * scale
    to_weight = None
    if weight is not None:
        product = grad * normed.to(weight.dtype).to(exact)
        to_weight = product.sum(list(range(outer))) if outer else product
        to_weight = to_weight.to(weight.dtype)
        grad = grad * weight.to(exact)
    to_scale = (grad * x).sum(inner, keepdim=True)
    to_variance = -0.5 * to_scale * scale.pow(3)
    count = 1
    for size in normalized_shape:
        count *= size
    to_input = grad * scale + to_variance.expand_as(x) / count * (2 * x)
    return (
        to_input.to(input.dtype) if output_mask[0] else None,
        to_weight if output_mask[1] else None,
    )


def grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    return aten.grid_sampler_2d(self, grid, 0, 0, True)


def grid_sampler_backward(self: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return aten.grid_sampler_2d_backward(grad, self, grid, 0, 0, True, [True, True])


def affine_grid(theta: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    return aten.affine_grid_generator(theta, [n, c, h, w], True)


def affine_grid_backward(grad: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    return aten.affine_grid_generator_backward(grad, [n, c, h, w], True)


def convolution(
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> Tensor:
    none = [0] * len(padding)
    return aten.convolution(self, weight, None, stride, padding, dilation, False, none, groups)


def convolution_transpose(
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> Tensor:
    return aten.convolution(
        self, weight, None, stride, padding, dilation, True, output_padding, groups
    )


def convolution_relu(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    none = [0] * len(padding)
    made = aten.convolution(self, weight, bias, stride, padding, dilation, False, none, groups)
    return made.relu_()


def convolution_add_relu(
    self: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    none = [0] * len(padding)
    made = aten.convolution(self, weight, bias, stride, padding, dilation, False, none, groups)
    return made.add_(z, alpha=1 if alpha is None else alpha).relu_()


def depthwise(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    none, groups = [0] * len(padding), self.size(1)
    return aten.convolution(self, weight, bias, stride, padding, dilation, False, none, groups)


def _product(kernel: Any, tensors: int) -> Any:
    """A matrix product whose result has another dtype: a GPU accumulates in that."""

    def product(*args: Any, **kwargs: Any) -> Tensor:
        *operands, dtype = args
        assert len(operands) == tensors
        return kernel(*[t.to(dtype) for t in operands], **kwargs)

    return product


def _softmax(kernel: Any) -> Any:
    """Half precision in and single out, which the CPU's kernels do not have."""

    def softmax(self: Tensor, dim: int, half_to_float: bool, **kwargs: Any) -> Tensor:
        return kernel(self.float() if half_to_float else self, dim, False, **kwargs)

    return softmax


def _softmax_backward(kernel: Any, plain: Any) -> Any:
    def backward(
        grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, **kwargs: Any
    ) -> Tensor:
        if input_dtype == grad_output.dtype:
            return kernel(grad_output, output, dim, input_dtype, **kwargs)
        made = plain(grad_output, output, dim, grad_output.dtype).to(input_dtype)
        return _into(made, **kwargs)

    return backward


def _softmax_backwards(name: str) -> dict[str, Any]:
    packet = getattr(aten, name)
    plain = packet.default._op
    return {
        f"aten::{name}": _softmax_backward(plain, plain),
        f"aten::{name}.out": _softmax_backward(packet.out._op, plain),
    }


def _into(made: Tensor, **kwargs: Tensor) -> Tensor:
    """A result as it is, or in the one out= tensor that there may be."""
    for out in kwargs.values():
        return out.resize_(made.shape).copy_(made)
    return made


def lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None, **outs: Any
) -> Any:
    """As on a GPU, which has one of the drivers only."""
    if driver not in (None, "gels"):
        raise RuntimeError(
            "torch.linalg.lstsq: parameter `driver` other than `gels` is not supported on CUDA"
        )
    return torch.linalg.lstsq(self, b, rcond=rcond, driver="gels", **_named(outs))


def _named(outs: dict[str, Any]) -> dict[str, Any]:
    return {"out": tuple(outs.values())} if outs else {}


KERNELS = {
    "aten::_softmax": _softmax(aten._softmax.default._op),
    "aten::_softmax.out": _softmax(aten._softmax.out._op),
    **_softmax_backwards("_softmax_backward_data"),
    "aten::_log_softmax": _softmax(aten._log_softmax.default._op),
    "aten::_log_softmax.out": _softmax(aten._log_softmax.out._op),
    **_softmax_backwards("_log_softmax_backward_data"),
    "aten::linalg_lstsq": lstsq,
    "aten::linalg_lstsq.out": lstsq,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::cudnn_grid_sampler": grid_sampler,
    "aten::cudnn_grid_sampler_backward": grid_sampler_backward,
    "aten::cudnn_affine_grid_generator": affine_grid,
    "aten::cudnn_affine_grid_generator_backward": affine_grid_backward,
    "aten::cudnn_convolution": convolution,
    "aten::cudnn_convolution_transpose": convolution_transpose,
    "aten::cudnn_convolution_relu": convolution_relu,
    "aten::cudnn_convolution_add_relu": convolution_add_relu,
    "aten::_conv_depthwise2d": depthwise,
    "aten::conv_depthwise3d": depthwise,
    "aten::mm.dtype": _product(torch.mm, 2),
    "aten::mm.dtype_out": _product(torch.mm, 2),
    "aten::bmm.dtype": _product(torch.bmm, 2),
    "aten::bmm.dtype_out": _product(torch.bmm, 2),
    "aten::addmm.dtype": _product(torch.addmm, 3),
    "aten::addmm.dtype_out": _product(torch.addmm, 3),
    "aten::baddbmm.dtype": _product(torch.baddbmm, 3),
    "aten::baddbmm.dtype_out": _product(torch.baddbmm, 3),
}


def _no(*_: Any, **__: Any) -> bool:
    return False


# PyTorch then takes its own kernel of the CTC loss, which is redirected.
OPERATORS = {
    "aten::_use_cudnn_ctc_loss": _no,
    "aten::_use_cudnn_ctc_loss.Tensor": _no,
    "aten::_use_miopen_ctc_loss": _no,
    "aten::_use_miopen_ctc_loss.Tensor": _no,
}
