"""Models for bench/offload.py: a language model, a diffusion transformer, many small layers.

Their weights are slices of one random block, another one for each, so that a model of many GiB is
there in seconds, is the same on the CPU and on the GPU to the bit, and gives another result when
any weight is not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from offload_timing import mark
from torch import nn

BLOCK = 1 << 24  # random numbers that all weights are made of
MIB = 1 << 20


class Rotary(nn.Module):
    inverse: torch.Tensor

    def __init__(self, head: int) -> None:
        super().__init__()
        steps = torch.arange(0, head, 2, dtype=torch.float32, device="cpu")
        self.register_buffer("inverse", 1.0 / 10000.0 ** (steps / head), persistent=False)

    def forward(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(tokens, device=self.inverse.device, dtype=torch.float32)
        angle = torch.outer(at, self.inverse).repeat(1, 2)
        return angle.cos().bfloat16(), angle.sin().bfloat16()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        batch, tokens, width = x.shape

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.view(batch, tokens, self.heads, -1).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=turn is not None)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, width))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.before = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.between = nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.before(x), turn)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token numbers in; out come the hidden states, and the last one's logits."""

    def __init__(self, layers: int, width: int, inner: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = words
        self.embed = nn.Embedding(words, width)
        self.rotary = Rotary(width // heads)
        self.layers = nn.ModuleList(LlamaBlock(width, inner, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        turn = self.rotary(ids.shape[1])
        for layer in self.layers:
            x = layer(x, turn)
            mark()
        x = self.norm(x)
        return x, self.head(x[:, -1])


class DiTBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self.attention(y, None)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiT(nn.Module):
    """Blocks of three sizes, one after the other."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            DiTBlock(width, (2 + 2 * (i % 3)) * width, heads) for i in range(blocks)
        )
        self.out = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = self.time(t)
        for block in self.blocks:
            x = block(x, c)
            mark()
        return self.out(x)


class Many(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = layer(x)
            if number % 30 == 29:
                mark()
        return x


def linears(count: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(count):
        layers.append(nn.Linear(width, width))
        if i % 2:
            layers.append(nn.ReLU())
    return Many(*layers)


# ---- weights -------------------------------------------------------------------------------------


def block(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(BLOCK, dtype=torch.float32).bfloat16().to(device)


def fill(model: nn.Module, device: str, *, in_one: bool = False) -> nn.Module:
    """Give a model that is on the meta device its weights. `in_one`: all in one piece of memory."""
    source = block(device)
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    total = sum(-(-p.numel() // 256) * 256 for _, _, p in places)
    whole = torch.empty(total if in_one else 0, dtype=torch.bfloat16, device=device)
    at = 0
    for number, (module, name, parameter) in enumerate(places):
        count = parameter.numel()
        if in_one:
            flat = whole[at : at + count]
            at += -(-count // 256) * 256
        else:
            flat = torch.empty(count, dtype=torch.bfloat16, device=device)
        fan = parameter.shape[-1] if parameter.dim() > 1 else 0
        start = number * 1_000_003 % BLOCK
        done = 0
        while done < count:
            part = min(count - done, BLOCK - start)
            to = flat[done : done + part]
            if fan:
                torch.mul(source[start : start + part], fan**-0.5, out=to)
            else:  # norms are about 1, biases about 0
                torch.mul(source[start : start + part], 0.01, out=to)
                if isinstance(module, nn.RMSNorm):
                    to.add_(1)
            done, start = done + part, 0
        module._parameters[name] = nn.Parameter(flat.view(parameter.shape))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model.eval()


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.dtype.itemsize for p in model.parameters())


# ---- the three -----------------------------------------------------------------------------------


@dataclass
class Kind:
    name: str
    build: Callable[[], nn.Module]  # on the meta device
    inputs: Callable[[int], tuple[torch.Tensor, ...]]  # for so many tokens, on the GPU
    tokens: list[int]

    def make(self, device: str, *, in_one: bool = False) -> nn.Module:
        with torch.device("meta"):
            model = self.build()
        return fill(model, device, in_one=in_one)


def llama_sizes(small: bool) -> tuple[int, int, int, int, int]:
    """Layers, width, inner width, heads, words. 32 layers of 416 MiB, and 13.5 GiB in all."""
    return (32, 384, 1024, 6, 2048) if small else (32, 4096, 12288, 32, 32000)


def kinds(small: bool) -> dict[str, Kind]:
    sizes = llama_sizes(small)
    dit = (30, 384, 6) if small else (60, 2048, 16)
    many = (200, 512) if small else (2000, 1024)

    def ids(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        return (torch.randint(sizes[-1], (1, tokens)).cuda(),)

    def noise(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        return torch.randn(1, tokens, dit[1]).bfloat16().cuda(), torch.randn(
            1, 256
        ).bfloat16().cuda()

    def rows(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        return (torch.randn(tokens, many[1]).bfloat16().cuda(),)

    tokens = [1, 16] if small else [1, 256, 4096, 16384]
    return {
        "llama": Kind("llama", lambda: Llama(*sizes), ids, tokens),
        "dit": Kind("dit", lambda: DiT(*dit), noise, tokens),
        "linears": Kind("linears", lambda: linears(*many), rows, tokens),
    }
