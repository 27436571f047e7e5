"""A model larger than the VRAM it may use, layer by layer.

    python examples/vbar.py                      on a GPU
    ebbtide run --sim 1GiB examples/vbar.py      where there is none

Twelve layers of 32 MiB run in 256 MiB: eight stay resident, four are streamed in every pass.
"""

import torch

import ebbtide

device = ebbtide.Device(0, limit="256MiB")
vbar = ebbtide.VBAR(device, "384MiB")  # addresses only

hosts = [torch.randn(2896, 2896).pin_memory() for _ in range(12)]
weights = [vbar.alloc(host.nbytes) for host in hosts]  # the most important first


def forward(x: torch.Tensor) -> torch.Tensor:
    for w, host in zip(weights, hosts, strict=True):
        with w.resident(host) as t:  # in the VBAR, or, if it is offloaded, in a temporary
            x = torch.tanh(x @ t)
    return x


def forward_by_hand(x: torch.Tensor) -> torch.Tensor:
    """What resident() does."""
    for w, host in zip(weights, hosts, strict=True):
        signature = w.fault()
        if signature is None:  # offloaded, and not pinned
            t = host.to("cuda", non_blocking=True)
        else:
            t = w.tensor(host.shape, host.dtype)  # built once
            if signature != w.signature:  # new memory behind the addresses
                t.copy_(host, non_blocking=True)
                w.filled(signature)
        x = torch.tanh(x @ t)
        if signature is not None:
            w.unpin()  # may be given up, once the GPU is done with it
    return x


x = torch.randn(8, 2896, device="cuda")
for number in range(3):
    forward(x)
    stats = vbar.stats()
    shown = "".join("#" if flags & 1 else "." for flags in vbar.residency())
    print(f"pass {number}: [{shown}] {stats['hits']} hits, {stats['misses']} loads")
print("the same by hand:", torch.equal(forward(x), forward_by_hand(x)))
