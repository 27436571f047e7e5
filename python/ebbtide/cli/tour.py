"""python -m ebbtide tour: a short tour of the simulated GPU, and PyTorch on it.

Every figure shown was asked of the simulator a moment before, and every line with a tick was
checked: the exit code is 0 only if all of it was true.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbtide import sim
from ebbtide.cli import _draw as draw
from ebbtide.cli._stage import Stage
from ebbtide.sim import Card, Event, Frame, Pinned, Stream, launch

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
FRAME = 32 * MIB


class Tour(Stage):
    """What the acts hand on to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.card: Card
        self.base: int
        self.streams: list[Stream]
        self.staging: Pinned
        self.events: list[Event] = []
        self.program: Program | str = start_program()

    # ---- asking ----

    def event(self) -> Event:
        """An event that the last act destroys."""
        self.events.append(self.card.event())
        return self.events[-1]

    def page(self, number: int) -> int:
        """The address of a page of the tour's terabyte."""
        return self.base + number * FRAME

    def memory_bar(self, others: int = 0) -> Text:
        """Who has the card's memory, by the driver's own account."""
        memory = self.card.memory()
        frames = sim.census().frame_bytes
        parts = [
            draw.Part("context", memory.used - frames - others, "▓", "blue"),
            draw.Part("frames", frames, "█", "cyan"),
            draw.Part("free", memory.free, "░", "dim"),
        ]
        if others:
            parts.insert(0, draw.Part("somebody else", others, "▒", "yellow"))
        return draw.bar(parts, memory.total, self.console.width - 4, self.plain)


# ---- 1 ------------------------------------------------------------------------------------------


def a_card_appears(tour: Tour) -> None:
    tour.say(
        "No GPU, no driver, no CUDA: a library that has the driver's own functions, and this "
        "machine's memory. Its figures are an H200's. Any of them can be changed."
    )
    sim.virtual_clock()
    sim.on_hazard("quiet")  # the tour prints them itself
    tour.card = card = sim.add_card(memory=8 * GIB)
    figures, memory = card.figures, card.memory()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_row("name", Text(card.name, "bold cyan"))
    table.add_row("memory", f"{draw.size(memory.total)} in pieces of {draw.size(card.granularity)}")
    table.add_row("memory rate", draw.rate(figures.memory_rate))
    table.add_row(
        "link",
        f"{draw.rate(figures.h2d_rate)} in, {draw.rate(figures.d2h_rate)} out, "
        f"{draw.rate(figures.duplex_rate)} each way at once",
    )
    table.add_row("not pinned", draw.rate(figures.pageable_rate))
    table.add_row("arithmetic", f"{figures.flops / 1e12:.0f} TFLOPS")
    table.add_row("context", f"{draw.size(figures.context)} for each process")
    tour.show(table, space=True)
    tour.holds(memory.total == 8 * GIB, f"the driver shows {draw.size(memory.total)}")
    tour.holds(
        memory.used == figures.context,
        f"{draw.size(memory.free)} of it is free: this process's context takes the rest",
    )


# ---- 2 ------------------------------------------------------------------------------------------


def addresses_are_free(tour: Tour) -> None:
    card = tour.card
    tour.say(
        "Reserve a terabyte of addresses on this card of 8 GiB, then put frames of physical "
        "memory behind some of them."
    )
    before, start = card.memory().free, sim.now()
    tour.base = card.reserve(TIB)
    took = sim.now() - start
    tour.holds(
        card.memory().free == before,
        f"{draw.size(TIB)} reserved in {took / 1e3:.0f} us; not a byte of memory is gone",
    )
    tour.console.print()

    def filling() -> Iterator[Text]:
        for number in range(96):
            frame = card.create(FRAME)
            card.map(tour.page(number), frame)
            card.access(tour.page(number), FRAME)
            tour.frames.append(frame)
            if number % 4 == 3:
                yield tour.memory_bar()

    tour.animate(filling(), 0.03)
    used = before - card.memory().free
    tour.holds(
        used == len(tour.frames) * FRAME,
        f"{len(tour.frames)} frames of {draw.size(FRAME)} took {draw.size(used)}",
    )
    try:
        there = bool(sim.peek(tour.page(96), 1))
    except ValueError:
        there = False
    tour.holds(not there, f"no frame, no memory: to touch {tour.page(96):#x} is a real fault")
    one_frame_two_addresses(tour)
    somebody_else(tour)


