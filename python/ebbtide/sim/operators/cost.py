"""How much arithmetic an operator does, for those where it counts: matrix products and their kin.

Everything else is bound by the memory it reads and writes, which the simulator knows already.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

Formula = Callable[..., float]


def _mm(a: Any, b: Any, *_: Any, **__: Any) -> float:
    return 2.0 * prod(a.shape) * b.shape[-1]


def _addmm(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> float:
    return _mm(a, b)


def _convolution(x: Any, w: Any, *rest: Any, **__: Any) -> float:
    # Each output element takes one product with a filter; the output is about as large as the
    # input.
    stride = rest[1] if len(rest) > 1 else [1]
    scale = prod(stride) if len(stride) > 1 else stride[0] ** (x.dim() - 2)
    return 2.0 * prod(x.shape[2:]) / max(scale, 1) * x.shape[0] * prod(w.shape)


def _convolution_backward(_: Any, x: Any, w: Any, *rest: Any, **__: Any) -> float:
    return 2.0 * _convolution(x, w, None, *rest[1:])


def _attention(causal_at: int, first: int = 0) -> Formula:
    """Attention of which the arguments from `first` on are q, k and v, and one says whether every
    query sees what is before it only: half of it is never computed then."""

    def arithmetic(*args: Any, **kwargs: Any) -> float:
        q, k, v = args[first : first + 3]
        width = q.shape[-1]
        whole = 2.0 * q.numel() / max(width, 1) * k.shape[-2] * (width + v.shape[-1])
        given = args[causal_at] if len(args) > causal_at else False
        return whole / 2 if kwargs.get("is_causal", given) else whole

    return arithmetic


def _attention_backward(causal_at: int) -> Formula:
    forward = _attention(causal_at, first=1)
    return lambda *args, **kwargs: 2.5 * forward(*args, **kwargs)


FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::_addmm_activation": _addmm,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_efficient_attention": _attention(6),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_cudnn_attention": _attention(6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
}


def formula(name: str) -> Formula | None:
    """The arithmetic of the operator called `name` (without its overload), if it counts."""
    return FORMULAS.get(name)
