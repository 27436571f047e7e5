"""Device, VBAR and Weight: model weights at fixed addresses, with memory that comes and goes.

    dev = ebbtide.Device(0, limit="8GiB")
    vbar = ebbtide.VBAR(dev, "12GiB")
    w = vbar.alloc(host.nbytes)
    with w.resident(host) as t:
        use(t)

docs/vbar.md tells the rest. What is about torch is in tensors.py, and loaded when it is needed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ebbtide import _core
from ebbtide.sizes import parse

if TYPE_CHECKING:
    import torch

    from ebbtide.sim import Card

# How an object goes. It is a default argument there: at the interpreter's end, what modules have is
# gone before some objects are, and who goes then finds None in its place.
QUIETLY = contextlib.suppress(AttributeError, TypeError, _core.Error)

_closed_cards: list[Card] = []
_cards_lock = threading.Lock()


def _card_of(memory: int) -> Card:
    """A simulated card for one device: one that was closed is as good as new, and there can only be
    so many."""
    from ebbtide import sim

    with _cards_lock:
        known = [card for card in _closed_cards if not card.forgotten]
        fitting = next((card for card in known if card.figures.memory == memory), None)
        _closed_cards[:] = [card for card in known if card is not fitting]
    return sim.Card(fitting.ordinal, fitting.figures) if fitting else sim.add_card(memory=memory)


class Device(_core.Device):
    """One GPU, and everything Ebbtide knows of it.

    `index` is the GPU's number, or "sim" for a simulated card of its own, of `memory` bytes.
    `limit` is the VRAM that may be held through Ebbtide (all of it, if none is given), `headroom`
    what is left free for others. Sizes are bytes, or "8GiB". The same GPU opened twice is the same
    device.
    """

    def __init__(
        self,
        index: int | str = 0,
        *,
        limit: int | str | None = None,
        headroom: int | str | None = None,
        memory: int | str | None = None,
    ) -> None:
        if self.index is not None:
            raise TypeError("a Device is opened once")
        self._card: Card | None = None
        given = {"limit": limit, "headroom": headroom}
        sizes = [None if size is None else parse(size, name) for name, size in given.items()]
        if index == "sim":
            from ebbtide import sim

            self._card = _card_of(parse("8GiB" if memory is None else memory, "memory"))
            super().__init__(self._card.ordinal, *sizes, sim.library(), True)
            return
        if isinstance(index, str):
            raise ValueError(f"{index!r} is no GPU: give its number, or 'sim'")
        if memory is not None:
            raise ValueError("only a simulated card, Device('sim'), can be given its memory")
        super().__init__(index, *sizes)
        # It may have been open already, with others.
        if limit is not None:
            self.limit = limit
        if headroom is not None:
            self.headroom = headroom

    def __repr__(self) -> str:
        return f"<ebbtide.Device {'sim' if self._beside else self.index}>"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroy its VBARs and give everything back. Busy if a weight is pinned."""
        super().close()
        card, self._card = getattr(self, "_card", None), None
        if card is not None:
            card.close()
            with _cards_lock:
                _closed_cards.append(card)

    def __del__(self, quietly: AbstractContextManager[None] = QUIETLY) -> None:
        # The card is closed after the device, and only if that could be.
        with quietly:
            self.close()

    @property
    def limit(self) -> int:
        """Bytes of VRAM that may be held; settable, also lower than what is held."""
        return super().limit

    @limit.setter
    def limit(self, size: int | str) -> None:
        _core.Device.limit.__set__(self, parse(size, "limit"))

    @property
    def headroom(self) -> int:
        """Bytes to leave free for others; settable."""
        return super().headroom

    @headroom.setter
    def headroom(self, size: int | str) -> None:
        _core.Device.headroom.__set__(self, parse(size, "headroom"))

    # ---- called by the extension ----

    def _make_room(self, size: int) -> bool:
        """A weight was offloaded: whether there is a reason to try again."""
        door = sys.modules.get("ebbtide._attach")
        return door is not None and not self._beside and door.make_room(self.index, size)

    def _meet_torch(self) -> None:
        """torch has been imported: from now on its current stream is the one that counts."""
        from ebbtide import tensors

        self._stream_at = tensors.current_stream_at()
        self._stream_of = tensors.current_stream()

    def _meet_stream(self, stream: int) -> None:
        """A stream is PyTorch's current one for the first time."""
        from ebbtide import tensors

        if tensors.lasts(self.index, stream):
            self.keep_stream(stream)


