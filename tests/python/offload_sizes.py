"""A program of test_offload_clock.py: passes become long that were short.

    python offload_sizes.py

prints an object a line. Blocks of three sizes, of which almost nothing stays. While passes are
short the link is what takes the time, and the ring is made small. In long ones the card has enough
to compute, and what comes must never be late: a small ring has less room for weights of several
sizes than it has bytes.
"""

from __future__ import annotations

import json

from ebbtide import sim
from ebbtide.sim.cards import CARDS

CARD = CARDS["h200"]
sim.start(memory="1GiB", card="h200", clock="virtual")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ebbtide  # noqa: E402

WIDTH = 512
BLOCKS = 24
CYCLES = 1.98e6  # of the card, in a millisecond


class Part(nn.Module):
    """So many weights, squares, with which the card computes for some time."""

    def __init__(self, size: int, work: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size * WIDTH, WIDTH, dtype=torch.bfloat16))
        self.work = work

    def forward(self, x: torch.Tensor, time: float) -> torch.Tensor:
        torch.cuda._sleep(int(CYCLES * time * self.work))
        return x


class Block(nn.Module):
    """That of a diffusion transformer: with what its first part yields, little is computed."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        sizes = [(6, 0), (3, 3), (1, 1), (inner, inner), (inner, inner)]
        self.parts = nn.ModuleList(Part(*size) for size in sizes)

    def forward(self, x: torch.Tensor, time: float) -> torch.Tensor:
        for part in self.parts:
            x = part(x, time)
        return x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(2 + 2 * (i % 3)) for i in range(BLOCKS))

    def forward(self, x: torch.Tensor, time: float) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, time)
        return x


def main() -> None:
    model = Blocks()
    size = sum(p.nbytes for p in model.parameters())
    work = sum(part.work for block in model.blocks for part in block.parts)
    x = torch.zeros(8, device="cuda")
    handle = ebbtide.offload(model, limit=size // 4)
    link = size / CARD.link * 1e3
    for name, passes, busy in (("short", 24, 0.4 * link), ("long", 24, 2 * link)):
        for _ in range(passes):
            stats = handle.stats()
            device = ebbtide.Device(0)
            device.limit = torch.cuda.memory_reserved() + 2 * stats["largest_unit"] + (8 << 20)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model(x, busy / work)
            end.record()
            torch.cuda.synchronize()
        line = {
            "what": name,
            "step": start.elapsed_time(end),
            "busy": busy,
            "link": link,
            "ring": stats["ring"] / stats["largest_unit"],
            "one_by_one": stats["one_by_one"],
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"hazards": [h.text for h in sim.hazards()]}), flush=True)


with torch.no_grad():
    main()
