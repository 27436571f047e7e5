"""The demo's story: two models and less VRAM than they need.

    python -m ebbtide.cli._story                     on a GPU
    ebbtide run --sim 1GiB -m ebbtide.cli._story     on a simulated one

Ebbtide may use 384 MiB. The first model has 1.5 times that, the second a third. Every figure was
asked for a moment before, and every line with a tick was checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from rich.table import Table
from rich.text import Text

import ebbtide
from ebbtide.cli import _draw as draw
from ebbtide.cli._stage import Stage

MIB = 1 << 20
LIMIT = 384 * MIB
WIDE, NARROW = 4096, 2048  # a layer is 32 MiB, which is a page
LAYER = WIDE * NARROW * 4
MORE = (
    "One line for a whole model: docs/offload.md, examples/offload.py. "
    "Layer by layer, as here: docs/vbar.md, examples/vbar.py"
)


class Model:
    """Layers in a VBAR, and what using them took."""

    def __init__(self, name: str, device: ebbtide.Device, layers: int, seed: int) -> None:
        self.name = name
        values = torch.Generator().manual_seed(seed)
        shapes = [(NARROW, WIDE) if i % 2 == 0 else (WIDE, NARROW) for i in range(layers)]
        self.hosts = [torch.randn(shape, generator=values).mul_(0.03) for shape in shapes]
        self.hosts = [host.pin_memory() for host in self.hosts]
        self.vbar = ebbtide.VBAR(device, layers * LAYER)
        self.weights = [self.vbar.alloc(host.nbytes) for host in self.hosts]
        self.moved = 0
        self.current = -1
        self.x: torch.Tensor

    def run(self, x: torch.Tensor) -> Iterator[int]:
        """A pass, layer by layer: what examples/vbar.py does, with the bytes counted."""
        for number, (w, host) in enumerate(zip(self.weights, self.hosts, strict=True)):
            self.current = number
            signature = w.fault()
            if signature is None:  # offloaded: a temporary does, and PyTorch takes it back
                weight = host.to("cuda", non_blocking=True)
                self.moved += host.nbytes
            else:
                weight = w.tensor(host.shape, host.dtype)
                if signature != w.signature:
                    weight.copy_(host, non_blocking=True)
                    w.filled(signature)
                    self.moved += host.nbytes
            x = torch.tanh(x @ weight)
            del weight
            yield number
            if signature is not None:
                w.unpin()
        self.current = -1
        self.x = x

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same without Ebbtide."""
        for host in self.hosts:
            x = torch.tanh(x @ host.to("cuda"))
        return x

    def map(self, plain: bool) -> Text:
        """One character for each page."""
        full, used, gone = "#*." if plain else "█▓·"
        line = Text(f"  {self.name:<9}")
        for number, flags in enumerate(self.vbar.residency()):
            if number == self.current:
                line.append(used, "bold yellow")
            elif flags & 1:
                line.append(full, "cyan")
            else:
                line.append(gone, "dim")
        stats = self.vbar.stats()
        line.append(f"  {stats['resident'] // MIB:>4} of {stats['bytes'] // MIB} MiB", "dim")
        return line


class Story:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.device = ebbtide.Device(0, limit=LIMIT)
        self.x = torch.randn(8, NARROW, generator=torch.Generator().manual_seed(7)).to("cuda")
        self.models: list[Model] = []
        self.table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        self.table.add_column("pass")
        for name in ("hits", "loads", "offloaded", "evictions", "moved"):
            self.table.add_column(name, justify="right")

    def add(self, name: str, layers: int) -> Model:
        self.models.append(Model(name, self.device, layers, len(self.models)))
        return self.models[-1]

    def maps(self) -> Text:
        lines = [model.map(self.stage.plain) for model in self.models]
        held = self.device.stats()["held"]
        lines.append(Text(f"  {'held':<9}{held // MIB} of {LIMIT // MIB} MiB", "dim"))
        return Text("\n").join(lines)

    def evictions(self) -> int:
        return self.device.stats()["evictions_for_weights"]

    def show(self, model: Model, words: str) -> dict[str, int]:
        """A pass of a model, watched, and what it took."""
        before, evicted = model.vbar.stats(), self.evictions()
        model.moved = 0

        def watched() -> Iterator[Text]:
            for _ in model.run(self.x):
                yield self.maps()
            yield self.maps()

        self.stage.animate(watched(), 0.03)
        after = model.vbar.stats()
        took = {name: after[name] - before[name] for name in ("hits", "misses", "offloaded")}
        took |= {"evictions": self.evictions() - evicted, "moved": model.moved}
        shown = [str(took[name]) for name in ("hits", "misses", "offloaded", "evictions")]
        self.table.add_row(words, *shown, draw.size(model.moved) if model.moved else "0")
        held = self.device.stats()["held"]
        self.stage.holds(held <= LIMIT, f"{words}: {draw.size(held)} held, and never more allowed")
        return took