class VBAR(_core.VBAR):
    """A range of GPU addresses for the weights of one model, the most important of its device.

    `rise`: the watermark rises by itself when VRAM has become free again. `page_out(offset, bytes)`
    is called before a page is given up, on any thread, so that written weights can be saved; if it
    raises, the page stays. `fine`: at least so many of the last bytes come and go by pages of 2 MiB
    instead of 32.
    """

    def __init__(
        self,
        device: Device,
        size: int | str,
        *,
        rise: bool = False,
        page_out: Callable[[int, int], object] | None = None,
        fine: int | str = 0,
    ) -> None:
        if not isinstance(device, Device):
            raise TypeError(f"a VBAR is made on an ebbtide.Device, not on {device!r}")
        super().__init__(device, parse(size), rise, page_out, parse(fine))

    def __repr__(self) -> str:
        return f"<ebbtide.VBAR at {self.address:#x}>"

    def __enter__(self) -> VBAR:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def alloc(self, size: int | str) -> Weight:
        """The next `size` bytes: addresses only. Take the most important weights first."""
        return Weight(self, parse(size))

    def free_memory(self, size: int | str) -> int:
        """Give up unpinned pages from the top until so many bytes are free. How many were."""
        return super().free_memory(parse(size))

    @property
    def loaded_size(self) -> int:
        """Bytes that have memory behind them."""
        return self.stats()["resident"]

    @property
    def watermark(self) -> int:
        """Pages that begin at or above it are not loaded."""
        return self.stats()["watermark"]

    @watermark.setter
    def watermark(self, size: int | str) -> None:
        self.set_watermark(parse(size))

    @property
    def watermark_limit(self) -> int:
        """Where the watermark can rise to."""
        return self.stats()["watermark_limit"]

    @watermark_limit.setter
    def watermark_limit(self, size: int | str) -> None:
        self.set_watermark_limit(parse(size))


class Weight(_core.Weight):
    """A piece of a VBAR, made by VBAR.alloc()."""

    def __init__(self, vbar: VBAR, size: int) -> None:
        if not isinstance(vbar, VBAR):
            raise TypeError(f"a weight is a piece of an ebbtide.VBAR, not of {vbar!r}")
        super().__init__(vbar, size)
        self._tensors: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._filling = threading.Lock()

    def __repr__(self) -> str:
        return f"<ebbtide.Weight of {self.nbytes} bytes at {self.address:#x}>"

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over its addresses, built once. To be touched between fault() and unpin()."""
        key = (tuple(shape), dtype)
        tensor = self._tensors.get(key)
        if tensor is None:
            from ebbtide import tensors

            tensor = self._tensors[key] = tensors.over(self, *key)
        return tensor

    def resident(self, host: torch.Tensor) -> Resident:
        """`with w.resident(host) as t`: t has the values of `host`, on the GPU, for PyTorch's
        current stream; from the VBAR, or, where it is offloaded, in a temporary."""
        return Resident(self, host)


class Resident:
    """A weight in use, whatever it takes. Made by Weight.resident()."""

    __slots__ = ("_host", "_pins", "_weight")

    def __init__(self, weight: Weight, host: torch.Tensor) -> None:
        if host.nbytes > weight.nbytes:
            raise ValueError(f"{host.nbytes} bytes do not fit into {weight!r}")
        self._weight = weight
        self._host = host
        self._pins = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy a weight in use")

    def __enter__(self) -> torch.Tensor:
        weight, host = self._weight, self._host
        # One thread fills; another that comes meanwhile waits, and finds it filled.
        with weight._filling:
            signature = weight.fault()
            if signature is not None:
                self._pins += 1
                try:
                    tensor = weight.tensor(host.shape, host.dtype)
                    if signature != weight.signature:
                        # Values alone: the tensor stays, and must keep no graph.
                        tensor.copy_(host.detach(), non_blocking=True)
                        weight.filled(signature)
                except BaseException:
                    self.__exit__(None, None, None)
                    raise
                return tensor
        from ebbtide import tensors

        return tensors.temporary(weight, host)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pins:
            self._pins -= 1
            self._weight.unpin()
