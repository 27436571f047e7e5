from os import PathLike
from typing import ClassVar, NamedTuple

version: str

class Error(RuntimeError):
    """Ebbtide could not do what was asked."""

    status: ClassVar[int]

class Invalid(Error): ...
class NoDriver(Error): ...
class DriverTooOld(Error): ...
class DriverIncomplete(Error): ...
class DriverFailed(Error): ...
class NoDevice(Error): ...
class NoVMM(Error): ...

class Probe(NamedTuple):
    """What probe() found."""

    name: str
    driver_version: int
    device_count: int
    total_bytes: int
    granularity: int
    exportable: bool
    context_events: bool
    detail: str

def probe(library: str | bytes | PathLike[str] | None = None, index: int = 0) -> Probe: ...
