"""bench/offload.py on the virtual clock: its models, made small, on an H200 as small as they are.

    python bench/offload_clock.py [--json] [--like GPU.jsonl] [--part NAME ...] [--shares ...] ...

tools/compare-clock compares the result with a GPU's. A model keeps its layers, so there are as many
units, launches and copies. Its widths are divided by some `by`, and so are the tokens: then weights
and activations have 1 / by^2 of their elements, products take 1 / by^3 of the operations, and on a
card with figures divided likewise, every operator and every copy takes as long as on the real one.
(Elements have 4 bytes here, which this machine's processor is faster with, and 2 there.) One token
remains one; it takes as long as reading the weights does.

What is not divided is the size of a page: the weights are 64 of them.

The clock knows no time of Python's but what it is told: so much for each launch. `--like` takes
that from a file that bench/offload.py --json has printed on the GPU: from the steps of the plain
model with one token, of which there the host is all the bound.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import ebbtide.sim
from ebbtide.sim._library import library
from ebbtide.sim.cards import CARDS

# Of plain models on the H200: steps of one token, which are 778, 1,324 and 3,000 launches, took 11,
# 18 and 44 ms.
LAUNCH = 14_000  # nanoseconds of the host's
LAUNCH_ITSELF = 2_000  # of which the clock knows these already: sim/functions.h
# Plain models of 4,096 tokens took 110 to 112 ms (the Llama) and 63 to 65 ms (the diffusion
# transformer). CARDS has what a large product reaches alone.
FLOPS = 630e12

WIDTHS = {"llama": (280, 4096), "dit": (176, 2048), "linears": (129, 1024)}  # here, and there


def start(name: str) -> None:
    here, there = WIDTHS[name]
    by, real = there / here, CARDS["h200"]
    in_bytes = by**2 * 2 / 4
    CARDS["scaled"] = dataclasses.replace(
        real,
        link=real.link / in_bytes,
        memory_rate=real.memory_rate / in_bytes,
        flops=FLOPS / by**3,
    )
    ebbtide.sim.start(memory="2GiB", card="scaled", clock="virtual")


def make_small(name: str) -> Any:
    """The kind of bench/offload_models.py, in small. It is asked for the large one's tokens."""
    import offload_models as models
    import torch

    width, there = WIDTHS[name]
    words = 2140

    def tokens_here(tokens: int) -> int:
        return max(1, round(tokens * width / there))

    def ids(tokens: int) -> tuple[torch.Tensor, ...]:
        return (torch.arange(tokens_here(tokens), device="cuda")[None] % words,)

    def noise(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        return torch.randn(1, tokens_here(tokens), width).cuda(), torch.randn(1, 256).cuda()

    def rows(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        return (torch.randn(tokens_here(tokens), width).cuda(),)

    class Small(models.Kind):
        def make(self, device: str, *, in_one: bool = False) -> torch.nn.Module:
            return super().make("cpu").float().to(device)

    build, inputs = {
        "llama": (lambda: models.Llama(32, width, 830, 5, words), ids),
        "dit": (lambda: models.DiT(60, width, 2), noise),
        "linears": (lambda: models.linears(2000, width), rows),
    }[name]
    tokens = models.kinds(small=False)[name].tokens
    # Made before there is a limit: a segment of PyTorch's, which they take, is a lot here.
    made = {count: inputs(count) for count in tokens}
    return Small(name, build, lambda count: made.get(count) or inputs(count), tokens)


def launches(kind: Any) -> int:
    """Of a step."""
    model, inputs = kind.make("cuda"), kind.inputs(1)
    before = library().ask("ebbsim_calls", b"ebbsim_launch")
    model(*inputs)
    return library().ask("ebbsim_calls", b"ebbsim_launch") - before


def plain_step(file: Path, name: str) -> float:
    """Nanoseconds of a step of the plain model with one token, on the GPU."""
    wanted = re.compile(rf"{name}_1_tokens_\d+%_resident_step")
    try:
        told = [json.loads(line) for line in file.read_text().splitlines() if line[:1] == "{"]
        steps = [float(each["value"]) for each in told if wanted.fullmatch(each["metric"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file} is not what bench/offload.py --json prints: {error}") from None
    if not steps:
        raise SystemExit(f"{file} has no step of the plain {name} with one token")
    return statistics.median(steps) * 1e6


def run(name: str, like: Path | None, arguments: list[str]) -> int:
    step = plain_step(like, name) if like else None
    start(name)
    import offload
    import offload_models
    import torch

    kind = make_small(name)
    launch = LAUNCH
    if step is not None:
        with torch.no_grad():
            launch = round(step / launches(kind))
        torch.cuda.empty_cache()
    host_time = library().loaded.ebbsim_host_time
    host_time.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    host_time(b"ebbsim_launch", max(0, launch - LAUNCH_ITSELF))
    offload_models.kinds = lambda small: {name: kind}
    sys.argv[1:] = ["--small", "--part", name, *arguments]
    status = offload.main()
    for hazard in ebbtide.sim.hazards():
        print(hazard.text, file=sys.stderr)
    return status or bool(ebbtide.sim.hazards())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All else is for bench/offload.py."
    )
    parser.add_argument("--part", action="append", choices=list(WIDTHS))
    parser.add_argument("--like", type=Path, metavar="FILE", help="what it printed on a GPU")
    options, others = parser.parse_known_args()
    parts = options.part or list(WIDTHS)
    if len(parts) == 1:
        return run(parts[0], options.like, others)
    like = ["--like", str(options.like)] if options.like else []
    # Each on a card of its own, and there is one for a process.
    commands = ([sys.executable, __file__, "--part", name, *like, *others] for name in parts)
    return max(subprocess.run(command).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
