"""Sizes as people write them."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse(size: int | str) -> int:
    """Bytes of "8GiB", "512 MiB", "1.5GB" or a number. ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"a size cannot be {size}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{size!r} is not a size: write 8GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * unit)
