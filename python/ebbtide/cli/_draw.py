"""Pictures for the terminal: a bar, a timeline, a history, bytes, the two sides of a hazard.

Each is readable without colour, and with `plain` without anything but ASCII.
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ebbtide import sim

FIRST, SECOND = "bold magenta", "bold red"  # the two sides of a hazard


def size(count: float) -> str:
    """2 MiB, 7.8 GiB, 1 TiB"""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.1f}".removesuffix(".0") + f" {units[0]}"


def rate(count: float) -> str:
    """55.4 GB/s"""
    return f"{count / 1e9:.1f} GB/s" if count < 1e12 else f"{count / 1e12:.1f} TB/s"


# ---- a bar --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A share of a bar. `glyph` tells it from its neighbours where there is no colour."""

    label: str
    amount: int
    glyph: str
    style: str


GLYPHS = {"█": "#", "▓": "=", "▒": "%", "░": "."}


def bar(parts: Sequence[Part], total: int, width: int, plain: bool) -> Text:
    """One line for the parts, side by side, and one that names them."""
    line, names = Text("  "), Text("  ")
    done = drawn = 0
    for part in parts:
        # Cells by where the part ends, so that rounding never adds up to a cell too many.
        done += part.amount
        end = round(done / total * width)
        glyph = GLYPHS[part.glyph] if plain else part.glyph
        line.append(glyph * (end - drawn), part.style)
        drawn = end
        names.append(glyph, part.style).append(f" {part.label} {size(part.amount)}   ")
    names.rstrip()
    return Text("\n").join([line, names])


# ---- a timeline ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end` milliseconds."""

    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """A row of a timeline."""

    name: str
    style: str
    spans: Sequence[Span]


def _span(piece: Span, cells: int, style: str, plain: bool) -> Text:
    """▐███0███▌: half blocks at the ends keep neighbours apart, the label is cut out of it."""
    left, fill, right = ("[", "-", "]") if plain else ("▐", "█", "▌")
    if cells < len(piece.label) + 2:
        return Text(fill * cells, style)
    text = Text(left + piece.label.center(cells - 2, fill) + right, style)
    start = text.plain.index(piece.label)
    text.stylize("bold reverse", start, start + len(piece.label))
    return text


def timeline(
    lanes: Sequence[Lane], span: float, width: int, plain: bool, until: float | None = None
) -> Text:
    """The lanes on one scale of `span` milliseconds; nothing after `until`."""
    until = span if until is None else until
    margin = max(len(lane.name) for lane in lanes) + 4
    scale = (width - margin) / span
    lines = []
    for lane in lanes:
        line = Text(f"  {lane.name}".ljust(margin), "dim" if not lane.spans else "")
        at = 0
        for piece in lane.spans:
            if piece.start >= until:
                break
            start, end = round(piece.start * scale), round(piece.end * scale)
            # A piece that is not over yet is drawn as far as it has come.
            come = round(min(piece.end, until) * scale) - start
            line.append(" " * (start - at))
            line.append_text(_span(piece, end - start, lane.style, plain)[:come])
            at = end
        lines.append(line)
    axis = [" "] * (width - margin)
    for tick in range(int(span) + 1):
        label = f"{tick}" if tick + 1 <= span else f"{tick} ms"
        at = min(round(tick * scale), len(axis) - len(label))
        axis[at : at + len(label)] = label
    lines.append(Text(" " * margin + "".join(axis).rstrip(), "dim"))
    return Text("\n").join(lines)


# ---- a history ----------------------------------------------------------------------------------

EIGHTHS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Sample:
    """An allocator's memory at one moment."""

    allocated: int
    reserved: int
    group: str  # neighbours of one group get one label, below
    value: float | None = None  # what it was all for; drawn as a line of its own
    failed: bool = False  # more was asked for than there is


def _column(sample: Sample, total: int, height: int, plain: bool) -> list[tuple[str, str]]:
    """The cells of one moment, from the bottom."""
    eighths = round(sample.allocated / total * height * 8)
    reserved = round(sample.reserved / total * height)
    cells = []
    for row in range(height):
        part = min(8, max(0, eighths - 8 * row))
        if part and plain:
            cells.append(("#", "cyan") if part >= 4 else (".", "blue"))
        elif part:
            cells.append((EIGHTHS[part], "cyan"))
        elif row < reserved:
            cells.append(("." if plain else "░", "blue"))
        else:
            cells.append((" ", ""))
    if sample.failed:
        cells[-1] = ("!", "bold red")
    return cells


