"""cuDNN's recurrent networks, computed by the CPU's, forward and backward.

`forward` and `backward` are the CPU's side of _cudnn_rnn and _cudnn_rnn_backward: CPU tensors in,
CPU tensors out. Their operators have 16 and 22 arguments, most of them the same and only passed on,
so they take them by name, from one dictionary. The backward pass runs the CPU's forward again with
autograd, which needs a thread of its own: inside an operator autograd is switched off for the
thread that runs it.

PyTorch's lstm(), gru() and rnn_*() ask the cuDNN library how large its buffer is before they call
_cudnn_rnn, so they are replaced too, by functions that just call it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Tensor = torch.Tensor
Function = Callable[..., Any]

# cuDNN's numbers for the kinds of cell.
RELU, TANH, LSTM, GRU = range(4)
_FUNCTIONS = {RELU: "rnn_relu", TANH: "rnn_tanh", LSTM: "lstm", GRU: "gru"}

_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebbtide-rnn")


class Network:
    """What one call's arguments say of the network, whatever it computes."""

    def __init__(self, arguments: dict[str, Any], weights: list[Tensor]) -> None:
        sizes = arguments["batch_sizes"]
        self.weights = weights
        self.mode = arguments["mode"]
        self.packed = torch.tensor(sizes) if sizes else None
        self.batch_first = arguments["batch_first"]
        biases = arguments["weight_stride0"] - (1 if arguments["proj_size"] else 0) == 4
        names = ("num_layers", "dropout", "train", "bidirectional")
        self.rest = (biases, *(arguments[name] for name in names))

    def __call__(self, input: Tensor, hx: Tensor, cx: Tensor | None) -> tuple[Tensor, ...]:
        function = getattr(torch._VF, _FUNCTIONS[self.mode])
        state: Any = (hx, cx) if self.mode == LSTM else hx
        if self.packed is not None:
            return function(input, self.packed, state, self.weights, *self.rest)
        return function(input, state, self.weights, *self.rest, self.batch_first)


def _named(op: Any) -> Callable[[Function], Function]:
    """A kernel that takes its operator's arguments by their names, in one dictionary."""
    names = [a.name for a in op._schema.arguments]

    def decorate(function: Function) -> Function:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return function({**dict(zip(names, args, strict=False)), **kwargs})

        return kernel

    return decorate


@_named(torch.ops.aten._cudnn_rnn.default)
def forward(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    input = arguments["input"]
    network = Network(arguments, arguments["weight"])
    # What dropout draws must be drawn again by the backward pass: the reserve keeps where it began.
    train = arguments["train"]
    reserve = torch.get_rng_state() if train else torch.empty(0, dtype=torch.uint8)
    output, hy, *more = network(input, arguments["hx"], arguments["cx"])
    cy = more[0] if more else torch.empty(0, dtype=input.dtype)
    # Fresh tensors, that share no memory with each other: the GPU's do not.
    return output.clone(), hy.clone(), cy.clone(), reserve, torch.empty(0, dtype=input.dtype)


def _gradients(arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Those of input, hx, cx where there is one, and the weights, by autograd."""
    with torch.enable_grad():
        inputs = [arguments[name] for name in ("input", "hx", "cx")]
        x, h, c = (None if t is None else t.detach().requires_grad_() for t in inputs)
        weights = [w.detach().requires_grad_() for w in arguments["weight"]]
        if arguments["dropout"] > 0:
            torch.set_rng_state(arguments["reserve"].clone())
        results = Network(arguments, weights)(x, h, c)
        given = [arguments[name] for name in ("grad_output", "grad_hy", "grad_cy")]
        pairs = [(r, g) for r, g in zip(results, given, strict=False) if g is not None]
        leaves = [x, h, *([] if c is None else [c]), *weights]
        return torch.autograd.grad(
            [r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
        )


@_named(torch.ops.aten._cudnn_rnn_backward.default)
def backward(arguments: dict[str, Any]) -> tuple[Any, ...]:
    state = torch.get_rng_state() if arguments["dropout"] > 0 else None
    x, h, *rest = _threads.submit(_gradients, arguments).result()
    if state is not None:
        torch.set_rng_state(state)
    c = rest.pop(0) if arguments["cx"] is not None else None
    weights = arguments["weight"]
    zeros = [
        g if g is not None else torch.zeros_like(w) for g, w in zip(rest, weights, strict=True)
    ]
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
    for weight in params:
        torch.Tensor.data_ptr(weight)  # first it is looked whether they lie side by side
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
