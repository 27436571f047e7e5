"""What a show in the terminal needs: acts, words, pictures that move, and statements with a tick.

A statement was checked a moment before, and is counted: the exit code of a show is 0 only if all of
it was true.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

WIDTH = 80  # also in a wider terminal: long lines are hard to read


class Stage:
    """The terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.console.width = min(self.console.width, WIDTH)
        self.plain = self.console.options.ascii_only
        # Somebody is watching: let them follow. Into a pipe, all at once.
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.statements = self.untrue = self.skipped = 0
        self.begun = time.monotonic()

    def title(self, words: str) -> None:
        self.console.print()
        wave = "~~~" if self.plain else "≈≈≈"
        self.show(Text.assemble((f"{wave} Ebbtide {wave}", "bold cyan"), f"  {words}"))

    def pause(self, seconds: float) -> None:
        if self.live:
            time.sleep(seconds)

    def act(self, number: int, title: str) -> None:
        self.console.print()
        heading = Text.assemble((f" {number} ", "bold reverse cyan"), (f" {title} ", "bold"))
        rule = "-" if self.plain else "─"
        self.console.print(Rule(heading, align="left", characters=rule, style="cyan"))

    def say(self, words: str) -> None:
        """A paragraph that tells what is about to be seen."""
        self.show(Text(words, "italic"))
        self.console.print()
        self.pause(0.4)

    def show(self, what: RenderableType, space: bool = False) -> None:
        self.console.print(Padding(what, (0, 2), expand=False))
        if space:
            self.console.print()

    def animate(self, pictures: Iterable[RenderableType], seconds: float) -> None:
        """Show one picture after the other in the same place; the last alone if nobody watches."""
        if self.live:
            with Live(console=self.console, auto_refresh=False) as screen:
                for picture in pictures:
                    screen.update(picture, refresh=True)
                    self.pause(seconds)
        else:
            self.console.print(*collections.deque(pictures, maxlen=1))
        self.console.print()

    def holds(self, condition: bool, words: str) -> None:
        """A statement, and whether it is true."""
        self.statements += 1
        self.untrue += not condition
        glyph = ("ok " if condition else "NO ") if self.plain else ("✓ " if condition else "✗ ")
        line = Table.grid(padding=(0, 0))
        line.add_row(Text(f"  {glyph}", "bold green" if condition else "bold red"), Text(words))
        self.console.print(line)
        self.pause(0.12)

    def skip(self, words: str) -> None:
        """An act that cannot be shown, and why."""
        self.skipped += 1
        self.show(Text(f"skipped: {words}", "bold yellow"))

    def end(self, more: str, also: str) -> int:
        """The verdict; the exit code."""
        self.console.print()
        self.console.print(Rule(characters="-" if self.plain else "─", style="cyan"))
        good = self.untrue == 0
        verdict = (
            f"{self.statements} statements, all true"
            if good
            else f"{self.untrue} of {self.statements} statements were not true"
        )
        if self.skipped:
            verdict += f", {self.skipped} act skipped"
        seconds = f"{time.monotonic() - self.begun:.1f} s"
        style = "bold green" if good else "bold red"
        self.show(Text.assemble((verdict, style), also.format(seconds=seconds)))
        self.show(Text(more, "dim"))
        return 0 if good else 1
