"""cuDNN's recurrent networks, computed by the CPU's, forward and backward.

`forward` and `backward` are the CPU's side of _cudnn_rnn and _cudnn_rnn_backward: CPU tensors in,
CPU tensors out. The backward pass runs the CPU's forward again with autograd, which needs a thread
of its own: inside an operator autograd is switched off for the thread that runs it.

PyTorch's lstm(), gru() and rnn_*() ask the cuDNN library how large its buffer is before they call
_cudnn_rnn, so they are replaced too, by functions that just call it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Tensor = torch.Tensor

# cuDNN's numbers for the kinds of cell.
RELU, TANH, LSTM, GRU = range(4)
_FUNCTIONS = {RELU: "rnn_relu", TANH: "rnn_tanh", LSTM: "lstm", GRU: "gru"}

_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebbtide-rnn")


class Network:
    """One call's parameters."""

    def __init__(
        self,
        weights: list[Tensor],
        stride0: int,
        mode: int,
        proj_size: int,
        num_layers: int,
        batch_first: bool,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_sizes: list[int],
    ) -> None:
        self.weights = weights
        self.mode = mode
        self.packed = torch.tensor(batch_sizes) if batch_sizes else None
        biases = stride0 - (1 if proj_size else 0) == 4
        self.rest = (biases, num_layers, dropout, train, bidirectional)
        self.batch_first = batch_first

    def __call__(self, input: Tensor, hx: Tensor, cx: Tensor | None) -> tuple[Tensor, ...]:
        function = getattr(torch._VF, _FUNCTIONS[self.mode])
        state: Any = (hx, cx) if self.mode == LSTM else hx
        if self.packed is not None:
            return function(input, self.packed, state, self.weights, *self.rest)
        return function(input, state, self.weights, *self.rest, self.batch_first)


def forward(
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    network = Network(
        weight,
        weight_stride0,
        mode,
        proj_size,
        num_layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
    )
    # What dropout draws must be drawn again by the backward pass: the reserve keeps where it began.
    reserve = torch.get_rng_state() if train else torch.empty(0, dtype=torch.uint8)
    output, hy, *more = network(input, hx, cx)
    cy = more[0] if more else torch.empty(0, dtype=input.dtype)
    # Fresh tensors, that share no memory with each other: the GPU's do not.
    return output.clone(), hy.clone(), cy.clone(), reserve, torch.empty(0, dtype=input.dtype)


def backward(
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
    reserve: Tensor,
    output_mask: list[bool],
) -> tuple[Any, ...]:
    def run() -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x, h = input.detach().requires_grad_(), hx.detach().requires_grad_()
            c = None if cx is None else cx.detach().requires_grad_()
            weights = [w.detach().requires_grad_() for w in weight]
            if dropout > 0:
                torch.set_rng_state(reserve.clone())
            network = Network(
                weights,
                weight_stride0,
                mode,
                proj_size,
                num_layers,
                batch_first,
                dropout,
                train,
                bidirectional,
                batch_sizes,
            )
            results = network(x, h, c)
            pairs = [
                (r, g)
                for r, g in zip(results, (grad_output, grad_hy, grad_cy), strict=False)
                if g is not None
            ]
            leaves = [x, h, *([] if c is None else [c]), *weights]
            return torch.autograd.grad(
                [r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
            )

    state = torch.get_rng_state() if dropout > 0 else None
    x, h, *rest = _threads.submit(run).result()
    if state is not None:
        torch.set_rng_state(state)
    c = rest.pop(0) if cx is not None else None
    zeros = [g if g is not None else torch.zeros_like(w) for g, w in zip(rest, weight, strict=True)]
    return x, h, c, zeros


def _call(
    mode: int,
    input: Tensor,
    batch_sizes: list[int],
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    hidden = params[1].size(1) if mode != LSTM else hx[1].size(2)
    proj = hx[0].size(2) if mode == LSTM and hx[0].size(2) != hx[1].size(2) else 0
    stride0 = (4 if has_biases else 2) + (1 if proj else 0)
    output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
        input,
        params,
        stride0,
        None,
        hx[0],
        hx[1] if mode == LSTM else None,
        mode,
        hidden,
        proj,
        num_layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, hy, cy) if mode == LSTM else (output, hy)


# The entry of another backend is PyTorch's own function, which asks for no cuDNN there.
_OTHERS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradXPU)


def _entry(name: str, mode: int, packed: bool) -> Any:
    packet, _, overload = name.partition("::")[2].partition(".")
    original = getattr(getattr(torch.ops.aten, packet), overload)

    def entry(*args: Any) -> tuple[Tensor, ...]:
        if not torch.backends.cudnn.enabled:
            return original.redispatch(_OTHERS, *args)
        if packed:
            data, sizes, hx, params, *rest = args
            if sizes.is_cuda:
                raise RuntimeError(f"batch_sizes tensor should be on CPU, but got {sizes.device}")
            states = hx if mode == LSTM else [hx]
            return _call(mode, data, sizes.tolist(), states, params, *rest, False)
        input, hx, params, *rest = args
        return _call(mode, input, [], hx if mode == LSTM else [hx], params, *rest)

    return entry


ENTRIES = {
    name: _entry(name, mode, packed)
    for cell, mode in (("rnn_relu", RELU), ("rnn_tanh", TANH), ("lstm", LSTM), ("gru", GRU))
    for name, packed in ((f"aten::{cell}.input", False), (f"aten::{cell}.data", True))
}


def autocast(
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """_cudnn_rnn under autocast: PyTorch's own asks the cuDNN library for a buffer that holds the
    weights in the other precision. Here each is converted by itself."""
    dtype = torch.get_autocast_dtype("cuda")

    def cast(tensor: Tensor | None) -> Tensor | None:
        floats = tensor is not None and tensor.is_floating_point() and tensor.is_cuda
        return tensor.to(dtype) if floats and tensor.dtype != torch.float64 else tensor

    with torch.autocast("cuda", enabled=False):
        return torch.ops.aten._cudnn_rnn(
            cast(input),
            [cast(w) for w in weight],
            weight_stride0,
            None,
            cast(hx),
            cast(cx),
            *rest,
        )


KERNELS = {"aten::_cudnn_rnn": forward, "aten::_cudnn_rnn_backward": backward}
