"""attach(): Ebbtide under PyTorch's own caching allocator.

    import ebbtide
    ebbtide.attach(limit="8GiB")

From then on PyTorch's segments and the weights in VBARs share one pool and one limit, and weights
give way to activations. docs/attach.md tells the rest.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide import _core
from ebbtide.sizes import parse
from ebbtide.vbar import Device

ALL = (1 << 64) - 1


class CannotAttach(RuntimeError):
    """PyTorch's allocator cannot be attached to; the message says why and what to do."""


_attached = False
_wrapped: dict[str, Callable[..., Any]] = {}  # of torch.cuda.memory, as they were


# ---- whether it can be done ---------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    """What PyTorch's allocator was told."""
    return torch.cuda.memory._snapshot()["allocator_settings"]


def _check() -> None:
    if not torch.backends.cuda.is_built():
        raise CannotAttach("this PyTorch was built without CUDA: there is nothing to attach to")
    if torch.version.hip is not None:
        raise CannotAttach("this PyTorch is for AMD's GPUs, which Ebbtide does not know")
    # A plain question, which must not start CUDA.
    if "pluggable" in torch.cuda.get_allocator_backend():
        raise CannotAttach("another allocator has replaced PyTorch's own: Ebbtide goes under that")
    if _expandable():
        raise CannotAttach(
            "expandable_segments:True makes PyTorch take memory past the CUDA runtime, where "
            "Ebbtide cannot see it: leave it out of PYTORCH_CUDA_ALLOC_CONF. With Ebbtide under "
            "it, free memory is used again at any address anyway"
        )


def _expandable() -> bool:
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if settings is not None and "expandable_segments:True" in settings().replace(" ", ""):
        return True
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            return True
    if not torch.cuda.is_initialized() or not _native():
        return False
    return bool(_settings().get("expandable_segments"))


def _native() -> bool:
    """PyTorch's own caching, not the runtime's (backend:cudaMallocAsync)."""
    return torch.cuda.get_allocator_backend() == "native"


# ---- pools --------------------------------------------------------------------------------------

# While one of PyTorch's pools is open, it takes a refusal for the end instead of freeing what it
# does not use. So it is refused nothing then, and these say when.
BEGIN = (
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateCurrentStreamToPool",
)
END = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


def _wrap_pools() -> None:
    for names, change in ((BEGIN, 1), (END, -1)):
        for name in names:
            original = getattr(torch.cuda.memory, name, None)
            if original is not None:
                _wrapped[name] = original
                setattr(torch.cuda.memory, name, _counted(original, change))