def one_frame_two_addresses(tour: Tour) -> None:
    card, free = tour.card, tour.card.memory().free
    here, there = tour.page(0), tour.base + TIB // 2
    card.map(there, tour.frames[0])
    card.access(there, FRAME)
    card.fill(here, 0x5E, 4096, card.default_stream)
    card.default_stream.synchronize()
    tour.holds(
        sim.peek(there, 4) == b"\x5e" * 4 and card.memory().free == free,
        f"one frame behind two addresses: {sim.peek(there, 1)[0]:#x}, written at one, is read at "
        "the other",
    )
    card.unmap(there, FRAME)


def somebody_else(tour: Tour) -> None:
    card, others = tour.card, 4 * GIB
    card.others_use(others)
    tour.console.print()
    tour.console.print(tour.memory_bar(others))
    tour.console.print()
    free, answer = card.memory().free, "success"
    try:
        card.create(2 * GIB)
    except sim.CallFailed as failed:
        answer = failed.name
    tour.holds(
        answer == "CUDA_ERROR_OUT_OF_MEMORY" and card.memory().free == free,
        f"another process has {draw.size(others)}; asking for {draw.size(2 * GIB)} gives {answer}",
    )
    card.others_use(0)


# ---- 3 ------------------------------------------------------------------------------------------

LAYERS, KERNEL = 4, 500_000  # nanoseconds


def stream_layers(tour: Tour, copies: Stream, compute: Stream) -> list[list[draw.Span]]:
    """Copy each layer's weights in and run its kernel; the spans of the copies and the kernels."""
    card, marks = tour.card, []
    begin = tour.event().record(copies)
    for layer in range(LAYERS):
        copied = [tour.event().record(copies)]
        card.copy_in(tour.page(layer), tour.staging, copies)
        copied.append(tour.event().record(copies))
        compute.wait(copied[1])
        ran = [tour.event().record(compute)]
        weights = (tour.page(layer), FRAME)
        card.launch(f"layer {layer}", compute, reads=[weights], nanoseconds=KERNEL)
        ran.append(tour.event().record(compute))
        marks.append((copied, ran))
    compute.synchronize()
    copies.synchronize()
    return [
        [
            draw.Span(f"{layer}", *(event.since(begin) for event in pair[kind]))
            for layer, pair in enumerate(marks)
        ]
        for kind in (0, 1)
    ]


def time_is_modelled(tour: Tour) -> None:
    card = tour.card
    tour.say(
        f"{LAYERS} layers of {draw.size(FRAME)} are copied in and used: first all on one stream, "
        "then copies on a stream of their own, each kernel waiting for its copy's event."
    )
    tour.staging = card.pinned(FRAME)
    tour.staging.fill(0x42)
    tour.streams = [card.stream(), card.stream()]
    one = stream_layers(tour, tour.streams[0], tour.streams[0])
    two = stream_layers(tour, *tour.streams)
    lanes = [
        draw.Lane("one stream   link", "cyan", one[0]),
        draw.Lane("          compute", "yellow", one[1]),
        draw.Lane("two streams  link", "cyan", two[0]),
        draw.Lane("          compute", "yellow", two[1]),
    ]
    span = max(one[1][-1].end, two[1][-1].end)
    width = tour.console.width - 2
    steps = (span * step / 40 for step in range(1, 41))
    pictures = (draw.timeline(lanes, span, width, tour.plain, until) for until in steps)
    tour.animate(pictures, 0.03)
    copy = two[0][0].end - two[0][0].start
    model = (card.figures.copy_latency + FRAME / card.figures.h2d_rate * 1e9) / 1e6
    tour.holds(
        abs(copy - model) < 0.01,
        f"a copy takes {copy:.3f} ms: {draw.size(FRAME)} at {draw.rate(card.figures.h2d_rate)}",
    )
    tour.holds(
        all(ran.start >= copied.end for copied, ran in zip(*two, strict=True)),
        "no kernel starts before its copy has ended",
    )
    tour.holds(
        two[1][-1].end < one[1][-1].end,
        f"overlapped it takes {two[1][-1].end:.2f} ms instead of {one[1][-1].end:.2f} ms",
    )
    again = stream_layers(tour, *tour.streams)
    tour.holds(
        [[dataclasses.astuple(s) for s in lane] for lane in again]
        == [[dataclasses.astuple(s) for s in lane] for lane in two],
        "a second run gives the same times, to the nanosecond: nothing here is luck",
    )


