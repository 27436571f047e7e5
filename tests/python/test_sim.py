"""ebbtide.sim: the simulated GPU from Python.

That it behaves as a GPU is proved in C (tests/driver, tests/hazard); here, that all of it arrives.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import tempfile
import threading
import time

import pytest

from ebbtide import sim
from ebbtide.sim import _library

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A simulator that knows nothing, before and after: the process has only one."""
    for name in ("EBBTIDE_SIM", "EBBTIDE_SIM_RUN"):
        monkeypatch.delenv(name, raising=False)
    sim.reset()
    sim.virtual_clock()
    sim.on_hazard("quiet")
    yield
    sim.reset()
    sim.on_hazard("print")


@pytest.fixture
def card():
    return sim.add_card(memory=GIB)


@pytest.fixture
def page(card):
    """A page with a frame of its own."""
    return map_page(card, card.reserve(64 * PAGE))


def map_page(card, address):
    frame = card.create(PAGE)
    card.map(address, frame)
    card.access(address, PAGE)
    frame.release()
    return address


# ---- the library --------------------------------------------------------------------------------


def test_importing_it_loads_neither_torch_nor_the_library(python):
    code = (
        "import sys, ebbtide.sim; "
        "sys.exit('torch' in sys.modules or 'ebbtide_sim' in open('/proc/self/maps').read())"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_everything_exported_is_there():
    for name in sim.__all__:
        assert hasattr(sim, name)


@pytest.mark.parametrize("name", ["card", "range", "work", "side", "hazard", "census"])
def test_a_struct_has_the_headers_fields(repository, name):
    header = (repository / "include/ebbtide_sim.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    body = re.search(rf"typedef struct ebbsim_{name} {{(.*?)}} ebbsim_{name};", header, re.DOTALL)
    fields = []
    for declaration in body[1].split(";"):
        # int a, b; char name[64]; const char *name; void (*function)(void *data)
        function = re.search(r"\(\*(\w+)\)", declaration)
        names = [function[1]] if function else re.findall(r"(\w+)(?:\[\d+\])?(?:,|$)", declaration)
        fields += [*names] if declaration.strip() else []
    struct = getattr(_library, f"{name.capitalize()}Struct")
    assert [field for field, _ in struct._fields_] == fields
    sizes = dict(re.findall(r"char (\w+)\[(\d+)\]", body[1]))
    for field, kind in struct._fields_:
        if issubclass(kind, ctypes.Array):
            assert kind._length_ == int(sizes[field])


def test_every_control_of_the_header_is_known(repository):
    header = (repository / "include/ebbtide_sim.h").read_text()
    declared = set(re.findall(r"^EBBSIM_API .*?(ebbsim_\w+)\(", header, re.MULTILINE))
    # How a driver is made to look older is for C tests of the loader, catching up for operators,
    # the cards' figures for the faces of the runtime, the host's time for bench/offload_clock.py.
    assert declared - set(_library.CONTROLS) == {
        "ebbsim_driver_version",
        "ebbsim_driver_hide",
        "ebbsim_catch_up",
        "ebbsim_card_count",
        "ebbsim_card_get",
        "ebbsim_host_time",
    }
    assert set(_library.CONTROLS) <= declared


def test_every_driver_function_is_asked_for_in_the_driver_tables_version(repository):
    table = (repository / "src/core/driver.h").read_text()
    versions = dict(re.findall(r"X\(\w+, (cu\w+), (\d+),", table))
    for name, (since, _) in _library.DRIVER.items():
        assert since == int(versions[name]), name


def test_constants_are_the_headers(repository):
    header = (repository / "include/ebbtide_sim.h").read_text()
    assert int(re.search(r"EBBSIM_PATTERN (0x\w+)", header)[1], 16) == sim.PATTERN
    kinds = re.findall(r"^ +EBBSIM_HAZARD_(\w+),", header, re.MULTILINE)
    assert [kind.name for kind in sim.Kind] == kinds
    assert _library.library().codes["CUDA_ERROR_NOT_READY"] == _library.NOT_READY


# ---- cards and memory ---------------------------------------------------------------------------


def test_a_card_is_as_asked_for(card):
    assert card.ordinal == 0
    assert card.name == card.figures.name == "Ebbtide simulated GPU"
    assert card.total == GIB
    assert card.granularity == PAGE
    assert card.memory() == (GIB - card.figures.context, GIB)
    assert card.figures.vmm is True


def test_figures_can_be_changed():
    card = sim.add_card(memory=4 * GIB, name="a small one", context=PAGE, h2d_rate=1e9)
    assert card.name == "a small one"
    assert card.memory().used == PAGE
    assert card.figures.h2d_rate == 1e9


def test_a_card_of_the_environment_can_be_opened(monkeypatch):
    monkeypatch.setenv("EBBTIDE_SIM", "memory=3GiB,devices=2")
    card = sim.open_card(1)
    assert card.total == 3 * GIB
    with pytest.raises(ValueError, match="figures of card 1"):
        _ = card.figures
    with pytest.raises(sim.CallFailed, match="CUDA_ERROR_INVALID_DEVICE"):
        sim.open_card(2)


@pytest.mark.parametrize(
    ("figures", "error"),
    [
        ({"memory": -1}, ValueError),
        ({"memory": 3}, ValueError),
        ({"memory": "8GiB"}, TypeError),
        ({"context": GIB}, ValueError),
        ({"flops": 0.0}, ValueError),
        ({"name": "x" * 64}, ValueError),
        ({"colour": "green"}, TypeError),
    ],
)
def test_a_card_that_makes_no_sense(figures, error):
    with pytest.raises(error):
        sim.add_card(**{"memory": GIB, **figures})


def test_there_are_at_most_sixteen_cards():
    for _ in range(16):
        sim.add_card(memory=64 * MIB)
    with pytest.raises(ValueError, match="16 cards"):
        sim.add_card(memory=64 * MIB)


def test_addresses_cost_nothing_and_frames_cost_their_size(card):
    free = card.memory().free
    address = card.reserve(1 << 40)
    assert card.memory().free == free
    map_page(card, address)
    assert card.memory().free == free - PAGE
    card.unmap(address, PAGE)
    assert card.memory().free == free
    card.unreserve(address, 1 << 40)


def test_what_does_not_fit_is_refused(card):
    card.others_use(card.memory().free - PAGE)
    frame = card.create(PAGE)
    with pytest.raises(sim.CallFailed) as caught:
        card.create(PAGE)
    failed = caught.value
    assert (failed.call, failed.name, failed.code) == (
        "cuMemCreate",
        "CUDA_ERROR_OUT_OF_MEMORY",
        2,
    )
    assert str(failed) == "cuMemCreate gave CUDA_ERROR_OUT_OF_MEMORY (2)"
    frame.release()
    card.create(PAGE)


def test_one_frame_behind_two_addresses_is_one_memory(card):
    address = card.reserve(4 * PAGE)
    frame = card.create(PAGE)
    for place in (address, address + 2 * PAGE):
        card.map(place, frame)
        card.access(place, PAGE)
    card.fill(address, 0x77, 16, card.default_stream)
    card.synchronize()
    assert sim.peek(address + 2 * PAGE, 16) == b"\x77" * 16


def test_where_there_is_no_memory_there_is_nothing_to_see(card):
    address = card.reserve(4 * PAGE)
    frame = card.create(PAGE)
    card.map(address, frame)
    with pytest.raises(ValueError, match=f"no memory behind {address:#x}"):
        sim.peek(address, 1)
    card.access(address, PAGE)
    assert sim.peek(address, PAGE) == bytes(PAGE)
    with pytest.raises(ValueError, match=f"no memory behind {address + PAGE:#x}"):
        sim.peek(address + PAGE - 1, 2)
    card.access(address, PAGE, "none")
    with pytest.raises(ValueError, match="no memory"):
        sim.peek(address, 1)


def test_the_processes_of_a_run_share_its_cards(python, tmp_path, monkeypatch):
    run = str(tmp_path / "run")
    sim.reset()
    monkeypatch.setenv("EBBTIDE_SIM_RUN", run)
    card = sim.add_card(memory=GIB, context=PAGE)
    card.create(256 * MIB)
    code = (
        "from ebbtide import sim; card = sim.open_card(); "
        "card.create(128 << 20); print(card.memory().used >> 20)"
    )
    done = python("-c", code, EBBTIDE_SIM_RUN=run)
    assert done.stdout == "388\n", done.stderr  # two contexts, two frames
    assert card.memory().used == PAGE + 256 * MIB  # its use went with it


# ---- time, order, lateness ----------------------------------------------------------------------


def copy_time(card, page, size):
    stream, source = card.stream(), card.pinned(size)
    start = card.event().record(stream)
    card.copy_in(page, source, stream)
    end = card.event().record(stream)
    end.synchronize()
    return end.since(start)


def test_a_copy_takes_its_bytes_over_the_rate(card, page):
    figures = card.figures
    expected = figures.copy_latency / 1e6 + MIB / figures.h2d_rate * 1e3
    assert copy_time(card, page, MIB) == pytest.approx(expected, rel=0.1)


def test_other_figures_give_another_card():
    times = []
    for rate in (50e9, 25e9):
        card = sim.add_card(memory=GIB, h2d_rate=rate, duplex_rate=rate, copy_latency=0)
        page = map_page(card, card.reserve(PAGE))
        times.append(copy_time(card, page, PAGE))
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)


def test_on_the_virtual_clock_waiting_takes_no_time_and_every_run_is_alike(card):
    lasted, began = [], time.monotonic()
    for _ in range(2):
        stream = card.stream()
        start = sim.now()
        card.launch("a minute", stream, nanoseconds=60_000_000_000)
        stream.synchronize()
        lasted.append(sim.now() - start)
    assert lasted[0] == lasted[1] > 60_000_000_000
    assert time.monotonic() - began < 30


def test_an_event_orders_one_stream_after_another(card):
    first, second = card.stream(), card.stream()
    start = card.event().record(first)
    card.launch("first", first, nanoseconds=1_000_000)
    second.wait(card.event().record(first))
    end = card.event().record(second)
    assert not end.reached()
    assert not first.idle()
    end.synchronize()
    assert end.reached()
    assert first.idle()
    assert end.since(start) == pytest.approx(1.0, rel=0.01)


def test_a_copy_has_its_effect_when_somebody_has_waited(card, page):
    source, back, stream = card.pinned(16), card.pinned(16), card.stream()
    source.write(b"sixteen letters.")
    card.copy_in(page, source, stream)
    assert sim.peek(page, 16) == bytes([sim.PATTERN] * 16)
    sim.let_pass(1_000_000_000)
    assert sim.peek(page, 16) == bytes([sim.PATTERN] * 16)
    card.copy_out(back, page, stream)
    assert back.read() == bytes([sim.PATTERN] * 16)
    stream.synchronize()
    assert sim.peek(page, 16) == back.read() == b"sixteen letters."
    assert back.read(7) == b"sixteen"
    assert back.read(offset=8) == b"letters."


def test_other_threads_run_while_one_waits_for_the_card(card):
    sim.virtual_clock(False)
    stream = card.stream()
    card.launch("long", stream, nanoseconds=300_000_000)
    waiter = threading.Thread(target=stream.synchronize)
    ticks = 0
    waiter.start()
    while waiter.is_alive():
        time.sleep(0.01)
        ticks += 1
    assert ticks > 5


# ---- hazards ------------------------------------------------------------------------------------


def race(card, page, stream, wrong):
    other = card.stream()
    card.fill(page, 1, 64, stream)
    if not wrong:
        other.wait(card.event().record(stream))
    card.launch("layer", other, reads=[(page, 64)])


def unmap(card, page, stream, wrong):
    card.launch("layer", stream, writes=[(page, 64)])
    if not wrong:
        stream.synchronize()
    card.unmap(page, PAGE)


def source(card, page, stream, wrong):
    staging = card.pinned(64)
    card.copy_in(page, staging, stream)
    if not wrong:
        card.event().record(stream).synchronize()
    staging.fill(9)
    stream.synchronize()


def access(card, page, stream, wrong):
    other = sim.add_card(memory=GIB)
    if not wrong:
        card.access(page, PAGE, "read", card=other)
    other.launch("peer", other.stream(), reads=[(page, 64)])


def unmapped(card, page, stream, wrong):
    card.launch("stray", stream, reads=[(page, PAGE + 1 if wrong else PAGE)])


def driver(name):
    """A function of the driver's that ebbtide.sim itself has no use for."""
    find, at, status = (
        _library.library().loaded.cuGetProcAddress_v2,
        ctypes.c_void_p(),
        ctypes.c_int(),
    )
    assert find(name.encode(), ctypes.byref(at), 12000, 0, ctypes.byref(status)) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int)(at.value)


