"""A program of test_offload_clock.py: how large the ring of an offloaded model becomes.

    python offload_ring.py

prints an object a line. 24 units of 4 MiB, few of which stay, on a card whose link brings one in 8
milliseconds. What the card computes is a matter of how many rows there are.
"""

from __future__ import annotations

import dataclasses
import json

from ebbtide import sim
from ebbtide.sim.cards import CARDS

MIB = 1 << 20
UNIT = 4 * MIB
ONE, MANY = 1, 64  # rows: a unit computes for less than a millisecond, or for some 20

CARDS["slow"] = dataclasses.replace(
    CARDS["rtx4090"], link=500 * MIB, memory_rate=25_000 * MIB, flops=7e9
)
sim.start(memory="1GiB", card="slow", clock="virtual")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ebbtide  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(512, 256), (256, 512)] * 4
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        for layer in self.layers:
            layer.weight.mul_(2)  # or numbers become so small that processors are slow with them
        self.more = 0  # bytes that it needs in between
        self.also: object = None  # what it calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        needed = torch.empty(self.more, dtype=torch.uint8, device="cuda") if self.more else None
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if callable(self.also):
            self.also()
        del needed
        return x


class Case:
    def __init__(self, blocks: int, keep: int, **options: int) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(blocks)))
        plain = nn.Sequential(*(Block() for _ in range(blocks))).cuda()
        plain.load_state_dict(self.model.state_dict())
        self.inputs = {rows: torch.randn(rows, 512, device="cuda") for rows in (ONE, MANY)}
        self.right = {rows: plain(x) for rows, x in self.inputs.items()}
        del plain
        torch.cuda.empty_cache()
        self.handle = ebbtide.offload(self.model, **options)
        used = torch.cuda.memory_reserved() + 8 * MIB
        ebbtide.Device(0).limit = used + keep * UNIT + 2 * UNIT

    def run(self, name: str, passes: int, rows: int = ONE) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        same = True
        for number in range(passes):
            if number == passes - 2:
                start.record()
            same = same and torch.equal(self.model(self.inputs[rows]), self.right[rows])
        end.record()
        torch.cuda.synchronize()
        stats = self.handle.stats()
        line = {
            "what": name,
            "step": start.elapsed_time(end) / 2,
            "units": stats["units"],
            "ring": stats["ring"] / UNIT,
            "one_by_one": stats["one_by_one"],
            "same": same,
            "held": ebbtide.Device(0).stats()["held"] / MIB,
            "limit": ebbtide.Device(0).limit / MIB,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fixed = Case(24, 3, prefetch=2)
    fixed.run("two units", 6)
    fixed.run("two units, the card is slow", 4, MANY)
    del fixed
    ebbtide.Device(0).limit = 1 << 40
    case = Case(24, 3)
    case.run("the card is slow first", 10, MANY)
    case.run("the link is slow", 24)
    case.run("the card is slow", 22, MANY)
    case.run("the link again", 24)
    case.model[7].more = 4 * UNIT
    case.run("tensors grow", 3)
    case.model[7].more = 0
    other = Case(4, 13)
    case.model[3].also = lambda: other.model(other.inputs[ONE])
    case.run("two at once", 4)
    print(json.dumps({"hazards": [h.text for h in sim.hazards()]}), flush=True)


with torch.no_grad():
    main()
