"""Does PyTorch's allocator do on a simulated card what it does on a GPU?

    python bench/faithful.py --json > gpu.jsonl                    # on a machine with a GPU
    ebbtide run --sim SIZE bench/faithful.py --json > sim.jsonl    # SIZE as the first line of
    gpu.jsonl
    python bench/faithful.py --compare gpu.jsonl sim.jsonl

Three programs: training, inference with growing sizes, and random allocations with OOM and
recovery.
Each prints the segments PyTorch asked of the driver and gave back, in order, and memory_allocated,
memory_reserved and their peaks after every step. Library workspaces are off
(CUBLAS_WORKSPACE_CONFIG=:0:0), so that what is left is PyTorch's own.
"""

import argparse
import json
import os
import random
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"

MIB = 1 << 20


def figures(torch):
    return [
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    ]


def training(torch):
    """Ten steps of AdamW on a transformer."""
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        x = torch.randn(8, 128, 512).cuda()
        y = torch.randint(1000, (8 * 128,)).cuda()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, x, y
        yield figures(torch)


def inference(torch):
    """Convolutions over images that grow."""
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256)
    ).cuda()
    with torch.inference_mode():
        for size in (64, 256, 1024, 4096, 2048, 16384, 512, 32768):
            output = model(torch.zeros(size, 256).cuda())
            yield figures(torch)
            del output


def allocations(torch):
    """Tensors of random sizes come and go; one that is too large is refused, and life goes on."""
    dice = random.Random(7)
    _, total = torch.cuda.mem_get_info()
    held = []
    for step in range(300):
        if held and dice.random() < 0.45:
            held.pop(dice.randrange(len(held)))
        else:
            held.append(
                torch.empty(int(2 ** dice.uniform(9, 26)), dtype=torch.uint8, device="cuda")
            )
        if step % 100 == 99:
            try:
                torch.empty(total, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError("more than the whole card was given")
        if step % 10 == 9:
            yield figures(torch)
    held.clear()
    torch.cuda.empty_cache()
    yield figures(torch)


SCRIPTS = (training, inference, allocations)


def measure():
    import torch

    lines = [{"bench": "faithful", "metric": "total", "value": torch.cuda.mem_get_info()[1]}]
    for script in SCRIPTS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        steps = list(script(torch))
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        segments = [
            (1 if e["action"] == "segment_alloc" else -1) * e["size"]
            for e in trace
            if e["action"] in ("segment_alloc", "segment_free")
        ]
        name = script.__name__
        lines.append({"bench": "faithful", "metric": f"{name}_segments", "value": segments})
        lines.append({"bench": "faithful", "metric": f"{name}_steps", "value": steps})
    return [{**line, "unit": "bytes"} for line in lines]


def compare(first, second):
    """Print both side by side; the number of programs whose segments or figures differ."""

    def load(path):
        with open(path) as file:
            return {row["metric"]: row["value"] for row in map(json.loads, file)}

    a, b = load(first), load(second)
    different = 0
    for script in (s.__name__ for s in SCRIPTS):
        asked_a, asked_b = a[f"{script}_segments"], b[f"{script}_segments"]
        segments = "differ"
        if asked_a == asked_b:
            segments = "the same sequence"
        elif sorted(asked_a) == sorted(asked_b):
            segments = "the same sizes"
        steps_a, steps_b = a[f"{script}_steps"], b[f"{script}_steps"]
        equal = sum(x == y for x, y in zip(steps_a, steps_b, strict=True))
        (*_, peak_a, reserved_a), (*_, peak_b, reserved_b) = steps_a[-1], steps_b[-1]
        print(f"{script:12} segments: {segments}, of {len(asked_a)}")
        print(f"{'':12} figures equal after {equal} of {len(steps_a)} steps")
        print(f"{'':12} peak reserved  {reserved_a / MIB:8.2f} {reserved_b / MIB:8.2f} MiB")
        off = 100 * (peak_b - peak_a) / peak_a
        print(f"{'':12} peak allocated {peak_a / MIB:8.2f} {peak_b / MIB:8.2f} MiB, {off:+.2f} %")
        different += asked_a != asked_b or equal != len(steps_a)
    return different


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--compare", nargs=2, metavar="FILE")
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    for line in measure():
        if options.json:
            print(json.dumps(line))
        elif not line["metric"].endswith("_segments"):
            print(line["metric"], line["value"] if line["metric"] == "total" else line["value"][-1])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