def private(card, page, stream, wrong):
    with tempfile.TemporaryFile() as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        kind = mmap.MAP_PRIVATE if wrong else mmap.MAP_SHARED
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=kind)
        at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        card.fill(page, 0, 64, stream)  # makes its context current
        read_only = ctypes.c_uint(8)
        assert driver("cuMemHostRegister")(at, ctypes.c_size_t(mmap.PAGESIZE), read_only) == 0
        assert driver("cuMemHostUnregister")(at) == 0


@pytest.mark.parametrize(
    ("scenario", "kind", "first", "second"),
    [
        (race, sim.Kind.RACE, "cuMemsetD8Async", "layer"),
        (unmap, sim.Kind.UNMAP, "layer", "cuMemUnmap"),
        (source, sim.Kind.SOURCE, "cuMemcpyHtoDAsync", "the host"),
        (access, sim.Kind.ACCESS, "memory of device 0", "peer"),
        (unmapped, sim.Kind.UNMAPPED, "nothing", "stray"),
        (private, sim.Kind.PRIVATE, "a private mapping", "cuMemHostRegister"),
    ],
)
def test_each_kind_of_hazard_arrives_with_both_sides(card, page, scenario, kind, first, second):
    scenario(card, page, card.stream(), wrong=True)
    assert sim.hazard_count() == 1
    (hazard,) = sim.hazards()
    assert hazard.kind is kind
    assert hazard.first.call == first
    assert hazard.second.call == second
    assert first in hazard.text
    assert second in hazard.text
    sim.clear_hazards()
    assert sim.hazards() == []


