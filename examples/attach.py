"""Weights and activations in one pool: weights give way, and come back.

    python examples/attach.py                      on a GPU
    ebbtide run --sim 1GiB examples/attach.py      where there is none

Eight layers of 32 MiB and what is computed with them share 320 MiB.
"""

import torch

import ebbtide

ebbtide.attach(limit="320MiB")  # PyTorch's allocator, from now on
device = ebbtide.Device(0)
vbar = ebbtide.VBAR(device, "256MiB")

hosts = [torch.randn(2896, 2896).pin_memory() for _ in range(8)]
weights = [vbar.alloc(host.nbytes) for host in hosts]


def forward(x: torch.Tensor) -> torch.Tensor:
    for w, host in zip(weights, hosts, strict=True):
        with w.resident(host) as t:
            x = torch.tanh(x @ t)
    return x


def show(when: str) -> None:
    shown = "".join("#" if flags & 1 else "." for flags in vbar.residency())
    held = device.stats()["held"]
    print(f"{when}: [{shown}] within the limit: {held <= device.limit}")


x = torch.randn(8, 2896, device="cuda")
first = forward(x)
show("a small batch      ")
large = torch.zeros(40 << 20, device="cuda")  # 160 MiB
show("a large tensor     ")
print("the result is the same:", torch.equal(forward(x), first))
del large
torch.cuda.empty_cache()
vbar.prioritize()
print("and again:", torch.equal(forward(x), first))
show("the tensor is freed")
try:
    torch.empty(1 << 30, device="cuda")
except torch.OutOfMemoryError:
    print("what is larger than the limit is out of memory")
