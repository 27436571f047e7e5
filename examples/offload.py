"""A model larger than the VRAM it may use, with one line.

    python examples/offload.py                      on a GPU
    ebbtide run --sim 1GiB examples/offload.py      where there is none

Twelve blocks, 96 MiB of weights, run in 72 MiB, activations and all.
"""

import copy

import torch
from torch import nn

import ebbtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


model = nn.Sequential(*(Block(512) for _ in range(12)))
x = torch.randn(4, 512, device="cuda")

with torch.no_grad():
    plain = copy.deepcopy(model).cuda()
    expected = plain(x)
    del plain
    torch.cuda.empty_cache()

    already = torch.cuda.memory_reserved()  # libraries' workspaces, on a GPU
    handle = ebbtide.offload(model, limit=already + (72 << 20))  # this is the line
    for step in range(4):
        same = torch.equal(model(x), expected)
        held = ebbtide.Device(0).stats()["held"]
        print(f"step {step}: the same: {same}; within the limit: {held <= already + (72 << 20)}")

print(handle)
shown = "".join(".:#"[round(part * 2)] for part in handle.residency().values())
print(f"units, in the order in which they run: [{shown}]  # resident, . streamed")
print(
    "between calls a weight is",
    model[0].up.weight.device,
    "and can be read:",
    torch.equal(model[0].up.weight.cpu(), model.state_dict()["0.up.weight"]),
)
