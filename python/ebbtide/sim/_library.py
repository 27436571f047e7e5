"""libebbtide_sim.so through ctypes: its structs, its functions, and the driver's.

The simulated driver exports one function of the driver's, cuGetProcAddress_v2, and hands out the
others through it, as the real one does. Here they are asked for by the name and the version whose
parameters are written below.

Nothing is loaded before the first call of `library()`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_long,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ulong,
    c_void_p,
)
from pathlib import Path
from typing import Any

from ebbtide import _core


def path() -> Path:
    """Where the simulated GPU's library is."""
    # Beside the extension, which is not beside this file in an editable installation.
    file = Path(_core.__file__).with_name("libebbtide_sim.so")
    if not file.exists():
        raise FileNotFoundError(f"this installation of Ebbtide lacks its simulated GPU: {file}")
    return file


class CallFailed(RuntimeError):
    """A function of the simulated GPU returned a code other than success.

    `call` is the function, `code` what it returned, `name` that code in the driver's words.
    """

    def __init__(self, call: str, code: int) -> None:
        self.call = call
        self.code = code
        self.name = library().code_name(code)
        super().__init__(f"{call} gave {self.name} ({code})")


# ---- structs: as in ebbtide_sim.h and cuda_abi.h ------------------------------------------------


class CardStruct(ctypes.Structure):
    """ebbsim_card"""

    _fields_ = (
        ("size", c_size_t),
        ("name", c_char * 64),
        ("memory", c_uint64),
        ("context", c_uint64),
        ("h2d_rate", c_double),
        ("d2h_rate", c_double),
        ("duplex_rate", c_double),
        ("pageable_rate", c_double),
        ("memory_rate", c_double),
        ("flops", c_double),
        ("copy_latency", c_uint64),
        ("kernel_latency", c_uint64),
        ("compute_major", c_int),
        ("compute_minor", c_int),
        ("multiprocessors", c_int),
        ("peer", c_int),
        ("vmm", c_int),
        ("exportable", c_int),
    )


class RangeStruct(ctypes.Structure):
    """ebbsim_range"""

    _fields_ = (("address", c_uint64), ("bytes", c_uint64), ("access", c_int))


class WorkStruct(ctypes.Structure):
    """ebbsim_work"""

    _fields_ = (
        ("size", c_size_t),
        ("name", c_char_p),
        ("ranges", POINTER(RangeStruct)),
        ("range_count", c_size_t),
        ("nanoseconds", c_uint64),
        ("flops", c_double),
        ("function", c_void_p),
        ("data", c_void_p),
        ("now", c_int),
        ("release", c_void_p),
    )


class SideStruct(ctypes.Structure):
    """ebbsim_side"""

    _fields_ = (
        ("call", c_char * 64),
        ("device", c_int),
        ("stream", c_int),
        ("writes", c_int),
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("when", c_uint64),
        ("thread", c_long),
    )


class HazardStruct(ctypes.Structure):
    """ebbsim_hazard"""

    _fields_ = (
        ("kind", c_int),
        ("first", SideStruct),
        ("second", SideStruct),
        ("text", c_char * 1024),
    )


class CensusStruct(ctypes.Structure):
    """ebbsim_census"""

    _fields_ = (
        ("size", c_size_t),
        ("reservations", c_uint64),
        ("reserved_bytes", c_uint64),
        ("handles", c_uint64),
        ("frames", c_uint64),
        ("frame_bytes", c_uint64),
        ("mappings", c_uint64),
        ("mapped_bytes", c_uint64),
        ("allocations", c_uint64),
        ("host_blocks", c_uint64),
        ("streams", c_uint64),
        ("events", c_uint64),
        ("contexts", c_uint64),
        ("graphs", c_uint64),
        ("captures", c_uint64),
        ("pending_works", c_uint64),
    )


class LocationStruct(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationStruct(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", LocationStruct),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class AccessStruct(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", LocationStruct), ("flags", c_int))


READ, WRITE = 1, 2  # EBBSIM_READ, EBBSIM_WRITE
PATTERN = 0xEB  # EBBSIM_PATTERN
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
HANDLE_FILE_DESCRIPTOR = 1
ATTRIBUTE_EXPORTABLE = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE = 0, 1, 3
STREAM_NON_BLOCKING = 1
NOT_READY = 600

# ---- functions ----------------------------------------------------------------------------------

address_t, handle_t = c_uint64, c_uint64
stream_t = event_t = context_t = c_void_p

# Exported by the library: result (None: nothing) and parameters.
CONTROLS: dict[str, tuple[Any, list[Any]]] = {
    "ebbsim_card_default": (None, [POINTER(CardStruct), c_uint64]),
    "ebbsim_card_add": (c_int, [POINTER(CardStruct), POINTER(c_int)]),
    "ebbsim_foreign_use": (c_int, [c_int, c_uint64]),
    "ebbsim_reset": (None, []),
    "ebbsim_clock_virtual": (None, [c_int]),
    "ebbsim_now": (c_uint64, []),
    "ebbsim_pass": (None, [c_uint64]),
    "ebbsim_launch": (c_int, [POINTER(WorkStruct), stream_t]),
    "ebbsim_fail": (c_int, [c_char_p, c_ulong, c_int]),
    "ebbsim_failures": (c_ulong, []),
    "ebbsim_fail_clear": (None, []),
    "ebbsim_calls": (c_ulong, [c_char_p]),
    "ebbsim_hazards": (c_ulong, []),
    "ebbsim_hazard_get": (c_int, [c_ulong, POINTER(HazardStruct)]),
    "ebbsim_hazard_clear": (None, []),
    "ebbsim_on_hazard": (None, [c_int]),
    "ebbsim_census_take": (None, [POINTER(CensusStruct)]),
    "ebbsim_check": (c_char_p, []),
}

