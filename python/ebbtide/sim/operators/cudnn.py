"""What PyTorch asks of cuDNN and of its own fused cells, put together from the CPU's kernels.

Each function is the CPU's side of an operator that only a GPU has: CPU tensors in, CPU tensors
out, in
the operator's own signature. The arithmetic is that of PyTorch's unfused operators, step by step,
so
that results are the CPU's to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten


def batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, mean, invstd = aten.native_batch_norm(
        input,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        exponential_average_factor,
        epsilon,
    )
    return output, mean, invstd, torch.empty(0, dtype=torch.uint8)


def batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
    reserve: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return aten.native_batch_norm_backward(
        grad_output,
        input,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
        True,
        epsilon,
        [True, True, True],
    )


def _gates(a: Tensor, b: Tensor, a_bias: Tensor | None, b_bias: Tensor | None) -> Tensor:
    if a_bias is not None:
        a, b = a + a_bias, b + b_bias
    return b + a


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _gates(input_gates, hidden_gates, input_bias, hidden_bias).unsafe_chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = (f * cx).add_(i * g)
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Any, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.unsafe_chunk(4, 1)
    tanh_cy = cy.tanh()
    zero = torch.zeros_like(cy)
    hy = grad_hy if grad_hy is not None else zero
    cell = aten.tanh_backward(hy * o, tanh_cy)
    if grad_cy is not None:
        cell = grad_cy + cell
    gates = torch.cat(
        [
            aten.sigmoid_backward(cell * g, i),
            aten.sigmoid_backward(cell * cx, f),
            aten.tanh_backward(cell * i, g),
            aten.sigmoid_backward(hy * tanh_cy, o),
        ],
        1,
    )
    return gates, cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    ir, iz, in_ = input_gates.unsafe_chunk(3, 1)
    hr, hz, hn = hidden_gates.unsafe_chunk(3, 1)
    r, z = (hr + ir).sigmoid(), (hz + iz).sigmoid()
    n = (in_ + hn * r).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, z, n, hx, hn = workspace.unsafe_chunk(5, 1)
    to_z = aten.sigmoid_backward(grad_hy * (hx - n), z)
    to_n = aten.tanh_backward(grad_hy - grad_hy * z, n)
    to_r = aten.sigmoid_backward(to_n * hn, r)
    input_gates = torch.cat([to_r, to_z, to_n], 1)
    hidden_gates = torch.cat([to_r, to_z, to_n * r], 1)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad_hy * z, *biases


def fused_dropout(input: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(input, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return input * mask / p, mask


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask.to(self.dtype) * scale


KERNELS = {
    "aten::cudnn_batch_norm": batch_norm,
    "aten::cudnn_batch_norm_backward": batch_norm_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    "aten::_fused_dropout": fused_dropout,
    "aten::_masked_scale": masked_scale,
}

# Arguments that are written although the schema does not say so.
WRITES = {"aten::cudnn_batch_norm": {"running_mean", "running_var"}}


def flatten_weight(
    weights: list[Tensor],
    weight_stride0: int,
    input_size: int,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    bidirectional: bool,
) -> Tensor:
    """One buffer that all weights of a recurrent network become views of, as cuDNN wants it."""
    flat = torch.empty(
        sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device
    )
    offset = 0
    for weight in weights:
        part = flat.narrow(0, offset, weight.numel()).view(weight.size())
        part.copy_(weight)
        weight.set_(part)
        offset += weight.numel()
    return flat


OPERATORS = {
    "aten::_cudnn_rnn_flatten_weight": flatten_weight,
}