def larger_than_the_vram(story: Story) -> None:
    stage = story.stage
    model = story.add("first", 18)
    stage.say(
        f"A model of {draw.size(18 * LAYER)}, with {draw.size(LIMIT)} of VRAM to run in. Each "
        "layer asks for its weight; what does not fit is streamed. Nobody set a quota."
    )
    story.show(model, "first, pass 1")
    took = story.show(model, "first, pass 2")
    stage.holds(
        took["hits"] == 12 and took["offloaded"] == 6,
        "12 of 18 layers stay resident; 6 are streamed, and push nothing out",
    )
    right = bool(torch.equal(model.x, model.plain(story.x)))
    stage.holds(right, "the result is that of the plain model, to the bit")


def a_second_model(story: Story) -> None:
    stage, (first,) = story.stage, story.models
    second = story.add("second", 4)
    stage.say(
        f"A second model, {draw.size(4 * LAYER)}. The newest is the most important: it displaces "
        "the least important pages of the first, from the top down."
    )
    took = story.show(second, "second, pass 1")
    stage.holds(took["evictions"] == 4, "4 pages of the first gave way, and only those")
    mark = first.vbar.watermark
    stage.holds(
        mark == 8 * LAYER,
        f"the first's watermark is at {draw.size(mark)}: what is above is not tried",
    )
    took = story.show(first, "first, pass 3")
    stage.holds(
        (took["hits"], took["evictions"]) == (8, 0), "the first runs on with what it has: 8 layers"
    )


def back_again(story: Story) -> None:
    stage, (first, second) = story.stage, story.models
    stage.say("prioritize() makes the first the most important again, and lifts its watermark.")
    first.vbar.prioritize()
    story.show(first, "first, pass 4")
    took = story.show(first, "first, pass 5")
    stage.holds(took["hits"] == 12, "12 layers are resident again")
    stage.holds(second.vbar.loaded_size == 0, "the second has given way")
    right = all(torch.equal(model.x, model.plain(story.x)) for model in story.models)
    stage.holds(right, "both models' results are still right, to the bit")


def totals(story: Story) -> None:
    stage = story.stage
    stage.show(story.table, space=True)
    stats = story.device.stats()
    stage.holds(
        stats["frames_created"] * LAYER == LIMIT,
        f"{stats['frames_created']} frames were made in all; a page that left gave its frame to "
        f"the next, {stats['frames_recycled']} times",
    )
    story.device.check()
    stage.holds(True, "the books balance: every invariant was checked")
    from ebbtide import sim

    if "ebbtide.sim.operators" in sys.modules:
        count = sim.hazard_count()
        stage.holds(count == 0, f"{count} hazards: no page was taken while the GPU used it")


ACTS = [
    ("A model larger than the VRAM", larger_than_the_vram),
    ("A second model moves in", a_second_model),
    ("The first comes back", back_again),
    ("What it took", totals),
]


def main() -> int:
    """Tell the story; 0 if everything was as told."""
    stage = Stage()
    story = Story(stage)
    stage.title(f"on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for number, (title, act) in enumerate(ACTS, 1):
        stage.act(number, title)
        try:
            act(story)
        except ebbtide.Error as error:  # what follows builds on it
            stage.holds(False, f"this was not to happen: {error}")
            break
        stage.pause(0.3)
    return stage.end(MORE, "; {seconds}")


if __name__ == "__main__":
    sys.exit(main())