# The driver's: the CUDA version that brought this form, and its parameters. All return a code.
DRIVER: dict[str, tuple[int, list[Any]]] = {
    "cuGetErrorName": (6000, [c_int, POINTER(c_char_p)]),
    "cuInit": (2000, [c_uint]),
    "cuDeviceGetName": (2000, [c_char_p, c_int, c_int]),
    "cuDeviceTotalMem": (3020, [POINTER(c_size_t), c_int]),
    "cuDeviceGetAttribute": (2000, [POINTER(c_int), c_int, c_int]),
    "cuDevicePrimaryCtxRetain": (7000, [POINTER(context_t), c_int]),
    "cuDevicePrimaryCtxRelease": (11000, [c_int]),
    "cuCtxSetCurrent": (4000, [context_t]),
    "cuCtxSynchronize": (2000, []),
    "cuMemGetInfo": (3020, [POINTER(c_size_t), POINTER(c_size_t)]),
    "cuMemGetAllocationGranularity": (
        10020,
        [POINTER(c_size_t), POINTER(AllocationStruct), c_int],
    ),
    "cuMemAddressReserve": (
        10020,
        [POINTER(address_t), c_size_t, c_size_t, address_t, c_uint64],
    ),
    "cuMemAddressFree": (10020, [address_t, c_size_t]),
    "cuMemCreate": (10020, [POINTER(handle_t), c_size_t, POINTER(AllocationStruct), c_uint64]),
    "cuMemRelease": (10020, [handle_t]),
    "cuMemMap": (10020, [address_t, c_size_t, c_size_t, handle_t, c_uint64]),
    "cuMemUnmap": (10020, [address_t, c_size_t]),
    "cuMemSetAccess": (10020, [address_t, c_size_t, POINTER(AccessStruct), c_size_t]),
    "cuMemHostAlloc": (2020, [POINTER(c_void_p), c_size_t, c_uint]),
    "cuMemFreeHost": (2000, [c_void_p]),
    "cuMemcpyHtoDAsync": (3020, [address_t, c_void_p, c_size_t, stream_t]),
    "cuMemcpyDtoHAsync": (3020, [c_void_p, address_t, c_size_t, stream_t]),
    "cuMemsetD8Async": (3020, [address_t, c_ubyte, c_size_t, stream_t]),
    "cuStreamCreate": (2000, [POINTER(stream_t), c_uint]),
    "cuStreamDestroy": (4000, [stream_t]),
    "cuStreamQuery": (2000, [stream_t]),
    "cuStreamSynchronize": (2000, [stream_t]),
    "cuStreamWaitEvent": (3020, [stream_t, event_t, c_uint]),
    "cuEventCreate": (2000, [POINTER(event_t), c_uint]),
    "cuEventDestroy": (4000, [event_t]),
    "cuEventRecord": (2000, [event_t, stream_t]),
    "cuEventQuery": (2000, [event_t]),
    "cuEventSynchronize": (2000, [event_t]),
    "cuEventElapsedTime": (2000, [POINTER(c_float), event_t, event_t]),
}


class Library:
    """The loaded library. Use `library()`: there is one simulator in a process, and one of these.

    ctypes lets go of the interpreter during each call, so a thread that waits for simulated work
    does not keep others from running.
    """

    def __init__(self, file: Path) -> None:
        self.loaded = ctypes.CDLL(str(file))
        self.functions: dict[str, Any] = {}
        self.resets = 0  # objects from before a reset must not touch memory that is gone
        for name, (result, parameters) in CONTROLS.items():
            function = getattr(self.loaded, name)
            function.restype = result
            function.argtypes = parameters
            self.functions[name] = function
        find = self.loaded.cuGetProcAddress_v2
        find.argtypes = [c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)]
        for name, (since, parameters) in DRIVER.items():
            address, status = c_void_p(), c_int()
            code = find(name.encode(), byref(address), since, 0, byref(status))
            if code != 0 or not address.value:
                raise ImportError(f"{file} has no {name}: code {code}, status {status.value}")
            self.functions[name] = ctypes.CFUNCTYPE(c_int, *parameters)(address.value)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function; what it returns, a code included."""
        return self.functions[name](*arguments)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a code; CallFailed unless it is success."""
        code = self.ask(name, *arguments)
        if code != 0:
            raise CallFailed(name, code)

    def code_name(self, code: int) -> str:
        """CUDA_ERROR_NOT_READY for 600; "unknown" for what is no code."""
        text = c_char_p()
        self.ask("cuGetErrorName", code, byref(text))
        return text.value.decode() if text.value else "unknown"

    @functools.cached_property
    def codes(self) -> dict[str, int]:
        """Every code the simulated driver knows, by name. Asked of it, not written down again."""
        names = ((self.code_name(code), code) for code in range(1000))
        return {name: code for name, code in names if name != "unknown"}


@functools.cache
def library() -> Library:
    """The simulated GPU, loaded at the first call."""
    return Library(path())
