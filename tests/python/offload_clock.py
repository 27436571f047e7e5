"""A program of test_offload_clock.py: how long the steps of an offloaded model take, on a card that
is as small as the model is.

    python offload_clock.py <card> <model>

prints an object a line. The model has 256 MiB of weights and stands for one of 16 GiB; the card has
the figures of a real one, link, memory and arithmetic divided by 64, so that a step takes as long
as the large model's on the real card. Arithmetic is divided by another 1024: a token here is a
thousand there, and this machine's processor has to compute only the one.

What is not divided is the size of a page: a quarter of the large model is 128 pages, of this one it
is two. So the weights are as many as make every share a whole number of pages.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

from ebbtide import sim
from ebbtide.sim.cards import CARDS

MIB = 1 << 20
SCALE = 64
TOKENS_SCALE = 1024
TOKENS = (1, 8, 24)
SHARES = (75, 50, 25, 0)


def start(name: str) -> None:
    real = CARDS[name]
    CARDS["scaled"] = dataclasses.replace(
        real,
        link=real.link / SCALE,
        memory_rate=real.memory_rate / SCALE,
        flops=real.flops / SCALE / TOKENS_SCALE,
    )
    sim.start(memory="2GiB", card="scaled", clock="virtual")


start(sys.argv[1])

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import ebbtide  # noqa: E402


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).view(1, len(y), 4, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between an embedding and a head, which are smaller, and one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2560, 512)
        self.layers = nn.ModuleList(Block(512, 671) for _ in range(31))
        self.head = nn.Linear(512, 2560, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x[:, 0].to(torch.int64) % 2560)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def blocks(*inner: int) -> nn.Module:
    return nn.Sequential(*[Block(512, inner[i % len(inner)]) for i in range(32)])


def linears() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(256):
        layers += [nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False)]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "llama": (512, Llama),
    "dit": (512, lambda: blocks(348, 694, 1038)),
    "linears": (256, linears),
}


def steps(model: nn.Module, x: torch.Tensor, count: int = 2) -> tuple[float, torch.Tensor]:
    """Milliseconds of a step, of several in a row: from the end of one to the end of the last, for
    at both as much has come ahead of its use. And what it gives."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    model(x)
    start.record()
    for _ in range(count):
        y = model(x)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count, y.cpu()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, build = MODELS[sys.argv[2]]
    plain = build()
    state = plain.state_dict()
    weights = sum(p.nbytes for p in plain.parameters())
    plain = plain.to("cuda")
    inputs = {tokens: torch.randn(tokens, width, device="cuda") for tokens in TOKENS}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    resident = {tokens: steps(plain, x) for tokens, x in inputs.items()}
    activations = torch.cuda.memory_reserved() - before
    del plain
    torch.cuda.empty_cache()
    for share in SHARES:
        with torch.device("meta"):
            model = build()
        model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        handle = ebbtide.offload(model)
        limit = torch.cuda.memory_reserved() + share * weights // 100
        limit += activations + 2 * handle.stats()["largest_unit"]
        limit = -(-limit // (2 * MIB)) * 2 * MIB
        ebbtide.Device(0).limit = limit
        for tokens in (*TOKENS[::-1], TOKENS[0]):
            model(inputs[tokens])
        link = (100 - share) * weights / 100 / CARDS["scaled"].link * 1e3
        for tokens, (alone, right) in resident.items():
            moved = handle.stats()
            step, result = steps(model, inputs[tokens])
            stats = handle.stats()
            line = {
                "share": share,
                "tokens": tokens,
                "step": step,
                "bound": max(link, alone),
                "of_bound": max(link, alone) / step * 100,
                "resident_step": alone,
                "link": link,
                "streamed": sum(stats[n] - moved[n] for n in ("streamed", "filled")) / 3 / MIB,
                "to_stream": (100 - share) * weights / 100 / MIB,
                "held": ebbtide.Device(0).stats()["held"],
                "limit": limit,
                "same": torch.equal(result, right),
                "one_by_one": stats["one_by_one"],
            }
            print(json.dumps(line), flush=True)
        del model, handle
        ebbtide.Device(0).limit = 1 << 62
        torch.cuda.empty_cache()
    print(json.dumps({"hazards": [h.text for h in sim.hazards()]}), flush=True)


with torch.no_grad():
    main()
