"""What CUDA graphs use of a model's weights when the model has parted with it."""

from __future__ import annotations

import contextlib

from ebbtide.vbar import QUIETLY, VBAR


class Graphs:
    """VBARs that a model has no more, of which graphs hold pages. They stay until somebody says
    that the graphs are gone: nobody else can know. The model's handle has them, too, and may
    outlive it."""

    def __init__(self) -> None:
        self._vbars: list[VBAR] = []

    def keep(self, vbar: VBAR | None) -> None:
        """A model parts with its VBAR: what no graph holds of it goes. Finalizers call this: it
        takes no lock."""
        with QUIETLY:
            if vbar is not None and vbar.stats()["held"]:
                self._vbars.append(vbar)
                vbar.free_memory(vbar.loaded_size)

    def gone(self) -> None:
        """None of the graphs is left."""
        for vbar in list(self._vbars):
            vbar.graphs_gone()
            with contextlib.suppress(ValueError):  # another thread has said so, too
                self._vbars.remove(vbar)
