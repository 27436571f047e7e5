"""PyTorch on a simulated GPU of 512 MiB: a training run, its memory, its time on the card.

    python examples/train_sim.py

Where there is a GPU, leave start() out: the rest is an ordinary program.
"""

import ebbtide.sim

# Before torch is imported. The virtual clock gives the same timings in every run.
ebbtide.sim.start(memory="512MiB", card="rtx4090", clock="virtual")

import torch  # noqa: E402
from torch import nn  # noqa: E402

MIB = 1 << 20


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(512, 256, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    print(torch.cuda.get_device_name())
    for step in range(5):
        start.record()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        end.record()
        end.synchronize()
        print(
            f"step {step}  loss {loss.item():.4f}  {start.elapsed_time(end):.3f} ms on the card  "
            f"peak {torch.cuda.max_memory_allocated() / MIB:.0f} MiB"
        )

    try:
        model(torch.randn(1 << 18, 256, device="cuda"))
    except torch.OutOfMemoryError as error:
        print(str(error).split(". GPU")[0])

    torch.cuda.synchronize()
    print(f"{ebbtide.sim.hazard_count()} hazards")


if __name__ == "__main__":
    main()
