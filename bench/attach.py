"""What attach() costs, and whether the limit holds.

    python bench/attach.py [--json] [--part NAME ...]                on a GPU
    ebbtide run --sim 2GiB bench/attach.py --small [--json]          on a simulated one

Parts: empty, training, limit, flush, processes, soak. --small takes a thirty-second of the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import ebbtide

options: argparse.Namespace


def tell(metric: str, value: float, unit: str) -> None:
    if options.json:
        line = {"bench": "attach", "metric": metric, "value": round(value, 4), "unit": unit}
        print(json.dumps(line), flush=True)
    else:
        print(f"  {metric:<44} {value:12.4f} {unit}", flush=True)


def scaled(gib: float) -> int:
    """Bytes of so many GiB, or MiB in a small run, in whole MiB."""
    return max(1 << 20, int(gib * (1 << (25 if options.small else 30)))) >> 20 << 20


def empty() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # PyTorch keeps them for good otherwise
    torch.cuda.empty_cache()


class Attached:
    def __init__(self, limit: int) -> None:
        empty()
        self.limit = limit

    def __enter__(self) -> ebbtide.Device:
        ebbtide.attach(limit=self.limit, headroom=0)
        self.device = ebbtide.Device(0)
        return self.device

    def __exit__(self, *_: object) -> None:
        empty()
        self.device.check()
        self.device.close()
        remaining = ebbtide.detach()
        if remaining:
            raise AssertionError(f"{remaining} bytes remain")


def alternately(name: str, unit: str, function: Callable[[], float], rounds: int) -> None:
    """Tell a measurement without and with Ebbtide, taken in turn, and the ratio: the median of
    pairs, for a machine that is slower for some seconds makes both slower."""
    pairs = []
    for i in range(rounds):
        pair = {}
        for attached in (False, True) if i % 2 else (True, False):
            empty()
            with Attached(scaled(64)) if attached else contextlib.nullcontext():
                pair[attached] = function()
        pairs.append((pair[False], pair[True]))
    plain, attached = (statistics.median(times) for times in zip(*pairs, strict=True))
    tell(name, plain, unit)
    tell(f"{name}_attached", attached, unit)
    tell(f"{name}_ratio", statistics.median(b / a for a, b in pairs), "x")


# ---- parts ---------------------------------------------------------------------------------------


def measure_empty() -> None:
    def run() -> float:
        count = 2000 if options.small else 5000
        for _ in range(100):
            torch.empty(1000, device="cuda")
        start = time.perf_counter()
        for _ in range(count):
            torch.empty(1000, device="cuda")
        return (time.perf_counter() - start) / count * 1e6

    alternately("empty_and_free", "us", run, 9 if options.small else 61)


def measure_training() -> None:
    width, layers, tokens = (64, 2, 64) if options.small else (2048, 8, 4096)

    def run() -> float:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(width, 4 if options.small else 16, 4 * width, 0.0)
        model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        model = model.to("cuda", torch.float32 if options.small else torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(tokens, 2, width, device="cuda", dtype=next(model.parameters()).dtype)
        took = []
        for _ in range(12 if options.small else 24):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return statistics.median(took[4:]) * 1e3

    alternately("training_step", "ms", run, 5)


class Weights:
    """Weights whose contents are known: base + k for weight k."""

    def __init__(self, device: ebbtide.Device, total: int, each: int) -> None:
        self.vbar = ebbtide.VBAR(device, total)
        self.base = torch.arange(each // 4, dtype=torch.int32).pin_memory()
        self.weights = [self.vbar.alloc(each) for _ in range(total // each)]
        self.sum = int(self.base.sum(dtype=torch.int64))
        self.fills = self.offloaded = 0

    def check(self, k: int) -> None:
        """Use a weight, fill it if it must be, and see that every byte is right."""
        w = self.weights[k]
        signature = w.fault()
        if signature is None:
            self.offloaded += 1
            return
        try:
            t = w.tensor(self.base.shape, torch.int32)
            if signature != w.signature:
                t.copy_(self.base, non_blocking=True)
                t.add_(k)
                w.filled(signature)
                self.fills += 1
            found = int(t.sum(dtype=torch.int64))
        finally:
            w.unpin()
        if found != self.sum + k * self.base.numel():
            raise AssertionError(f"weight {k} is wrong")


def measure_limit() -> None:
    """20 GiB of weights under a limit of 24, and a thousand activations of 1 MiB to 8 GiB."""
    limit, dice = scaled(24), random.Random(0)
    rounds = 150 if options.small else 1000
    with Attached(limit) as device:
        torch.ones(1, device="cuda") * 2  # the libraries' own memory
        torch.zeros(8, dtype=torch.int32, device="cuda").sum(dtype=torch.int64)
        other = used() - device.stats()["held"]
        weights = Weights(device, scaled(20), scaled(0.25) if not options.small else 8 << 20)
        tensors: list[torch.Tensor] = []
        worst = ooms = 0
        start = time.perf_counter()
        for _ in range(rounds):
            size = int(math.exp(dice.uniform(math.log(1 << 20), math.log(scaled(8)))))
            try:
                tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                tensors[-1][-1] = 7
            except torch.OutOfMemoryError:
                ooms += 1
                tensors.clear()
            try:
                for _ in range(4):
                    weights.check(dice.randrange(len(weights.weights)))
            except torch.OutOfMemoryError:
                ooms += 1
                tensors.clear()
            if dice.random() < 0.05:
                weights.vbar.prioritize()
            while tensors and dice.random() < 0.45:
                tensors.pop(dice.randrange(len(tensors)))
            worst = max(worst, used() - other)
            if device.stats()["held"] > limit:
                raise AssertionError("more is held than the limit allows")
        took = time.perf_counter() - start
        stats = device.stats()
        tell("limit", limit / 2**20, "MiB")
        tell("limit_worst_by_the_drivers_count", worst / 2**20, "MiB")
        tell("limit_exceeded", max(0, worst - limit) / 2**20, "MiB")
        tell("limit_activations", rounds, "times")
        tell("limit_refills_verified", weights.fills, "times")
        tell("limit_evictions_for_tensors", stats["evictions_for_tensors"], "pages")
        tell("limit_out_of_memory_caught", ooms, "times")
        tell("limit_refusals", ebbtide.memory_stats()["refusals"], "times")
        tell("limit_seconds", took, "s")
        del tensors, weights


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure_flush() -> None:
    """Left-overs of other sizes are asked back; a loop that needs them again is left alone."""
    limit = scaled(8)
    with Attached(limit) as device:
        weights = Weights(device, scaled(4), scaled(0.25))
        for k in range(len(weights.weights)):
            weights.check(k)
        for size in (1.1, 1.3, 1.5):
            torch.empty(scaled(size), dtype=torch.uint8, device="cuda")
        torch.empty(scaled(3.5), dtype=torch.uint8, device="cuda")
        tell("flush_fragmented_weights_kept", weights.vbar.loaded_size / scaled(4) * 100, "%")
        tell("flush_fragmented_refusals", ebbtide.memory_stats()["refusals"], "times")
        del weights
    with Attached(limit) as device:
        weights = Weights(device, scaled(6), scaled(0.25))
        for _ in range(40):
            steady_step(weights)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(40):
            steady_step(weights)
        after = torch.cuda.memory_stats()["num_device_alloc"]
        tell("flush_steady_segments_after_warm_up", after - before, "times")
        tell("flush_steady_refusals", ebbtide.memory_stats()["refusals"], "times")
        del weights


def steady_step(weights: Weights) -> None:
    for k in range(len(weights.weights)):
        weights.check(k)
    for _ in range(3):  # several layers that need the same
        held = [torch.empty(scaled(g), dtype=torch.uint8, device="cuda") for g in (1, 1.2, 1.4)]
        del held


PROCESS = """
import sys, random, torch, ebbtide
limit, seed = int(sys.argv[1]), int(sys.argv[2])
ebbtide.attach(limit=limit, headroom=0)
dice, tensors = random.Random(seed), []
device = ebbtide.Device(0, limit=limit)
vbar = ebbtide.VBAR(device, limit)
host = torch.full((limit // 64,), seed, dtype=torch.uint8).pin_memory()
weights = [vbar.alloc(host.nbytes) for _ in range(48)]
for i in range(200):
    w = dice.choice(weights)
    try:
        with w.resident(host) as t:
            assert int(t[-1]) == seed and int(t[0]) == seed
        tensors.append(torch.full((dice.randrange(1, limit // 4),), seed, dtype=torch.uint8,
                                  device="cuda"))
        assert int(tensors[-1][-1]) == seed
    except torch.OutOfMemoryError:
        tensors.clear()
    if len(tensors) > 3:
        tensors.pop(0)
    assert device.stats()["held"] <= limit
device.check()
print("good")
"""


def measure_processes() -> None:
    """Eight processes on one GPU, with limits that add up."""
    total = torch.cuda.mem_get_info()[0]
    share = total // 10 if options.small else scaled(8)
    share = share >> 21 << 21
    start = time.perf_counter()
    words = [sys.executable, "-c", PROCESS, str(share)]
    children = [
        subprocess.Popen([*words, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(1, 9)
    ]
    good = sum(child.communicate()[0].strip() == "good" for child in children)
    tell("processes_that_went_well", good, "of 8")
    tell("processes_seconds", time.perf_counter() - start, "s")
    if good != 8:
        raise AssertionError("a process failed")


def measure_soak() -> None:
    """Mixed use for a while; then every frame is accounted for."""
    seconds, dice = options.seconds, random.Random(1)
    before = used()
    with Attached(scaled(16)) as device:
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to("cuda")
        streams = [torch.cuda.Stream() for _ in range(3)]
        vbars: list[Weights] = []
        tensors: list[torch.Tensor] = []
        end, steps = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            steps += 1
            try:
                with torch.cuda.stream(dice.choice(streams)):
                    what = dice.random()
                    if what < 0.35 and vbars:
                        weights = dice.choice(vbars)
                        weights.check(dice.randrange(len(weights.weights)))
                    elif what < 0.65:
                        size = dice.randrange(1 << 20, scaled(2))
                        tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                        tensors[-1].fill_(3)
                    elif what < 0.8:
                        model(torch.randn(64, 512, device="cuda")).sum().backward()
                        model.zero_grad()
                    elif what < 0.85 and len(vbars) < 3:
                        vbars.append(Weights(device, scaled(6), scaled(0.125)))
                    elif what < 0.88 and vbars:
                        torch.cuda.synchronize()
                        vbars.pop(dice.randrange(len(vbars))).vbar.close()
                    elif what < 0.93 and vbars:
                        dice.choice(vbars).vbar.prioritize()
                    elif what < 0.95:
                        torch.cuda.empty_cache()
            except torch.OutOfMemoryError:
                tensors.clear()
            while len(tensors) > 12 or (tensors and dice.random() < 0.2):
                tensors.pop(dice.randrange(len(tensors)))
            if steps % 200 == 0:
                device.check()
        torch.cuda.synchronize()
        for weights in vbars:
            weights.vbar.close()
        del model, tensors, vbars
        empty()
        left = ebbtide.memory_stats()
        owners = ("segment_bytes", "parked_bytes", "resident", "unused", "poisoned", "before")
        unaccounted = left["held"] - sum(left[name] for name in owners)
        tell("soak_seconds", seconds, "s")
        tell("soak_steps", steps, "times")
        tell("soak_bytes_unaccounted_for", unaccounted, "bytes")
        tell("soak_bytes_in_segments_at_the_end", left["segment_bytes"], "bytes")
        tell("soak_poisoned", left["poisoned"], "bytes")
        if unaccounted or left["poisoned"] or left["segment_bytes"] or left["resident"]:
            raise AssertionError(f"frames are unaccounted for: {left}")
    tell("soak_driver_use_after", (used() - before) / 2**20, "MiB")


PARTS = {
    "empty": measure_empty,
    "training": measure_training,
    "limit": measure_limit,
    "flush": measure_flush,
    "processes": measure_processes,
    "soak": measure_soak,
}


def main() -> None:
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--small", action="store_true", help="a thirty-second of the memory")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the soak")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    options = parser.parse_args()
    torch.cuda.init()
    for name in options.part or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
