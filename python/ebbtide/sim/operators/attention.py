"""Fused attention: the GPU operators' outputs and memory, computed by the CPU's fused kernels.

Each function here is the CPU's side of an operator that only a GPU has: it takes and returns CPU
tensors, in the operator's own signature. None draws random numbers: there is no dropout.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._op
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op

_SEED = torch.zeros((), dtype=torch.int64, device="cpu")
LSE_ALIGNMENT = 32  # to which the memory-efficient kernels pad a row of logarithms


def _no_dropout(p: float) -> None:
    if p > 0:
        raise NotImplementedError(
            "fused attention with dropout cannot run on the simulated GPU: the CPU's fused kernels "
            "have no dropout. torch.nn.attention.sdpa_kernel(SDPBackend.MATH) does it"
        )


def _by_token(tensor: Tensor) -> Tensor:
    """The same values, stored token by token, with a token's heads side by side."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _seeds() -> tuple[Tensor, Tensor]:
    """They decide nothing, and a GPU's kernels do not set them either."""
    return torch.empty_like(_SEED), torch.empty_like(_SEED)


# Flash attention's state of random numbers is one tensor of two numbers, and one that is not used;
# before PyTorch 2.7 it is a seed and an offset, as it still is with the other backends.
_ONE_STATE = any(
    r.name == "rng_state"
    for r in torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns
)


def _flash_state() -> tuple[Tensor, Tensor]:
    if _ONE_STATE:
        return torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return _seeds()


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
    _no_dropout(dropout_p)
    output, logsumexp = _forward(query, key, value, 0.0, is_causal, scale=scale)
    seed, offset = _flash_state()
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
    _no_dropout(dropout_p)
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
    _no_dropout(dropout_p)
    output, logsumexp = _forward(
        query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )
    padding = -logsumexp.size(2) % LSE_ALIGNMENT
    if not compute_log_sumexp:
        logsumexp = logsumexp.new_empty((query.size(0), query.size(1), 0))
    elif padding:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, padding))
    return _by_token(output), logsumexp, *_seeds()


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
    _no_dropout(dropout_p)
    if attn_bias is not None and grad_input_mask[3]:
        raise NotImplementedError(
            "the gradient of attention's bias cannot run on the simulated GPU: the CPU's fused "
            "kernels have none. torch.nn.attention.sdpa_kernel(SDPBackend.MATH) does it"
        )
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
    q, k, v = map(_by_token, gradients)
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
    _no_dropout(dropout_p)
    output, logsumexp = _forward(
        query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )
    seed, offset = _seeds()
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
    _no_dropout(dropout_p)
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


KERNELS = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
