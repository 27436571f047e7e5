"""The tour's training run: an ordinary PyTorch program on a card of 64 MiB.

    ebbtide run --sim 64MiB -m ebbtide.cli._training

A small language model learns a paragraph. Its batches double until one is too large, and then it
goes on with smaller ones. Nothing in here knows that the GPU is simulated, but for the last
question: whether anything was reported. The tour reads what it has to tell, a line of JSON for each
event, and lets it begin by closing its standard input.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = (
    "PyTorch hands out addresses. Ebbtide decides what memory is behind them. The tide goes out, "
    "and comes in again, and whoever lives on the shore keeps their address. "
) * 4
LENGTH, WIDTH = 64, 64  # characters of a sequence, numbers for each of them
# The batch of each step. One of 128 is too large.
STEPS = [16] * 4 + [32] * 4 + [64] * 4 + [128] + [32] * 6


class Model(nn.Module):
    """A transformer of two layers that guesses the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        x = self.characters(text) + self.places
        return self.head(self.layers(x, mask=causal, is_causal=True))


def batch(step: int, size: int) -> Tensor:
    """Pieces of the text, the same ones on every device."""
    text = torch.tensor(list(TEXT.encode()))
    choice = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (size,), generator=choice)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


class Training:
    """A model on a device, its losses so far, and somebody who is told how memory goes."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.failed: set[int] = set()  # steps that there was no memory for

    def sample(self, step: int, size: int) -> None:
        if self.device == "cuda":
            loss = self.losses[-1] if self.losses else None
            tell("memory", step=step, batch=size, loss=loss, **memory())

    def step(self, step: int, size: int) -> None:
        text = batch(step, size).to(self.device)
        self.optimizer.zero_grad()
        guess = self.model(text[:, :-1])
        loss = F.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten())
        self.sample(step, size)
        loss.backward()
        self.sample(step, size)
        self.optimizer.step()
        self.losses.append(loss.item())
        del guess, loss, text
        self.sample(step, size)


def memory() -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "total": torch.cuda.mem_get_info()[1],
    }


def tell(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


def train_on_the_card() -> Training:
    training = Training("cuda")
    for step, size in enumerate(STEPS):
        try:
            training.step(step, size)
        except torch.OutOfMemoryError as error:
            words = str(error).removeprefix("CUDA out of memory. ").split(". GPU 0")[0]
            tell("oom", step=step, batch=size, words=words, **memory())
            training.failed.add(step)
        else:
            continue
        # Outside of the handler: while the error lives, so do the tensors of the failed step.
        gc.collect()
        training.sample(step, size)
        training.optimizer.zero_grad()
        training.sample(step, size)
        torch.cuda.empty_cache()
        training.sample(step, size)
    return training


def train_on_the_cpu(leave_out: set[int]) -> Training:
    training = Training("cpu")
    for step, size in enumerate(STEPS):
        if step not in leave_out:
            training.step(step, size)
    return training


def main() -> None:
    tell("card", name=torch.cuda.get_device_name(), torch=torch.__version__)
    sys.stdin.read()
    there = train_on_the_card()
    torch.cuda.synchronize()
    here = train_on_the_cpu(there.failed)
    pairs = zip(there.model.parameters(), here.model.parameters(), strict=True)
    from ebbtide import sim

    tell(
        "end",
        losses=there.losses,
        failed=len(there.failed),
        same_losses=there.losses == here.losses,
        same_weights=all(torch.equal(a.cpu(), b) for a, b in pairs),
        weights=sum(p.numel() for p in there.model.parameters()),
        hazards=sim.hazard_count(),
    )


if __name__ == "__main__":
    main()
