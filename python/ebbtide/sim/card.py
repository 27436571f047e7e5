"""A simulated card and what it has: addresses, frames, streams, events, pinned memory.

Thin on purpose. Every method is one call of the driver (and one that makes the card's context
current); it raises CallFailed where the driver gives another code than success. Addresses are ints,
as the driver's are. Nothing is freed behind your back: what you leave behind shows in the census.
"""

from __future__ import annotations

import ctypes
import dataclasses
import operator
import os
from collections.abc import Sequence
from ctypes import (
    byref,
    c_char_p,
    c_float,
    c_int,
    c_long,
    c_size_t,
    c_ssize_t,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any, Literal, NamedTuple

from ebbtide.sim import _library as lib
from ebbtide.sim._library import CallFailed, library

Range = tuple[int, int]  # address and bytes
MOST_CARDS = 16  # of a run


def _bytes(count: int, what: str = "a size") -> int:
    # ctypes would make a huge size of a negative one without a word.
    count = operator.index(count)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{what} cannot be {count}")
    return count


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a card is like."""

    memory: int  # bytes in all, a multiple of 2 MiB
    name: str
    context: int  # bytes each process's context takes
    h2d_rate: float  # bytes a second: pinned host to device,
    d2h_rate: float  # device to pinned host,
    duplex_rate: float  # each way while both are busy,
    pageable_rate: float  # host memory that is not pinned,
    memory_rate: float  # the card's own memory
    flops: float  # floating-point operations a second
    copy_latency: int  # nanoseconds before the first byte
    kernel_latency: int
    compute_major: int
    compute_minor: int
    multiprocessors: int
    peer: bool  # other cards can have access to its memory
    vmm: bool  # False: a vGPU without virtual memory management
    exportable: bool  # memory can be exported as file descriptors

    @classmethod
    def default(cls, memory: int) -> Figures:
        """An H200's, but for the memory and, where that is small, the context."""
        raw = lib.CardStruct()
        library().ask("ebbsim_card_default", byref(raw), _bytes(memory, "a card's memory"))
        values = {field.name: getattr(raw, field.name) for field in dataclasses.fields(cls)}
        values |= {name: bool(values[name]) for name in ("peer", "vmm", "exportable")}
        # The default rounds the memory down; a size that makes no sense is to be refused instead.
        return cls(**{**values, "name": raw.name.decode(), "memory": memory})

    def _raw(self) -> lib.CardStruct:
        raw = lib.CardStruct(size=sizeof(lib.CardStruct))
        for name, value in dataclasses.asdict(self).items():
            setattr(raw, name, value.encode() if name == "name" else value)
        return raw


class Memory(NamedTuple):
    """Bytes free on a card, whoever uses the rest, and bytes in all."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclasses.dataclass(frozen=True)
class Frame:
    """Physical memory: one handle of one allocation of the driver's."""

    handle: int
    bytes: int
    card: Card

    def release(self) -> None:
        """Drop the handle. The memory lives on while it is mapped anywhere."""
        library().call("cuMemRelease", self.handle)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A queue of work. `handle` None is the card's default stream."""

    handle: int | None
    card: Card

    def synchronize(self) -> None:
        """Wait until everything queued so far is over."""
        self.card.call("cuStreamSynchronize", self.handle)

    def idle(self) -> bool:
        """Whether everything queued is over. Having heard so, the host has seen it."""
        return self.card.ready("cuStreamQuery", self.handle)

    def wait(self, event: Event) -> None:
        """Order everything queued from now on after the event. The host does not wait."""
        self.card.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def destroy(self) -> None:
        """Its work goes on."""
        self.card.call("cuStreamDestroy", self.handle)


@dataclasses.dataclass(frozen=True)
class Event:
    """A point in a stream."""

    handle: int
    card: Card

    def record(self, stream: Stream) -> Event:
        """Stand for everything queued on the stream so far. Gives the event itself."""
        self.card.call("cuEventRecord", self.handle, stream.handle)
        return self

    def synchronize(self) -> None:
        """Wait until the stream has reached it."""
        self.card.call("cuEventSynchronize", self.handle)

    def reached(self) -> bool:
        """Whether the stream has reached it. Having heard so, the host has seen it."""
        return self.card.ready("cuEventQuery", self.handle)

    def since(self, start: Event) -> float:
        """Milliseconds of modelled time from `start` to this event; both must be reached."""
        milliseconds = c_float()
        self.card.call("cuEventElapsedTime", byref(milliseconds), start.handle, self.handle)
        return milliseconds.value

    def destroy(self) -> None:
        self.card.call("cuEventDestroy", self.handle)


class Pinned:
    """Pinned host memory, as Card.pinned() gives it."""

    def __init__(self, card: Card, address: int, size: int) -> None:
        self.card = card
        self.address = address
        self.bytes = size
        self._freed = False

    def _piece(self, offset: int, size: int) -> int:
        # Memory that is gone would be a crash, or somebody else's by now.
        if self._freed or self.card.closed:
            raise ValueError("this pinned memory is freed")
        if not 0 <= offset <= offset + size <= self.bytes:
            raise ValueError(f"{size} bytes at {offset} do not lie within {self.bytes}")
        return self.address + offset

    def write(self, data: bytes, offset: int = 0) -> None:
        """Put bytes there, as the host does: at once, whatever copy may be reading them."""
        ctypes.memmove(self._piece(offset, len(data)), data, len(data))

    def fill(self, value: int) -> None:
        """Put the same byte everywhere."""
        if not 0 <= value <= 255:
            raise ValueError(f"{value} is not a byte")
        ctypes.memset(self._piece(0, self.bytes), value, self.bytes)

    def read(self, size: int | None = None, offset: int = 0) -> bytes:
        """What is there now. A copy out that nobody has waited for has not happened."""
        size = self.bytes - offset if size is None else _bytes(size)
        return ctypes.string_at(self._piece(offset, size), size)

    def free(self) -> None:
        self._piece(0, 0)
        self.card.call("cuMemFreeHost", self.address)
        self._freed = True


class Card:
    """One simulated GPU, and this process's context on it. Made by add_card() and open_card()."""

    def __init__(self, ordinal: int, figures: Figures | None = None) -> None:
        self.ordinal = ordinal
        self._closed = False
        self._resets = library().resets
        self.default_stream = Stream(None, self)
        exportable, context = c_int(), c_void_p()
        attribute = lib.ATTRIBUTE_EXPORTABLE
        library().call("cuDeviceGetAttribute", byref(exportable), attribute, ordinal)
        self._handle_types = lib.HANDLE_FILE_DESCRIPTOR if exportable.value else 0
        self._figures = figures
        library().call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
        self._context = context.value

    def __repr__(self) -> str:
        return f"<simulated card {self.ordinal}>"

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def forgotten(self) -> bool:
        """By sim.reset(): there is no such card any more."""
        return self._resets != library().resets

    @property
    def closed(self) -> bool:
        """Closed, or forgotten."""
        return self._closed or self.forgotten

    def close(self) -> None:
        """Give the context back; it waits for its work. Pinned memory, streams and events go."""
        if not self.closed:
            self._closed = True
            library().call("cuCtxSetCurrent", None)
            library().call("cuDevicePrimaryCtxRelease", self.ordinal)

    def call(self, function: str, *arguments: Any) -> None:
        """Call the driver with this card's context current; CallFailed if it gives another code."""
        if self.closed:
            raise ValueError("this card is closed")
        library().call("cuCtxSetCurrent", self._context)
        library().call(function, *arguments)

    def ready(self, function: str, *arguments: Any) -> bool:
        """As call(), for functions that answer by their code: not ready is an answer."""
        try:
            self.call(function, *arguments)
        except CallFailed as failed:
            if failed.call == function and failed.code == lib.NOT_READY:
                return False
            raise
        return True

    # ---- the card ----

    @property
    def figures(self) -> Figures:
        """What the card is like; ValueError where another added it, since no driver tells that."""
        if self._figures is None:
            raise ValueError(f"the figures of card {self.ordinal} are known to who added it")
        return self._figures

    @property
    def name(self) -> str:
        """As the driver gives it."""
        text = ctypes.create_string_buffer(64)
        library().call("cuDeviceGetName", text, len(text), self.ordinal)
        return text.value.decode()

    @property
    def total(self) -> int:
        """Bytes in all."""
        size = c_size_t()
        library().call("cuDeviceTotalMem", byref(size), self.ordinal)
        return size.value

    @property
    def granularity(self) -> int:
        """Bytes a frame is a multiple of."""
        size = c_size_t()
        library().call("cuMemGetAllocationGranularity", byref(size), byref(self._properties()), 0)
        return size.value

    def memory(self) -> Memory:
        """How much is free, by the driver's own account."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo", byref(free), byref(total))
        return Memory(free.value, total.value)

    def others_use(self, size: int) -> None:
        """Let `size` bytes of the card be in use by somebody else from now on. At once."""
        library().call("ebbsim_foreign_use", self.ordinal, _bytes(size))

    def synchronize(self) -> None:
        """Wait for all work of this card's context."""
        self.call("cuCtxSynchronize")

    # ---- addresses and frames ----

    def _properties(self) -> lib.AllocationStruct:
        return lib.AllocationStruct(
            type=lib.ALLOCATION_PINNED,
            handle_types=self._handle_types,
            location=lib.LocationStruct(lib.LOCATION_DEVICE, self.ordinal),
        )

    def reserve(self, size: int) -> int:
        """Reserve addresses. They cost no memory."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), _bytes(size), 0, 0, 0)
        return address.value

    def unreserve(self, address: int, size: int) -> None:
        """Give a whole reservation back. Nothing may be mapped in it."""
        self.call("cuMemAddressFree", address, _bytes(size))

    def create(self, size: int) -> Frame:
        """Take physical memory of the card."""
        handle = c_uint64()
        self.call("cuMemCreate", byref(handle), _bytes(size), byref(self._properties()), 0)
        return Frame(handle.value, size, self)

    def map(self, address: int, frame: Frame) -> None:
        """Put a frame behind an address. It cannot be used before it has access()."""
        self.call("cuMemMap", address, frame.bytes, 0, frame.handle, 0)

    def access(
        self,
        address: int,
        size: int,
        kind: Literal["none", "read", "read and write"] = "read and write",
        *,
        card: Card | None = None,
    ) -> None:
        """Say how this card (or another) may use what is mapped there."""
        kinds = {
            "none": lib.ACCESS_NONE,
            "read": lib.ACCESS_READ,
            "read and write": lib.ACCESS_READ_WRITE,
        }
        if kind not in kinds:
            raise ValueError(f"{kind!r} is none of {', '.join(kinds)}")
        user = lib.LocationStruct(lib.LOCATION_DEVICE, (card or self).ordinal)
        described = lib.AccessStruct(user, kinds[kind])
        self.call("cuMemSetAccess", address, _bytes(size), byref(described), 1)

    def unmap(self, address: int, size: int) -> None:
        """Take whole frames away from behind their addresses. It waits for nothing: you must."""
        self.call("cuMemUnmap", address, _bytes(size))

    # ---- queues ----

    def stream(self) -> Stream:
        """A stream that waits for no other, the default stream included."""
        handle = c_void_p()
        self.call("cuStreamCreate", byref(handle), lib.STREAM_NON_BLOCKING)
        return Stream(handle.value, self)

    def event(self) -> Event:
        handle = c_void_p()
        self.call("cuEventCreate", byref(handle), 0)
        assert handle.value is not None
        return Event(handle.value, self)

    # ---- work ----

    def pinned(self, size: int) -> Pinned:
        """Host memory that copies can reach directly."""
        if size == 0:
            raise ValueError("pinned memory cannot be 0 bytes")  # the driver gives NULL for it
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), _bytes(size), 0)
        assert address.value is not None
        return Pinned(self, address.value, size)

    def copy_in(self, to: int, source: Pinned, stream: Stream, size: int | None = None) -> None:
        """Queue a copy from pinned memory to the card."""
        size = source.bytes if size is None else _bytes(size)
        self.call("cuMemcpyHtoDAsync", to, source._piece(0, size), size, stream.handle)

    def copy_out(self, to: Pinned, source: int, stream: Stream, size: int | None = None) -> None:
        """Queue a copy from the card to pinned memory."""
        size = to.bytes if size is None else _bytes(size)
        self.call("cuMemcpyDtoHAsync", to._piece(0, size), source, size, stream.handle)

    def fill(self, to: int, value: int, size: int, stream: Stream) -> None:
        """Queue a memset of bytes."""
        if not 0 <= value <= 255:
            raise ValueError(f"{value} is not a byte")
        self.call("cuMemsetD8Async", to, value, _bytes(size), stream.handle)

    def launch(
        self,
        name: str,
        stream: Stream,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        nanoseconds: int = 0,
        flops: float = 0.0,
        now: bool = False,
    ) -> None:
        """Queue a kernel: its name, what it touches, how long it takes.

        Without `nanoseconds` the card's figures say how long, from the bytes and `flops`. With
        `now` everything ordered before it has had its effect when this returns, so that you can do
        the kernel's work yourself; without, it has no effect but on order and time.
        """
        touched = [(lib.READ, *r) for r in reads] + [(lib.WRITE, *r) for r in writes]
        ranges = (lib.RangeStruct * len(touched))(
            *(lib.RangeStruct(address, _bytes(size), kind) for kind, address, size in touched)
        )
        work = lib.WorkStruct(
            size=sizeof(lib.WorkStruct),
            name=c_char_p(name.encode()),
            ranges=ranges,
            range_count=len(touched),
            nanoseconds=_bytes(nanoseconds, "a duration"),
            flops=flops,
            now=now,
        )
        self.call("ebbsim_launch", byref(work), stream.handle)


def register(figures: Figures) -> int:
    """Add a card and leave it alone; its number. The driver is not started, so a fork is still
    fine."""
    ordinal = c_int()
    if library().ask("ebbsim_card_add", byref(figures._raw()), byref(ordinal)) != 0:
        raise ValueError(
            "no such card can be added: memory must be a multiple of 2 MiB and hold the context,"
            f" rates must be positive, and there may be {MOST_CARDS} cards. {figures}"
        )
    return ordinal.value


def add_card(memory: int = 8 << 30, **figures: Any) -> Card:
    """Add a card to the simulated GPU and open it: the default Figures, with these changed."""
    changed = dataclasses.replace(Figures.default(memory), **figures)
    ordinal = register(changed)
    library().call("cuInit", 0)
    return Card(ordinal, changed)


def open_card(ordinal: int = 0) -> Card:
    """Open a card that is there: of EBBTIDE_SIM, or added by another process of the same run."""
    library().call("cuInit", 0)
    return Card(_bytes(ordinal, "a card's number"))


# ---- looking at memory --------------------------------------------------------------------------


def peek(address: int, size: int) -> bytes:
    """The bytes at a device address as they are now, which no program on a real GPU could see.

    ValueError where nothing is mapped with access. The card's memory is this process's own, so to
    touch such an address is a real fault; here the kernel is asked to read it, and says so.
    """
    address, size = _bytes(address, "an address"), _bytes(size)
    write = ctypes.CDLL(None).pwrite
    write.argtypes = [c_int, c_void_p, c_size_t, c_long]
    write.restype = c_ssize_t
    file = os.memfd_create("peek")
    try:
        done = 0
        while done < size:
            count = write(file, address + done, size - done, done)
            if count <= 0:
                raise ValueError(f"there is no memory behind {address + done:#x}")
            done += count
        return os.pread(file, size, 0)
    finally:
        os.close(file)
