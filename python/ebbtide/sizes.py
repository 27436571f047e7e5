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


def parse(size: int | str, name: str = "") -> int:
    """Bytes of "8GiB", "512 MiB", "1.5GB" or a number. ValueError for anything else, which says
    what argument it was, if that has a `name`."""
    part = isinstance(size, float) and not size.is_integer()  # of a byte
    match = None if part else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        said = f"{name}={size!r}" if name else repr(size)
        raise ValueError(f"{said} is not a size: write 8GiB, 512MiB or a number of bytes")
    if isinstance(size, int):
        return size
    return int(float(match[1]) * unit)
