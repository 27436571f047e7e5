"""Fused attention: the GPU operators' outputs and memory, computed by the CPU's fused kernels.

Each function here is the CPU's side of an operator that only a GPU has: it takes and returns CPU
tensors, in the operator's own signature. They draw random numbers for dropout only.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.sim.operators import attention_exact as exact

Tensor = torch.Tensor
_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op

# Seed and offset without dropout: they decide nothing, and a GPU's kernels do not set them.
_NO_SEEDS = tuple(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
LSE_ALIGNMENT = 32  # to which the memory-efficient kernels pad a row of logarithms


def _seeds(dropout_p: float) -> tuple[Tensor, ...]:
    return tuple(map(torch.zeros_like, _NO_SEEDS)) if dropout_p > 0 else _NO_SEEDS


# Flash attention's state of random numbers is one tensor of two numbers, and one that is not used;
# before PyTorch 2.7 it is a seed and an offset, as it still is with the other backends.
_ONE_STATE = any(
    r.name == "rng_state"
    for r in torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns
)


def _flash_state(dropout_p: float) -> tuple[Tensor, ...]:
    if _ONE_STATE:
        return tuple(torch.zeros(n, dtype=torch.uint64, device="cpu") for n in ((2,), ()))
    return _seeds(dropout_p)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    seed, offset = _flash_state(dropout_p)
    if dropout_p > 0:
        output, logsumexp = exact.forward(
            query, key, value, None, dropout_p, is_causal, scale, seed
        )
    else:
        output, logsumexp = _forward(query, key, value, 0.0, is_causal, scale=scale)
    return (
        output,
        logsumexp,
        None,
        None,
        query.size(2),
        key.size(2),
        seed,
        offset,
        query.new_empty(0),
    )


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if dropout_p > 0:
        return exact.backward(
            grad_out, query, key, value, None, dropout_p, is_causal, scale, philox_seed
        )[:3]
    return _backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=None, scale=scale
    )


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed, offset = _seeds(dropout_p)
    if dropout_p > 0:
        output, logsumexp = exact.forward(
            query, key, value, attn_bias, dropout_p, is_causal, scale, seed
        )
    else:
        output, logsumexp = _forward(
            query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
        )
    if not compute_log_sumexp:
        logsumexp.resize_(query.size(0), query.size(1), 0)
    elif padding := -logsumexp.size(2) % LSE_ALIGNMENT:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, padding))
    return exact.by_token(output), logsumexp, seed, offset


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    wanted = attn_bias is not None and grad_input_mask[3]
    if dropout_p > 0 or wanted:
        q, k, v, bias = exact.backward(
            grad_out, query, key, value, attn_bias, dropout_p, is_causal, scale, philox_seed
        )
        return q, k, v, bias if wanted else None
    gradients = _backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp[..., : query.size(2)],
        0.0,
        is_causal,
        attn_mask=attn_bias,
        scale=scale,
    )
    q, k, v = map(exact.by_token, gradients)
    return q, k, v, None


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    seed, offset = _seeds(dropout_p)
    if dropout_p > 0:
        output, logsumexp = exact.forward(
            query, key, value, attn_bias, dropout_p, is_causal, scale, seed
        )
    else:
        output, logsumexp = _forward(
            query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
        )
    return (
        output,
        logsumexp,
        None,
        None,
        query.size(2),
        key.size(2),
        seed,
        offset,
        query.new_empty(0),
    )


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if dropout_p > 0:
        return exact.backward(
            grad_out, query, key, value, attn_bias, dropout_p, is_causal, scale, philox_seed
        )[:3]
    return _backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        0.0,
        is_causal,
        attn_mask=attn_bias,
        scale=scale,
    )


FORWARD = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
}
BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
KERNELS = FORWARD | BACKWARD
