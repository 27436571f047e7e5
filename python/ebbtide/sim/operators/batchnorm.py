"""SyncBatchNorm's operators, put together from the CPU's kernels.

They are a batch norm in pieces, between which processes exchange what they have found: statistics
of each process's part, statistics of the whole, and the same for the gradients. CPU tensors in, CPU
tensors out; statistics are in float32 for the short dtypes, as on a GPU.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _others(tensor: Tensor) -> list[int]:
    """Every dimension but the channels'."""
    return [0, *range(2, tensor.dim())]


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """One value a channel, in a shape that goes with the whole."""
    return values.view([1, -1] + [1] * (like.dim() - 2))


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_exact(input), _others(input), correction=0)
    return mean, (variance + eps).rsqrt()


def elementwise(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    result = (_exact(input) - _wide(mean, input)) * _wide(invstd, input)
    if weight is not None:
        result = result * _wide(weight, input)
    if bias is not None:
        result = result + _wide(bias, input)
    return result.to(input.dtype)


def elementwise_out(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    *,
    out: Tensor,
) -> Tensor:
    result = elementwise(input, weight, bias, mean, invstd, eps)
    return out.resize_(result.size()).copy_(result)


def gather(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The statistics of the whole from those of the parts, one row each."""
    sizes = counts.to(mean.dtype).view(-1, 1)
    total = sizes.sum()
    whole = (mean * sizes).sum(0) / total
    parts = invstd.pow(-2) - eps + (mean - whole).square()
    variance = (parts * sizes).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole, alpha=momentum)
    if running_var is not None:
        unbiased = variance * (total / (total - 1))
        running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
    return whole, (variance + eps).rsqrt()


def gather_equal(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.size(0),), count, dtype=mean.dtype)
    return gather(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


def backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    grad = _exact(grad_out)
    total = grad.sum(_others(input))
    moment = (grad * (_exact(input) - _wide(mean, input))).sum(_others(input))
    dtype = weight.dtype if weight is not None else total.dtype
    return (
        total if input_g else None,
        moment if input_g else None,
        (moment * invstd).to(dtype) if weight_g else None,
        total.to(dtype) if bias_g else None,
    )


def backward_elementwise(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(sum_dy.dtype)
    centred = _exact(input) - _wide(mean, input)
    slope = _wide(invstd * invstd * sum_dy_xmu / total, input)
    scale = invstd if weight is None else invstd * weight
    grad = _exact(grad_out) - _wide(sum_dy / total, input) - centred * slope
    return (grad * _wide(scale, input)).to(input.dtype)


KERNELS = {
    "aten::batch_norm_stats": stats,
    "aten::batch_norm_elemt": elementwise,
    "aten::batch_norm_elemt.out": elementwise_out,
    "aten::batch_norm_gather_stats": gather_equal,
    "aten::batch_norm_gather_stats_with_counts": gather,
    "aten::batch_norm_backward_reduce": backward_reduce,
    "aten::batch_norm_backward_elemt": backward_elementwise,
}

# Arguments that are written although the schema does not say so.
WRITES = {
    "aten::batch_norm_gather_stats": {"running_mean", "running_var"},
    "aten::batch_norm_gather_stats_with_counts": {"running_mean", "running_var"},
}
