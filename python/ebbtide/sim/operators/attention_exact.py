"""Attention step by step, for what the CPU's fused kernels lack: dropout, and a bias's gradient.

It needs the matrix of scores, in this machine's own memory; the card's holds what the fused
operators hold. As on a GPU, the dropped scores are not kept: the seed is, and the backward pass
draws the same again.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def by_token(tensor: Tensor) -> Tensor:
    """The values of a tensor without gaps, stored token by token, with a token's heads side by
    side: as a GPU's fused kernels lay out what they make."""
    batch, head, token, number = tensor.stride()
    if batch >= token >= head >= number:
        return tensor  # it is already
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, float]:
    by = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query.float() if query.dtype.itemsize < 4 else query) @ key.to(
        torch.promote_types(key.dtype, torch.float32)
    ).transpose(-2, -1)
    scores = scores * by
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, by


def _kept(scores: Tensor, dropout: float, seed: Tensor) -> Tensor | None:
    """What each score is multiplied with."""
    if dropout <= 0:
        return None
    dice = torch.Generator().manual_seed(int(seed.view(-1)[0]))
    drawn = torch.rand(scores.shape, generator=dice, dtype=torch.float32, device="cpu")
    return (drawn >= dropout).to(scores.dtype) / (1 - dropout)


def _heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys and values that several heads of the query share, once for each."""
    return (
        tensor.repeat_interleave(heads // tensor.size(1), 1) if tensor.size(1) != heads else tensor
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output and the log of the sums; `seed` is drawn, and written."""
    seed.view(-1)[0] = torch.randint(2**62, (), device="cpu").to(seed.dtype)
    key, value = (_heads(t, query.size(1)) for t in (key, value))
    scores, _ = _scores(query, key, bias, causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.unsqueeze(-1)).exp().nan_to_num(0.0)
    kept = _kept(scores, dropout, seed)
    if kept is not None:
        weights = weights * kept
    return by_token((weights @ value.to(weights.dtype)).to(query.dtype)), logsumexp


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias."""
    heads = query.size(1)
    keys, values = _heads(key, heads), _heads(value, heads)
    scores, by = _scores(query, keys, bias, causal, scale)
    weights = scores.softmax(-1).nan_to_num(0.0)
    kept = _kept(scores, dropout, seed)
    used = weights if kept is None else weights * kept
    grad, exact = grad.to(scores.dtype), scores.dtype
    to_value = used.transpose(-2, -1) @ grad
    to_used = grad @ values.to(exact).transpose(-2, -1)
    to_weights = to_used if kept is None else to_used * kept
    to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True))
    to_query = to_scores @ keys.to(exact) * by
    to_key = to_scores.transpose(-2, -1) @ query.to(exact) * by
    to_bias = None
    if bias is not None and bias.is_floating_point():
        to_bias = to_scores.sum_to_size(bias.shape).to(bias.dtype)
    return (
        by_token(to_query.to(query.dtype)),
        _together(to_key, key),
        _together(to_value, value),
        to_bias,
    )


def _together(gradient: Tensor, shared: Tensor) -> Tensor:
    """The sum over the heads that share a key or a value."""
    if gradient.size(1) != shared.size(1):
        gradient = gradient.unflatten(1, (shared.size(1), -1)).sum(2)
    return by_token(gradient.to(shared.dtype))
