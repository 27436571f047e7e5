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
    a, b = (torch.randn(16, 16, generator=made).to(device) for _ in range(2))
    weight, bias = (torch.randn(16, generator=made).to(device) for _ in range(2))
    many = [torch.randn(16, generator=made).to(device) for _ in range(20)]
    grads = [torch.zeros(16).to(device) for _ in range(20)]
    norm, foreach = torch.nn.functional.layer_norm, torch._foreach_add_
    return {
        "add": lambda: a + b,
        "add_": lambda: a.add_(0.5),
        "mm": lambda: torch.mm(a, b),
        "relu": lambda: torch.relu(a),
        "layer_norm": lambda: norm(a, (16,), weight, bias),
        "foreach_add of 20": lambda: foreach(many, grads),
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
