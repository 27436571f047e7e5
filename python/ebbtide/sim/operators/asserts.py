"""Errors in the data that a GPU's kernel meets while it runs: an index out of bounds, say.

On a GPU such an operator returns well, its kernel stops with "device-side assert triggered", and
every call from then on fails with that. Here the operator itself raises that error, at once and
with the CPU's words for what is wrong, and the card stays usable.
"""

from __future__ import annotations

import re

import torch

CODE = 710  # cudaErrorAssert

# Operators whose GPU kernels check what their indices or probabilities are, by how names begin.
CHECKED = (
    "aten::index",
    "aten::_index",
    "aten::_unsafe_index",
    "aten::gather",
    "aten::scatter",
    "aten::take",
    "aten::put_",
    "aten::embedding",
    "aten::_embedding_bag",
    "aten::nll_loss",
    "aten::multinomial",
    "aten::bernoulli",
)
_DATA = re.compile(
    r"out of bounds|index out of range|multinomial distribution|probability tensor|Expected p_in"
)


def asserted(name: str, error: Exception) -> Exception | None:
    """The error that a GPU gives for what a CPU's kernel found in the data; None: it is another."""
    if not name.startswith(CHECKED) or not _DATA.search(str(error)):
        return None
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    made: Exception = kind(
        f"CUDA error: device-side assert triggered\n{name}: {error}\n(a simulated GPU says so at "
        "once, and stays usable)"
    )
    made.error_code = CODE  # type: ignore[attr-defined]
    return made
