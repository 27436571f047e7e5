"""What state_dict() gives of weights at rest: their bytes on the host, to be read and written.

They lie in the memory of a unit, but here they are a storage of their own. So torch.save() writes
these bytes and no others; and it is known when nobody holds them any more, who might write there.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide._offload.memory import flat


class Given:
    """Bytes that others may hold, and write to."""

    __slots__ = ("_host", "_seen", "_storage", "_version")

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self._storage: StorageWeakRef | None = None
        # Without memory, which it would keep: but its version is that of all that is given.
        self._version = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._seen = self._version._version

    def bytes(self) -> torch.Tensor:
        """All of them. Those who hold them at the same time hold the same storage."""
        with torch.inference_mode(False):  # or nothing would tell that it is written
            storage = self._held() or self._new()
            made = self._version.detach()
            made.data = flat(storage, 0, storage.nbytes())
        return made

    def _held(self) -> torch.UntypedStorage | None:
        ref = self._storage
        held = None if ref is None else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        # Who shares it with another process has brought it to other memory.
        here = held is not None and held.data_ptr() == self._host.data_ptr()
        return held if here else None

    def _new(self) -> torch.UntypedStorage:
        memory: Any = (ctypes.c_ubyte * self._host.numel()).from_address(self._host.data_ptr())
        memory.over = self._host  # it is there for as long as this is
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        self._storage = StorageWeakRef(storage)
        return storage

    @property
    def is_held(self) -> bool:
        return self._storage is not None and not self._storage.expired()

    @property
    def is_written(self) -> bool:
        """Whether somebody has written there since it was seen the last time."""
        return self._seen != self._version._version

    def see(self) -> None:
        self._seen = self._version._version
