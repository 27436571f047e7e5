"""What a resident weight costs from Python: fault + compare + unpin, on PyTorch's current stream.

    python bench/vbar.py [--json]           on a GPU
    ebbtide run --sim 8GiB bench/vbar.py    on a simulated one

Medians and 99th percentiles of many rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import ebbtide

WEIGHTS, ROUNDS = 1000, 200


def spread(name: str, function: Callable[[], None], count: int, as_json: bool) -> None:
    """Time `function`, which does something `count` times, and print the cost of one."""
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        took.append((time.perf_counter() - start) / count * 1e6)
    figures = {name: statistics.median(took), f"{name}_p99": statistics.quantiles(took, n=100)[98]}
    for metric, value in figures.items():
        if as_json:
            line = {
                "bench": "vbar_python",
                "metric": metric,
                "value": round(value, 4),
                "unit": "us",
            }
            print(json.dumps(line))
        else:
            print(f"  {metric:<44} {value:12.4f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    as_json = parser.parse_args().json

    device = ebbtide.Device(0, limit="2GiB")
    vbar = ebbtide.VBAR(device, "1GiB")
    host = torch.ones(1 << 18).pin_memory()
    weights = [vbar.alloc(host.nbytes) for _ in range(WEIGHTS)]
    for w in weights:
        with w.resident(host):
            pass

    def hits() -> None:
        for w in weights:
            signature = w.fault()
            if signature is not None:
                if signature != w.signature:
                    raise AssertionError("a resident weight lost its contents")
                w.unpin()

    def with_stream() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for w in weights:
            signature = w.fault(stream)
            if signature is not None:
                if signature != w.signature:
                    raise AssertionError("a resident weight lost its contents")
                w.unpin(stream)

    def resident() -> None:
        for w in weights:
            with w.resident(host):
                pass

    def batch() -> None:
        for first in range(0, WEIGHTS, 10):
            ten = weights[first : first + 10]
            if vbar.fault(ten) is not None:
                vbar.unpin(ten)

    with torch.cuda.stream(torch.cuda.Stream()):
        for w in weights:
            with w.resident(host):
                pass
        spread("hit", hits, WEIGHTS, as_json)
        spread("hit_with_stream_given", with_stream, WEIGHTS, as_json)
        spread("hit_with_resident", resident, WEIGHTS, as_json)
        spread("hit_in_batches_of_10", batch, WEIGHTS, as_json)
    device.check()


if __name__ == "__main__":
    main()
