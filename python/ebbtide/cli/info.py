"""python -m ebbtide info: what Ebbtide finds on this machine, and in its simulated GPU."""

from __future__ import annotations

from os import PathLike

from rich.console import Console
from rich.table import Table

import ebbtide
import ebbtide.sim


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _rows(library: PathLike[str] | None) -> list[tuple[str, str]]:
    try:
        found = ebbtide.probe(library)
    except ebbtide.Error as error:
        return [("status", f"[yellow]{error}[/]")]
    major, minor = divmod(found.driver_version, 1000)
    return [
        ("status", f"[green]{found.detail}[/]"),
        ("driver", f"CUDA {major}.{minor // 10}"),
        ("GPUs", str(found.device_count)),
        ("memory", _size(found.total_bytes)),
        ("granularity", _size(found.granularity)),
        ("shareable", "yes" if found.exportable else "no"),
        ("events of a context", "yes" if found.context_events else "no"),
    ]


def main() -> int:
    """Print it. A machine without a GPU is an answer, not a failure."""
    console = Console()
    console.print(f"Ebbtide {ebbtide.__version__}")
    for title, library in (("the driver", None), ("the simulated GPU", ebbtide.sim.library())):
        table = Table("", title, box=None, pad_edge=False, header_style="bold")
        for row in _rows(library):
            table.add_row(*row)
        console.print()
        console.print(table)
    return 0
