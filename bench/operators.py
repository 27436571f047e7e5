"""What a redirected operator costs over the CPU's kernel, for small tensors.

    PYTHONPATH=build/release/python $(make -s env) bench/operators.py [--json]

One line for each operator: the time on the simulated GPU less the same call on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

from ebbtide import sim


def cases(torch: Any, device: str) -> dict[str, Callable[[], Any]]:
    made = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=made).to(device)

    f = torch.nn.functional
    a, b = randn(16, 16), randn(16, 16)
    weight, bias, mean, variance = (randn(16).abs() for _ in range(4))
    many, grads, first, second = ([randn(16) for _ in range(20)] for _ in range(4))
    steps = [torch.ones((), device=device) for _ in range(20)]
    image, filters = randn(1, 4, 8, 8), randn(4, 4, 3, 3)
    query = randn(1, 16, 2, 8).transpose(1, 2)  # as a model has it
    index = torch.arange(8).to(device)
    classes = torch.zeros(16, dtype=torch.int64).to(device)
    return {
        "add": lambda: a + b,
        "add_": lambda: a.add_(0.5),
        "mm": lambda: torch.mm(a, b),
        "relu": lambda: torch.relu(a),
        "sum": lambda: a.sum(),
        "sum of rows": lambda: a.sum(1),
        "softmax": lambda: torch.softmax(a, 1),
        "cat": lambda: torch.cat([a, b]),
        "index_select": lambda: torch.index_select(a, 0, index),
        "embedding": lambda: f.embedding(index, a),
        "dropout": lambda: f.dropout(a, 0.5),
        "cross_entropy": lambda: f.cross_entropy(a, classes),
        "conv2d": lambda: f.conv2d(image, filters, padding=1),
        "layer_norm": lambda: f.layer_norm(a, (16,), weight, bias),
        "batch_norm": lambda: f.batch_norm(a, mean, variance, weight, bias, training=True),
        "attention": lambda: f.scaled_dot_product_attention(query, query, query),
        "copy of other strides": lambda: a.copy_(b.t()),
        "foreach_add of 20": lambda: torch._foreach_add_(many, grads),
        "fused adamw of 20": lambda: torch._fused_adamw_(
            many,
            grads,
            first,
            second,
            [],
            steps,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
    }


def best(call: Callable[[], Any], number: int = 2000, repeat: int = 7) -> float:
    """Microseconds of this thread: the least of several, which others' work disturbs least."""
    call()
    times = timeit.repeat(call, timer=time.thread_time, number=number, repeat=repeat)
    return min(times) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    as_json = parser.parse_args().json
    sim.start(memory="1GiB")
    import torch

    torch.set_num_threads(1)
    installing = sys.modules["ebbtide.sim.operators.install"]
    installing._libraries.clear()  # gives PyTorch its own kernels back
    began = time.perf_counter()
    installing.install()
    rows = [("install", "time", (time.perf_counter() - began) * 1e3, "ms")]
    host, device = cases(torch, "cpu"), cases(torch, "cuda")
    with torch.no_grad():
        for name, call in host.items():
            plain = best(call)
            rows.append((name, "cpu", plain, "us"))
            rows.append((name, "overhead", best(device[name]) - plain, "us"))
    for name, metric, value, unit in rows:
        if as_json:
            row = {"bench": f"operators/{name}", "metric": metric, "value": round(value, 2)}
            print(json.dumps({**row, "unit": unit}))
        else:
            print(f"{name:20} {metric:10} {value:8.2f} {unit}")


if __name__ == "__main__":
    main()