def _counted(original: Callable[..., Any], change: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(device: int, *rest: Any) -> Any:
        if change > 0:
            _core.attach_pool(device, change)
        try:
            return original(device, *rest)
        finally:
            if change < 0:
                _core.attach_pool(device, change)

    return counted


def _unwrap_pools() -> None:
    for name, original in _wrapped.items():
        setattr(torch.cuda.memory, name, original)
    _wrapped.clear()


# ---- attach and detach --------------------------------------------------------------------------


def attach(
    limit: int | str | None = None,
    headroom: int | str | None = None,
    devices: Iterable[int] | None = None,
) -> None:
    """Put Ebbtide under PyTorch's caching allocator, before or after CUDA has started.

    `limit` is the VRAM that weights and tensors may use together, on each GPU; `headroom` what is
    left free for others; `devices` the GPUs (all, if none are given).
    """
    global _attached
    given = {"limit": limit, "headroom": headroom}
    sizes = [None if size is None else parse(size, name) for name, size in given.items()]
    mask = ALL
    if devices is not None:
        mask = 0
        for index in devices:
            if not 0 <= index < torch.cuda.device_count():
                raise ValueError(
                    f"there is no GPU {index}: PyTorch shows {torch.cuda.device_count()}"
                )
            mask |= 1 << index
    _check()
    _core.attach(*sizes, mask)
    _attached = True
    _asking.clear()
    _wrap_pools()
    # The other allocator's memory is a pool's, which is asked whenever it grows.
    if torch.cuda.is_initialized() and _native():
        _count_before(mask)


def _count_before(mask: int) -> None:
    """What PyTorch has already taken counts against the limit until it frees it."""
    before: dict[int, list[tuple[int, int]]] = {}
    for segment in torch.cuda.memory_snapshot():
        index = segment["device"]
        if mask >> index & 1:
            before.setdefault(index, []).append((segment["address"], segment["total_size"]))
    for index, segments in before.items():
        _core.attach_before(index, segments)


def detach() -> int:
    """Undo attach(). Bytes of PyTorch's that are still over Ebbtide's memory: they stay valid, and
    come back as PyTorch frees them (torch.cuda.empty_cache() first frees what it does not use)."""
    global _attached
    remaining = _core.detach()
    if _attached:
        _attached = False
        _unwrap_pools()
    return remaining


def is_attached() -> bool:
    """Whether PyTorch's next segment will be Ebbtide's."""
    return _attached


def memory_stats(device: int | torch.device | None = None) -> dict[str, int]:
    """What Ebbtide adds to torch.cuda.memory_stats(): Device.stats(), and the segments PyTorch has
    over Ebbtide's memory. Empty if nothing was allocated there yet."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    stats = _core.attached_stats(index)
    if stats is None:
        return {}
    opened = Device(index)
    try:
        return {**opened.stats(), **stats}
    finally:
        opened.close()


# ---- memory that PyTorch caches and does not use, for weights -----------------------------------


class Asking:
    """When to flush PyTorch's cache for a weight: as policy.c does for PyTorch's own requests. Each
    time in vain makes it 32 times more seldom, so many times."""

    SHIFT = 5
    CALM = 8  # times that who asks in every pass is not answered, if PyTorch holds what it held

    def __init__(self, most_setbacks: int = 4) -> None:
        self.lock = threading.Lock()
        self.most_setbacks = most_setbacks
        self.pressures = 0
        self.setbacks = 0
        self.flushed = 0
        self.left = 0
        self.calm = 0  # of these times, those to come
        self.held = (-1, 0)  # bytes that PyTorch held, and that were asked for, the last time

    def _is_too_early(self) -> bool:
        return self.pressures < 1 << self.SHIFT * min(self.setbacks, self.most_setbacks)

    def _is_calm(self, index: int, size: int) -> bool:
        """To look what PyTorch could give takes as long as some layers do."""
        segments = _core.attached_stats(index)
        held = (segments["segment_bytes"] if segments else 0, size)
        calm = held == self.held and self.calm > 0
        self.held, self.calm = held, self.calm - 1 if calm else self.CALM
        return calm

    def flush(self, index: int, size: int, often: bool, times: int) -> bool:
        with self.lock:
            self.pressures += times
            if self._is_too_early():
                return False
            if often and self._is_calm(index, size):
                return False
            reserved, unused = _cached(index)
            if unused < size or torch.cuda.is_current_stream_capturing():
                return False
            # There is something again. If it is what was flushed the last time, and too little of
            # that has stayed away, then it was in use after all, and so is this.
            away = self.flushed - (reserved - self.left)
            wasted = self.flushed and away <= min(self.flushed / 2, size - 1)
            if self.flushed:
                self.setbacks = self.setbacks + 1 if wasted else 0
                self.flushed = 0
            if self._is_too_early():
                return False
            empty_cache(index)
            self.left = torch.cuda.memory_stats(index)["reserved_bytes.all.current"]
            self.flushed = reserved - self.left
            self.pressures = 0
            self.setbacks += not self.flushed
            return self.flushed > 0

    def met(self) -> None:
        """What is asked for is there."""
        self.setbacks = self.flushed = 0


_asking: dict[int, Asking] = {}


def empty_cache(index: int) -> None:
    """PyTorch gives back what it caches of a GPU."""
    with torch.cuda.device(index):
        torch.cuda.empty_cache()


def _cached(index: int) -> tuple[int, int]:
    """Bytes that PyTorch has, and of them what it would give back."""
    stats = torch.cuda.memory_stats_as_nested_dict(index)  # memory_stats() sorts all there is
    reserved = stats["reserved_bytes"]["all"]["current"]
    unused = reserved - stats["active_bytes"]["all"]["current"]
    return reserved, unused - stats["inactive_split_bytes"]["all"]["current"]


def flush(index: int, size: int) -> bool:
    """Whatever it costs, PyTorch gives back what it caches, if that is as much: whether it has."""
    if not _attached or size <= 0 or torch.cuda.is_current_stream_capturing():
        return False
    reserved, unused = _cached(index)
    if unused < size:
        return False
    empty_cache(index)
    return _cached(index)[0] < reserved


def make_room(
    index: int, size: int, often: bool = False, asking: Asking | None = None, times: int = 1
) -> bool:
    """A weight of `size` bytes was offloaded: True if PyTorch has given something back for it.
    `often`: it is asked in every pass, and may as well be answered in a later one; `times`: it
    could have been asked so often since it was."""
    if not _attached or not torch.cuda.is_initialized():
        return False
    asking = asking or _asking.setdefault(index, Asking())
    return asking.flush(index, size, often, times)
