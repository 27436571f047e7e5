"""Real cards: memory, link, memory bandwidth and arithmetic, from their makers' data sheets.

The link is what a PCIe (or NVLink-C2C) connection of that generation and width carries in practice,
about 86 % of its nominal rate. `flops` are dense half-precision operations with 32-bit
accumulation.
The H200's figures were measured.
"""

from __future__ import annotations

import dataclasses

from ebbtide.sim.card import Figures

GB = 1e9
TFLOPS = 1e12
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Model:
    """A row of the table."""

    name: str
    memory: int  # bytes
    link: float  # bytes a second, each way
    memory_rate: float
    flops: float
    compute: tuple[int, int]
    multiprocessors: int
    peer: bool = False

    def figures(self, memory: int | None = None) -> Figures:
        """This card's figures, with another size of memory if one is given."""
        both_ways = 0.9 * self.link  # measured on the H200: copies in both directions share
        return dataclasses.replace(
            Figures.default(self.memory if memory is None else memory),
            name=f"{self.name} (simulated)",
            h2d_rate=self.link,
            d2h_rate=self.link,
            duplex_rate=both_ways,
            pageable_rate=min(6.8 * GB, self.link / 2),
            memory_rate=self.memory_rate,
            flops=self.flops,
            compute_major=self.compute[0],
            compute_minor=self.compute[1],
            multiprocessors=self.multiprocessors,
            peer=self.peer,
        )


PCIE3, PCIE4, PCIE5 = 13.0 * GB, 26.0 * GB, 55.0 * GB

CARDS = {
    "rtx2060": Model("RTX 2060", 6 * GIB, PCIE3, 336 * GB, 51.6 * TFLOPS, (7, 5), 30),
    "rtx3060": Model("RTX 3060", 12 * GIB, PCIE4, 360 * GB, 51.2 * TFLOPS, (8, 6), 28),
    "rtx3090": Model("RTX 3090", 24 * GIB, PCIE4, 936 * GB, 71 * TFLOPS, (8, 6), 82),
    "rtx4060": Model("RTX 4060", 8 * GIB, PCIE4 / 2, 272 * GB, 60 * TFLOPS, (8, 9), 24),
    "rtx4070": Model("RTX 4070", 12 * GIB, PCIE4, 504 * GB, 117 * TFLOPS, (8, 9), 46),
    "rtx4080": Model("RTX 4080", 16 * GIB, PCIE4, 717 * GB, 195 * TFLOPS, (8, 9), 76),
    "rtx4090": Model("RTX 4090", 24 * GIB, PCIE4, 1008 * GB, 330 * TFLOPS, (8, 9), 128),
    "rtx5090": Model("RTX 5090", 32 * GIB, PCIE5, 1792 * GB, 419 * TFLOPS, (12, 0), 170),
    "t4": Model("T4", 16 * GIB, PCIE3, 320 * GB, 65 * TFLOPS, (7, 5), 40),
    "a10": Model("A10", 24 * GIB, PCIE4, 600 * GB, 125 * TFLOPS, (8, 6), 72, True),
    "a100": Model("A100", 80 * GIB, PCIE4, 2039 * GB, 312 * TFLOPS, (8, 0), 108, True),
    "h100": Model("H100", 80 * GIB, PCIE5, 3350 * GB, 790 * TFLOPS, (9, 0), 132, True),
    "h200": Model("H200", 140 * GIB, 55.4 * GB, 4300 * GB, 790 * TFLOPS, (9, 0), 132, True),
}


def card(name: str, memory: int | None = None) -> Figures:
    """The figures of a card of the table; ValueError, with the names there are, for another."""
    model = CARDS.get(name.lower().replace(" ", "").replace("-", ""))
    if model is None:
        raise ValueError(f"there is no card {name!r} in the table: {', '.join(CARDS)}")
    return model.figures(memory)