def _groups(samples: Sequence[Sample]) -> str:
    """The groups' labels, each below the first of its samples, if there is room."""
    line = before = ""
    for place, sample in enumerate(samples):
        if sample.group != before and len(line) <= place:
            line = line.ljust(place) + sample.group + " "
        before = sample.group
    return line[: len(samples)].rstrip()


def history(
    samples: Sequence[Sample], total: int, width: int, height: int, plain: bool, names: list[str]
) -> Text:
    """Memory over time, as high as the card's, with the values and the groups below; the latest
    samples if there is no room for all. `names` are those of the values and of the groups."""
    margin = max(9, *(len(name) + 3 for name in names))
    samples = samples[-max(1, width - margin) :]
    columns = [_column(sample, total, height, plain) for sample in samples]
    lines = []
    for row in reversed(range(height)):
        label = size(total) if row == height - 1 else "0" if row == 0 else ""
        axis = "|" if plain else "┤"
        line = Text().append(label.rjust(margin - 2) + axis + " ", "dim")
        # Neighbours of one style in one piece: a live picture is sent a hundred times.
        for style, cells in itertools.groupby((c[row] for c in columns), key=lambda cell: cell[1]):
            line.append("".join(glyph for glyph, _ in cells), style)
        lines.append(line)
    values = [sample.value for sample in samples if sample.value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    curve = ""
    for sample in samples:
        share = 1.0
        if sample.value is not None and high > low:
            share = (sample.value - low) / (high - low)
        glyph = f"{share * 9:.0f}" if plain else EIGHTHS[1 + round(share * 7)]
        curve += " " if sample.value is None else glyph
    below = (Text(curve, "yellow"), Text(_groups(samples), "dim"))
    for name, text in zip(names, below, strict=True):
        lines.append(Text.assemble((name.rjust(margin - 2) + "  ", "dim"), text))
    return Text("\n").join(lines)


# ---- bytes --------------------------------------------------------------------------------------


def hexes(data: bytes, styles: dict[int, str]) -> Text:
    """EB EB EB EB, each in the style of its value."""
    return Text(" ").join(Text(f"{byte:02X}", styles.get(byte, "")) for byte in data)


# ---- code ---------------------------------------------------------------------------------------


def source(function: Callable[..., object]) -> Syntax:
    """The body of a function as it stands in its file: what is shown is what runs."""
    lines = inspect.getsource(function).splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith(":")) + 1
    if lines[start].strip().startswith('"""'):
        start += 1
    body = textwrap.dedent("\n".join(lines[start:]))
    return Syntax(body, "python", theme="ansi_dark", background_color="default", padding=(0, 4))


# ---- hazards ------------------------------------------------------------------------------------


def _mark(text: Text, side: sim.Side, style: str) -> None:
    """Style the part of a report that describes this side: from its call to its thread."""
    start = text.plain.find(f"{side.call} on ")
    end = text.plain.find(")", text.plain.find("(at ", start))
    if 0 <= start < end:
        text.stylize(style, start, end + 1)


def hazard(found: sim.Hazard) -> Panel:
    """A report: its words with both sides marked, and the sides in a table."""
    words = Text(found.text)
    _mark(words, found.first, FIRST)
    _mark(words, found.second, SECOND)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("side", "call", "where", "what", "when"):
        table.add_column(column, justify="right" if column == "when" else "left", no_wrap=True)
    for name, side, style in (("first", found.first, FIRST), ("second", found.second, SECOND)):
        verb = "takes" if side.device is None else "writes" if side.writes else "reads"
        what = f"{verb} {size(side.bytes)}"
        table.add_row(name, side.call, side.place, what, f"{side.when / 1e6:.3f} ms", style=style)
    title = Text(f"hazard: {found.kind.name.lower()}", SECOND)
    return Panel(Group(words, "", table), title=title, border_style="red", padding=(0, 1))