@pytest.mark.parametrize("scenario", [race, unmap, source, access, unmapped, private])
def test_the_right_program_is_met_with_silence(card, page, scenario):
    scenario(card, page, card.stream(), wrong=False)
    assert sim.hazards() == []


def test_the_sides_say_where(card, page):
    stream = card.stream()
    card.launch("layer", stream, reads=[(page + 64, 128)])
    card.unmap(page, PAGE)
    (hazard,) = sim.hazards()
    assert hazard.first.place == "stream 1 of device 0"
    assert hazard.first.writes is False
    assert (hazard.first.address, hazard.first.bytes) == (page + 64, 128)
    assert hazard.second.place == "the host"
    assert (hazard.second.address, hazard.second.bytes) == (page, PAGE)
    assert hazard.second.thread == threading.get_native_id()


def test_a_lost_context_says_so_from_then_on(card, page):
    card.launch("stray", card.stream(), reads=[(page, 2 * PAGE)])
    with pytest.raises(sim.CallFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        card.memory()


def test_hazards_are_printed_unless_somebody_asks_for_quiet(python):
    code = (
        "from ebbtide import sim; card = sim.add_card(); "
        "card.launch('stray', card.stream(), reads=[(4096, 1)])"
    )
    done = python("-c", code)
    assert re.search(r"HAZARD 1: not mapped: stray on stream 1 of device 0", done.stderr)
    assert python("-c", code, EBBTIDE_SIM_HAZARD="quiet").stderr == ""
    assert python("-c", code, EBBTIDE_SIM_HAZARD="abort").returncode < 0


# ---- failures and the census --------------------------------------------------------------------


@pytest.mark.parametrize("code", ["CUDA_ERROR_NOT_READY", 600])
def test_the_nth_call_fails_with_the_code_asked_for(card, code):
    address = card.reserve(3 * PAGE)
    sim.fail("cuMemMap", nth=2, code=code)
    frame = card.create(PAGE)
    card.map(address, frame)
    with pytest.raises(sim.CallFailed, match=r"cuMemMap gave CUDA_ERROR_NOT_READY \(600\)"):
        card.map(address + PAGE, frame)
    card.map(address + PAGE, frame)
    assert sim.failures() == 1
    assert sim.calls("cuMemMap") == 3
    assert sim.census().mappings == 2
    assert sim.check() is None


def test_any_call_may_be_the_one_and_plans_may_be_dropped(card):
    sim.fail(None, nth=1, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(sim.CallFailed, match="CUDA_ERROR_UNKNOWN"):
        card.memory()
    sim.fail(None, nth=1, code="CUDA_ERROR_UNKNOWN")
    sim.clear_failures()
    card.memory()
    assert sim.failures() == 1


def test_a_code_the_driver_does_not_know_is_still_a_failure(card):
    sim.fail("cuMemGetInfo", code=12345)
    with pytest.raises(sim.CallFailed, match=r"cuMemGetInfo gave unknown \(12345\)"):
        card.memory()


def test_the_census_counts_what_is_held_and_ends_empty(card):
    address = card.reserve(4 * PAGE)
    frame = card.create(PAGE)
    card.map(address, frame)
    card.access(address, PAGE)
    stream, event, pinned = card.stream(), card.event(), card.pinned(64)
    card.copy_in(address, pinned, stream)
    assert sim.census().left() == {
        "reservations": 1,
        "reserved_bytes": 4 * PAGE,
        "handles": 1,
        "frames": 1,
        "frame_bytes": PAGE,
        "mappings": 1,
        "mapped_bytes": PAGE,
        "host_blocks": 1,
        "streams": 1,
        "events": 1,
        "contexts": 1,
        "pending_works": 1,
    }
    stream.synchronize()
    card.unmap(address, PAGE)
    frame.release()
    card.unreserve(address, 4 * PAGE)
    pinned.free()
    stream.destroy()
    event.destroy()
    with card:
        assert sim.census().left() == {"contexts": 1}
    assert sim.census().left() == {}


# ---- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda card: card.reserve(-1), ValueError, "a size cannot be -1"),
        (lambda card: card.reserve(1 << 70), ValueError, "a size cannot be"),
        (lambda card: card.reserve("1 TiB"), TypeError, "integer"),
        (
            lambda card: card.reserve(5),
            sim.CallFailed,
            "cuMemAddressReserve gave CUDA_ERROR_INVALID_VALUE",
        ),
        (
            lambda card: card.create(PAGE + 1),
            sim.CallFailed,
            "cuMemCreate gave CUDA_ERROR_INVALID_VALUE",
        ),
        (
            lambda card: card.unmap(4096, PAGE),
            sim.CallFailed,
            "cuMemUnmap gave CUDA_ERROR_INVALID_VALUE",
        ),
        (lambda card: card.access(4096, PAGE, "w"), ValueError, "none, read, read and write"),
        (lambda card: card.others_use(-5), ValueError, "a size cannot be -5"),
        (lambda card: card.pinned(0), ValueError, "pinned memory cannot be 0 bytes"),
        (lambda card: card.pinned(8).write(b"nine here"), ValueError, "9 bytes at 0"),
        (lambda card: card.pinned(8).read(4, offset=6), ValueError, "4 bytes at 6"),
        (lambda card: card.pinned(8).read(offset=-1), ValueError, "9 bytes at -1"),
        (lambda card: card.pinned(8).fill(256), ValueError, "256 is not a byte"),
        (lambda card: card.fill(0, -1, 1, card.stream()), ValueError, "-1 is not a byte"),
        (lambda card: card.launch("k", card.stream(), nanoseconds=-1), ValueError, "a duration"),
        (lambda card: card.event().since(card.event()), sim.CallFailed, "INVALID"),
        (lambda card: card.default_stream.destroy(), sim.CallFailed, "INVALID"),
        (lambda card: sim.peek(-1, 1), ValueError, "an address cannot be -1"),
        (lambda card: sim.let_pass(-1), ValueError, "backwards"),
        (lambda card: sim.on_hazard("loud"), ValueError, "'loud' is none of print, quiet, abort"),
        (lambda card: sim.fail("cuMemMap", nth=0, code=2), ValueError, "counted from 1"),
        (lambda card: sim.fail("cuMemMap", code=0), ValueError, "success"),
        (lambda card: sim.fail("cuMemMap", code="LATE"), ValueError, "LATE is no code"),
        (lambda card: sim.fail("cuMemLap", code=2), ValueError, "no function cuMemLap"),
        (lambda card: sim.open_card(-1), ValueError, "a card's number cannot be -1"),
    ],
)
def test_wrong_input_is_an_exception_that_says_so(card, wrong, error, words):
    with pytest.raises(error, match=words):
        wrong(card)
    assert sim.hazard_count() == 0
    assert sim.check() is None


def test_a_handle_that_is_gone_is_refused(card):
    stream, event, frame = card.stream(), card.event(), card.create(PAGE)
    stream.destroy()
    event.destroy()
    frame.release()
    for call in (stream.synchronize, stream.destroy, event.reached, event.destroy, frame.release):
        with pytest.raises(sim.CallFailed, match="INVALID"):
            call()


@pytest.mark.parametrize("end", ["free", "close", "reset"])
def test_pinned_memory_that_is_gone_is_not_touched(card, end):
    pinned = card.pinned(4096)
    {"free": pinned.free, "close": card.close, "reset": sim.reset}[end]()
    for use in (pinned.read, pinned.free, lambda: pinned.fill(1), lambda: pinned.write(b"x")):
        with pytest.raises(ValueError, match="this pinned memory is freed"):
            use()


def test_a_closed_card_is_closed(card):
    stream = card.stream()
    card.close()
    card.close()
    assert card.closed
    for use in (card.memory, card.stream, stream.synchronize):
        with pytest.raises(ValueError, match="this card is closed"):
            use()