# ---- 4 ------------------------------------------------------------------------------------------


def work_happens_late(tour: Tour) -> None:
    card, (stream, _), page = tour.card, tour.streams, tour.page(90)
    tour.say(
        "A copy has its effect as late as the rules allow: when something ordered after it looks, "
        "and not a moment earlier. Until then its destination holds a pattern."
    )
    styles = {0x00: "dim", sim.PATTERN: "yellow", 0x42: "bold green"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    seen = []
    steps: list[tuple[str, Callable[[], None]]] = [
        ("before", lambda: None),
        ("the copy is queued", lambda: card.copy_in(page, tour.staging, stream)),
        ("5 ms later: over, by the clock", lambda: sim.let_pass(5_000_000)),
        ("somebody has waited for it", stream.synchronize),
    ]

    def looking() -> Iterator[RenderableType]:
        for when, happens in steps:
            happens()
            seen.append(sim.peek(page, 12))
            table.add_row(when, draw.hexes(seen[-1], styles))
            yield Padding(table, (0, 2), expand=False)

    tour.animate(looking(), 0.3)
    expected = [bytes(12), bytes([sim.PATTERN] * 12), bytes([sim.PATTERN] * 12), b"\x42" * 12]
    tour.holds(seen == expected, "whoever forgets to wait reads rubbish, every time")


# ---- 5 ------------------------------------------------------------------------------------------


def unmap_too_early(card: Card, page: int, staging: Pinned, stream: Stream) -> None:
    card.copy_in(page, staging, stream)
    sim.let_pass(5_000_000)  # long over, by the clock
    card.unmap(page, staging.bytes)


def unmap_behind_a_fence(
    card: Card, page: int, staging: Pinned, stream: Stream, fence: Event
) -> None:
    card.copy_in(page, staging, stream)
    fence.record(stream).synchronize()
    card.unmap(page, staging.bytes)


def a_hazard_is_caught(tour: Tour) -> None:
    card, stream, staging = tour.card, tour.streams[0], tour.staging
    tour.say(
        "Nothing keeps a GPU from unmapping memory that a copy still writes. There it goes well "
        "for weeks, then it does not. Here it is reported, because nothing orders the two."
    )
    tour.console.print(draw.source(unmap_too_early))
    tour.console.print()
    tour.pause(0.5)
    unmap_too_early(card, tour.page(94), staging, stream)
    found = sim.hazards()
    if found:
        tour.console.print(draw.hazard(found[0]))
        tour.console.print()
    tour.pause(0.8)
    tour.holds(
        len(found) == 1
        and found[0].kind is sim.Kind.UNMAP
        and found[0].first.call == "cuMemcpyHtoDAsync"
        and found[0].second.call == "cuMemUnmap",
        "one report, and it names both sides: call, stream, range, time, thread",
    )
    tour.console.print()
    tour.console.print(draw.source(unmap_behind_a_fence))
    tour.console.print()
    tour.pause(0.5)
    sim.clear_hazards()
    unmap_behind_a_fence(card, tour.page(95), staging, stream, tour.event())
    tour.holds(sim.hazard_count() == 0, "the corrected program is met with silence")


# ---- 6 ------------------------------------------------------------------------------------------


def any_call_can_fail(tour: Tour) -> None:
    card, nth, code = tour.card, 2, "CUDA_ERROR_NOT_READY"
    tour.say(
        "A driver's cuMemSetAccess is not ready now and then, for no reason of yours. "
        f"Let call {nth} from now be such a one, and see whether the program copes."
    )
    sim.fail("cuMemSetAccess", nth=nth, code=code)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for column in ("call", "page", "answer"):
        table.add_column(column)
    answers: list[str] = []
    pages = [tour.page(number) for number in (94, 95)]
    for page, frame in zip(pages, tour.frames[94:], strict=True):
        card.map(page, frame)
        while len(answers) < 8:  # the next attempt may pass; a hundred in a row would be a bug
            try:
                card.access(page, FRAME)
                answers.append("CUDA_SUCCESS")
            except sim.CallFailed as failed:
                answers.append(failed.name)
            good = answers[-1] == "CUDA_SUCCESS"
            answer = Text(answers[-1], "green" if good else "bold yellow")
            table.add_row(f"cuMemSetAccess {len(answers)}", f"{page:#x}", answer)
            if good:
                break
    tour.show(table, space=True)
    tour.holds(
        answers == ["CUDA_SUCCESS", code, "CUDA_SUCCESS"] and sim.failures() == 1,
        f"call {nth} failed as planned, and only that one; tried again, it passed",
    )
    tour.holds(
        all(len(sim.peek(page, 1)) == 1 for page in pages) and sim.check() is None,
        "both pages have their memory, and the simulator's books balance",
    )


# ---- 7 ------------------------------------------------------------------------------------------


def nothing_is_left(tour: Tour) -> None:
    card = tour.card
    tour.say("Give everything back, and count what is left.")
    before = sim.census()
    for number, frame in enumerate(tour.frames):
        card.unmap(tour.page(number), FRAME)
        frame.release()
    card.unreserve(tour.base, TIB)
    tour.staging.free()
    for event in tour.events:
        event.destroy()
    for stream in tour.streams:
        stream.destroy()
    free = card.memory()
    card.close()
    after = sim.census()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("held", justify="right", style="cyan")
    table.add_column("left", justify="right")
    for name, count in before.left().items():
        left = getattr(after, name)
        shown = [draw.size(n) if name.endswith("bytes") and n else str(n) for n in (count, left)]
        style = "bold green" if left == 0 else "bold red"
        table.add_row(name.replace("_", " "), shown[0], Text(shown[1], style))
    tour.show(table, space=True)
    tour.holds(
        free.used == card.figures.context,
        f"{draw.size(free.free)} is free again, as in the beginning",
    )
    tour.holds(after.left() == {}, "the census is empty: nothing leaked")


# ---- 8 ------------------------------------------------------------------------------------------


class Program:
    """The training run, a process of its own on a card of its own.

    It is started with the tour: importing PyTorch takes seconds. It begins when it is let.
    """

    COMMAND = ("run", "--sim", "64MiB", "--clock", "virtual", "-m", "ebbtide.cli._training")

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ebbtide", *self.COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """What it has to tell, as it happens."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        for line in self.process.stdout:
            yield json.loads(line)
        if self.process.wait() != 0:
            self.errors.seek(0)
            last = (self.errors.read().splitlines() or ["no word"])[-1]
            raise ValueError(f"the program ended with {self.process.returncode}: {last}")

    def close(self) -> None:
        if self.process.poll() is None:
            # The tour broke off. Interrupted, the program still removes the file of its card.
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            if file is not None:
                file.close()


def start_program() -> Program | str:
    """The training run, or why there is none."""
    try:
        launch.check()
    except sim.CannotStart as reason:
        return str(reason)
    return Program()


def sample(event: dict[str, Any]) -> draw.Sample:
    return draw.Sample(
        event["allocated"],
        event["reserved"],
        str(event["batch"]),
        event.get("loss"),
        event["what"] == "oom",
    )


def pytorch_runs_on_it(tour: Tour) -> None:
    if isinstance(tour.program, str):
        tour.skip(tour.program)
        return
    program = tour.program
    tour.say(
        "An ordinary training program, real PyTorch with device='cuda': a small transformer learns "
        "a paragraph, in batches that double until one is too large for the card."
    )
    tour.show(Text("$ ebbtide " + " ".join(Program.COMMAND), "bold"), space=True)
    told: list[dict[str, Any]] = []

    def training() -> Iterator[RenderableType]:
        for event in program.events():
            told.append(event)
            seen = [e for e in told if e["what"] in ("memory", "oom")]
            if seen:
                yield training_chart(tour, seen)

    tour.animate(training(), 0.06)
    card, end = told[0], told[-1]
    if card["what"] != "card" or end["what"] != "end":
        raise ValueError("the program ended before its end")
    failed = [event for event in told if event["what"] == "oom"]
    losses = end["losses"]
    tour.holds(
        losses[-1] < losses[0] / 2,
        f"PyTorch {card['torch']} on 64 MiB: the loss falls from {losses[0]:.2f} to "
        f"{losses[-1]:.2f} in {len(losses)} steps",
    )
    after = [step for step in told if step["what"] == "memory" and step["batch"] == 32][-1]
    tour.holds(
        len(failed) == 1 and after["step"] > failed[0]["step"],
        "a batch of 128 is too many: torch.OutOfMemoryError, caught; training goes on"
        + (f" ({failed[0]['words']})" if failed else ""),
    )
    tour.holds(
        end["same_losses"] and end["same_weights"],
        f"every loss and all {end['weights']:,} weights are equal to the CPU's, to the bit",
    )
    tour.holds(end["hazards"] == 0, f"{end['hazards']} hazards in all of it")


def training_chart(tour: Tour, events: list[dict[str, Any]]) -> Text:
    """Memory and loss over time, and the latest figures."""
    now = events[-1]
    width = tour.console.width - 2
    picture = draw.history(
        [sample(event) for event in events], now["total"], width, 7, tour.plain, ["loss", "batch"]
    )
    glyphs = ("#", ".") if tour.plain else ("█", "░")
    figures = Text("  ")
    for glyph, style, name in zip(glyphs, ("cyan", "blue"), ("allocated", "reserved"), strict=True):
        figures.append(glyph, style).append(f" {name} {now[name] / MIB:.1f} MiB   ")
    if now.get("loss") is not None:
        figures.append(f"loss {now['loss']:.3f}", "yellow")
    return Text("\n").join([picture, figures])


ACTS: list[tuple[str, Callable[[Tour], None]]] = [
    ("A card appears", a_card_appears),
    ("Addresses are free, memory is not", addresses_are_free),
    ("Time is modelled", time_is_modelled),
    ("Work happens late", work_happens_late),
    ("A hazard is caught", a_hazard_is_caught),
    ("Any call can be made to fail", any_call_can_fail),
    ("Nothing is left behind", nothing_is_left),
    ("PyTorch runs on it", pytorch_runs_on_it),
]


def play(tour: Tour) -> None:
    """All acts; an unexpected answer of the simulator is an untrue statement, and the last."""
    for number, (title, act) in enumerate(ACTS, 1):
        tour.act(number, title)
        try:
            act(tour)
        except (sim.CallFailed, ValueError) as error:
            tour.holds(False, f"this was not to happen: {error}")
            return
        tour.pause(0.3)


def main() -> int:
    """Give the tour; 0 if everything was as told."""
    # The tour's card is its own, whatever run other processes share.
    os.environ.pop("EBBTIDE_SIM_RUN", None)
    tour = Tour()
    tour.title("the simulated GPU, a tour")
    try:
        play(tour)
    except KeyboardInterrupt:
        return 130
    finally:
        if not isinstance(tour.program, str):
            tour.program.close()
    code = tour.end(
        "More: docs/simulator.md, docs/pytorch-sim.md, examples/",
        f"; {sim.calls():,} driver calls; {sim.now() / 1e6:.1f} ms on the card's clock, "
        "{seconds} on yours",
    )
    sim.reset()
    return code
