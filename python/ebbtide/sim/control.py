"""What only a simulated GPU has, for the process as a whole: time, failures, hazards, the census.

ebbtide_sim.h describes each of these; the names are the same without their prefix.
"""

from __future__ import annotations

import dataclasses
import enum
from ctypes import byref, sizeof
from typing import Literal

from ebbtide.sim._library import CensusStruct, HazardStruct, SideStruct, library

# ---- everything ---------------------------------------------------------------------------------


def reset() -> None:
    """Forget everything: cards, memory, streams, hazards, failures, clock. As in a new process.

    Cards, streams and memory from before are of no use then. No other thread may be in a call.
    """
    library().resets += 1
    library().ask("ebbsim_reset")


# ---- time ---------------------------------------------------------------------------------------


def clock(kind: Literal["real", "virtual"]) -> None:
    """The clock on the wall, or one that waits and calls move: virtual_clock() in a word."""
    if kind not in ("real", "virtual"):
        raise ValueError(f"the clock is 'real' or 'virtual', not {kind!r}")
    virtual_clock(kind == "virtual")


def virtual_clock(on: bool = True) -> None:
    """Let waits move the clock instead of sleeping, and let each driver call cost its time.

    Durations are then the same in every run. Off, which is the default: the clock on the wall.
    """
    library().ask("ebbsim_clock_virtual", int(on))


def now() -> int:
    """Nanoseconds since the run began."""
    return int(library().ask("ebbsim_now"))


def let_pass(nanoseconds: int) -> None:
    """Let time pass: moves a virtual clock, sleeps with a real one."""
    if nanoseconds < 0:
        raise ValueError(f"time does not run backwards: {nanoseconds} ns")
    library().ask("ebbsim_pass", nanoseconds)


# ---- failures -----------------------------------------------------------------------------------


def fail(function: str | None, *, nth: int = 1, code: str | int) -> None:
    """Make the nth call from now of `function` (None: of any) return `code` and do nothing else.

    The code is the driver's number or its name, "CUDA_ERROR_OUT_OF_MEMORY". Several may wait.
    """
    if nth < 1:
        raise ValueError(f"calls are counted from 1, not from {nth}")
    if isinstance(code, str):
        if code not in library().codes:
            raise ValueError(f"{code} is no code of the driver")
        code = library().codes[code]
    if code == 0:
        raise ValueError("a failure with the code of success is none")
    name = None if function is None else function.encode()
    if library().ask("ebbsim_fail", name, nth, code) != 0:
        raise ValueError(f"the simulated driver has no function {function}")


def failures() -> int:
    """How many planned failures have happened."""
    return int(library().ask("ebbsim_failures"))


def clear_failures() -> None:
    """Forget the planned failures that have not happened."""
    library().ask("ebbsim_fail_clear")


def calls(function: str | None = None) -> int:
    """How often `function` (None: any) has been called since the start or the last reset."""
    return int(library().ask("ebbsim_calls", None if function is None else function.encode()))


# ---- hazards ------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """The kinds of hazard, as ebbsim_kind numbers them."""

    RACE = 0  # two works on the same memory, unordered, one of them writing
    UNMAP = 1  # memory was unmapped, freed or unregistered under unfinished work
    SOURCE = 2  # the host changed a copy's source before it could know it over
    ACCESS = 3  # work touches memory its device has no access to
    UNMAPPED = 4  # work touches memory that is not mapped
    PRIVATE = 5  # a privately mapped file is pinned to be read: that may never return


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a hazard: who touched what, when."""

    call: str  # cuMemcpyHtoDAsync, cuMemUnmap, a kernel's name, "the host"
    device: int | None  # None: the host
    stream: int | None  # its small number; 0: the default stream; None: not on a stream
    writes: bool  # or unmaps; else it reads
    address: int  # what it touches, as it named it
    bytes: int
    when: int  # nanoseconds since the run began, when it was queued or called
    thread: int

    @property
    def place(self) -> str:
        """Where it ran, in words."""
        if self.device is None:
            return "the host"
        if self.stream is None:
            return f"device {self.device}"
        stream = f"stream {self.stream}" if self.stream else "the default stream"
        return f"{stream} of device {self.device}"


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Two sides, in no order, on the same memory."""

    kind: Kind
    first: Side  # the earlier one
    second: Side  # the one that was caught
    text: str  # both in words, and what would have ordered them


def _side(raw: SideStruct) -> Side:
    return Side(
        call=raw.call.decode(errors="replace"),
        device=None if raw.device < 0 else raw.device,
        stream=None if raw.stream < 0 else raw.stream,
        writes=bool(raw.writes),
        address=raw.address,
        bytes=raw.bytes,
        when=raw.when,
        thread=raw.thread,
    )


def hazards() -> list[Hazard]:
    """The hazards so far, oldest first. The first 1,024 are kept; hazard_count() counts all."""
    found: list[Hazard] = []
    raw = HazardStruct()
    while library().ask("ebbsim_hazard_get", len(found), byref(raw)) == 0:
        text = raw.text.decode(errors="replace")
        found.append(Hazard(Kind(raw.kind), _side(raw.first), _side(raw.second), text))
    return found


def hazard_count() -> int:
    """How many hazards so far."""
    return int(library().ask("ebbsim_hazards"))


def clear_hazards() -> None:
    """Forget the hazards so far."""
    library().ask("ebbsim_hazard_clear")


def on_hazard(mode: Literal["print", "quiet", "abort"]) -> None:
    """What happens at a hazard: it is printed on stderr (the default), only kept, or fatal."""
    modes = ("print", "quiet", "abort")
    if mode not in modes:
        raise ValueError(f"{mode!r} is none of {', '.join(modes)}")
    library().ask("ebbsim_on_hazard", modes.index(mode))


# ---- the census ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Census:
    """What this process holds of the simulated driver: all zero when nothing leaked."""

    reservations: int
    reserved_bytes: int
    handles: int
    frames: int
    frame_bytes: int
    mappings: int
    mapped_bytes: int
    allocations: int
    host_blocks: int
    streams: int
    events: int
    contexts: int
    graphs: int
    captures: int
    pending_works: int

    def left(self) -> dict[str, int]:
        """What is not zero."""
        return {name: count for name, count in dataclasses.asdict(self).items() if count}


def census() -> Census:
    """Count what this process holds."""
    raw = CensusStruct(size=sizeof(CensusStruct))
    library().ask("ebbsim_census_take", byref(raw))
    return Census(**{field.name: getattr(raw, field.name) for field in dataclasses.fields(Census)})


def check() -> str | None:
    """Check the simulator's own books against each other: None, or what is wrong in words."""
    wrong = library().ask("ebbsim_check")
    return None if wrong is None else wrong.decode()
