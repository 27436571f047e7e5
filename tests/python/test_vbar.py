"""Device, VBAR and Weight without torch, on simulated cards: what they say, keep, and refuse."""

from __future__ import annotations

import gc
import threading

import pytest

import ebbtide
from ebbtide import _core, sim

MIB, GIB = 1 << 20, 1 << 30
PAGE = 32 * MIB

pytestmark = pytest.mark.usefixtures("simulator")


# ---- opening and closing ------------------------------------------------------------------------


def test_a_device_is_opened_and_closed_again_and_again(load_all):
    for _ in range(20):  # more often than there can be cards
        device = ebbtide.Device("sim", memory="64MiB", limit="32MiB")
        assert device.stats()["total"] == 64 * MIB
        assert load_all(ebbtide.VBAR(device, PAGE).alloc(MIB)) == [True]
        device.close()
    assert sim.census().left() == {}


def test_a_device_that_is_dropped_is_closed():
    for _ in range(20):
        w = ebbtide.VBAR(ebbtide.Device("sim", memory="64MiB"), PAGE).alloc(MIB)
        assert w.fault()
        del w
    gc.collect()
    assert sim.census().left() == {}


def test_the_same_gpu_opened_twice_is_the_same_device(monkeypatch, load_all):
    card = sim.add_card(memory=256 * MIB)
    monkeypatch.setenv("EBBTIDE_DRIVER", str(sim.library()))
    one = ebbtide.Device(card.ordinal, limit="64MiB")
    two = ebbtide.Device(card.ordinal, limit="32MiB")
    assert one.limit == two.limit == 32 * MIB  # what is given is set
    assert ebbtide.Device(card.ordinal).limit == 32 * MIB  # and what is not is left alone
    two.limit = "96MiB"
    assert one.limit == 96 * MIB
    vbar = ebbtide.VBAR(one, PAGE)
    w = vbar.alloc(MIB)
    one.close()
    one.close()  # once is enough, and more does not undo the other's open
    assert load_all(w) == [True]
    assert two.stats()["vbars"] == 1
    two.close()
    with pytest.raises(ebbtide.Gone):
        w.fault()
    card.close()


def test_each_simulated_card_is_its_own():
    one, two = (ebbtide.Device("sim", memory="64MiB") for _ in range(2))
    assert one.index != two.index
    w = ebbtide.VBAR(one, PAGE).alloc(1)
    assert w.fault()
    assert (one.stats()["held"], two.stats()["held"]) == (PAGE, 0)
    assert repr(one) == "<ebbtide.Device sim>"


def test_with_closes(device, load_all):
    with ebbtide.Device("sim", memory="64MiB") as other, ebbtide.VBAR(other, PAGE) as vbar:
        w = vbar.alloc(1)
        load_all(w)
    for call in (other.stats, other.trim, other.check, vbar.stats, vbar.residency, w.fault):
        with pytest.raises(ebbtide.Gone, match="closed"):
            call()


def test_what_is_pinned_is_not_closed(device, vbar):
    w = vbar.alloc(MIB)
    assert w.fault()
    with pytest.raises(ebbtide.Busy, match="unpin"):
        vbar.close()
    with pytest.raises(ebbtide.Busy, match="unpin"):
        device.close()
    assert device.stats()["pinned"] == PAGE  # and nothing was undone
    w.unpin()
    vbar.close()
    vbar.close()
    with pytest.raises(ebbtide.Gone, match="closed"):
        vbar.alloc(1)


def test_everything_made_is_given_back(load_all):
    device = ebbtide.Device("sim", memory="256MiB", limit="96MiB")
    for _ in range(50):
        vbar = ebbtide.VBAR(device, "256MiB")
        weights = [vbar.alloc(PAGE) for _ in range(8)]
        assert load_all(*weights).count(True) == 3
        vbar.close()
    assert device.stats()["vbars"] == 0
    device.close()
    assert sim.census().left() == {}


def test_there_is_no_such_gpu(monkeypatch):
    sim.add_card(memory=64 * MIB)
    monkeypatch.setenv("EBBTIDE_DRIVER", str(sim.library()))
    for index in (1, 99, 2**31 - 1):
        with pytest.raises(ebbtide.NoDevice, match="GPU"):
            ebbtide.Device(index)
    with pytest.raises(ebbtide.Invalid, match="GPU -1"):
        ebbtide.Device(-1)
    monkeypatch.setenv("EBBTIDE_DRIVER", "/no/such/library.so")
    with pytest.raises(ebbtide.NoDriver, match="/no/such/library"):
        ebbtide.Device(0)


# ---- sizes --------------------------------------------------------------------------------------


def test_sizes_are_written_as_people_write_them(device, load_all):
    vbar = ebbtide.VBAR(device, "0.25GiB")
    assert vbar.stats()["bytes"] == 256 * MIB
    assert vbar.alloc("3 MiB").nbytes == 3 * MIB
    assert vbar.alloc("1kB").nbytes == 1000
    assert vbar.alloc(7).nbytes == 7
    device.limit, device.headroom = "64 mib", "1MiB"
    assert (device.limit, device.headroom) == (64 * MIB, MIB)
    vbar.watermark, vbar.watermark_limit = "32MiB", "96MiB"
    assert (vbar.watermark, vbar.watermark_limit) == (32 * MIB, 96 * MIB)
    vbar.prioritize()
    assert vbar.watermark == 96 * MIB
    load_all(vbar.alloc(PAGE))
    assert vbar.free_memory("1MiB") == PAGE
    assert vbar.loaded_size == device.stats()["resident"]


NONSENSE = ["eight", "", "-1MiB", "1 parsec", "0x10", None, -1, True, object(), [], b"1MiB", "1e9"]
NONSENSE += [1.5, -1.0, float("inf"), float("nan")]


@pytest.mark.parametrize("size", NONSENSE, ids=repr)
def test_a_size_that_is_none_is_refused(device, vbar, size):
    refused = pytest.raises((ValueError, TypeError), match=r"size|integer")
    for call in (
        lambda: ebbtide.VBAR(device, size),
        lambda: vbar.alloc(size),
        lambda: vbar.free_memory(size),
        lambda: setattr(vbar, "watermark", size),
        lambda: setattr(vbar, "watermark_limit", size),
    ):
        with refused:
            call()
    for name in ("limit", "headroom"):
        with pytest.raises(ValueError, match=f"^{name}=.* is not a size"):
            setattr(device, name, size)
    if size is not None:
        for name in ("limit", "headroom", "memory"):
            with pytest.raises(ValueError, match=f"^{name}=.* is not a size"):
                ebbtide.Device("sim", **{name: size})
    assert (device.limit, vbar.stats()["allocated"]) == (128 * MIB, 0)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**64, 2**200], ids=hex)
def test_a_size_beyond_all_measure(device, vbar, size):
    clean = (ebbtide.Error, OverflowError)
    with pytest.raises(clean):
        ebbtide.VBAR(device, size)
    with pytest.raises(clean):
        vbar.alloc(size)
    for name in ("watermark", "watermark_limit"):
        try:
            setattr(vbar, name, size)
        except OverflowError:
            assert size >= 2**64
        assert getattr(vbar, name) == 256 * MIB  # its end is as far as it goes
    device.check()


def test_no_bytes_at_all(device, vbar):
    with pytest.raises(ebbtide.Invalid, match="at least one byte"):
        ebbtide.VBAR(device, 0)
    with pytest.raises(ebbtide.Invalid, match="at least one byte, not 0"):
        vbar.alloc(0)
    with pytest.raises(ValueError):
        ebbtide.Device("sim", memory=0)
    assert vbar.free_memory(0) == 0


def test_more_addresses_than_there_are(device):
    with pytest.raises(ebbtide.NoAddresses, match="addresses"):
        ebbtide.VBAR(device, "200TiB")
    device.check()


def test_a_vbar_gets_full(vbar):
    vbar.alloc("255MiB")
    with pytest.raises(ebbtide.Full, match="2097152 bytes do not fit"):
        vbar.alloc("2MiB")
    assert vbar.alloc("1MiB").offset == 255 * MIB
    with pytest.raises(ebbtide.Full):
        vbar.alloc(1)


def test_weights_lie_one_after_the_other_and_aligned(vbar):
    a, b = vbar.alloc(5), vbar.alloc(5)
    assert (a.offset, b.offset) == (0, 512)
    assert b.address == vbar.address + 512
    assert vbar.stats()["allocated"] == 1024
    assert "5 bytes" in repr(a) and hex(vbar.address) in repr(vbar)


# ---- faults -------------------------------------------------------------------------------------


def test_a_weight_is_filled_once_and_stays(device, vbar):
    card, stream = device._card, device._card.stream()
    w = vbar.alloc(MIB)
    assert (w.signature, w.pins) == (None, 0)
    signature = w.fault(stream.handle)
    assert isinstance(signature, int) and signature != w.signature and w.pins == 1
    card.fill(w.address, 0x5A, MIB, stream)
    w.filled(signature, stream=stream.handle)
    assert w.signature == signature
    w.unpin(stream=stream.handle)
    assert w.pins == 0
    other = card.stream()  # ordered after the fill, although it waits for nobody
    assert w.fault(stream=other.handle) == signature
    back = card.pinned(MIB)
    card.copy_out(back, w.address, other)
    w.unpin(other.handle)
    other.synchronize()
    assert back.read() == b"\x5a" * MIB
    stats = vbar.stats()
    assert (stats["misses"], stats["hits"]) == (1, 1)


def test_new_memory_has_another_signature(device, vbar, load_all):
    w = vbar.alloc(MIB)
    load_all(w)
    before = w.signature
    assert vbar.free_memory(PAGE) == PAGE
    vbar.prioritize()  # the watermark was lowered
    assert w.fault() not in (None, before)
    assert w.signature == before  # until it is filled again
    w.unpin()


def test_streams_are_numbers_or_look_like_pytorchs(device, vbar):
    class Like:
        cuda_stream = device._card.stream().handle

    w = vbar.alloc(MIB)
    for stream in (None, 0, Like.cuda_stream, Like()):
        assert w.fault(stream=stream)
        w.unpin(stream=stream)
    device.keep_stream(Like())
    device.keep_stream(Like.cuda_stream)
    with pytest.raises(ebbtide.Invalid, match="per-thread"):
        device.keep_stream(2)


def test_a_stream_promised_never_to_capture_is_not_asked_until_that_is_taken_back(device, vbar):
    stream = device._card.stream().handle
    w = vbar.alloc(MIB)

    def questions() -> int:
        for _ in range(2):  # the first time it becomes the last user
            before = sim.calls("cuStreamIsCapturing")
            for _ in range(5):
                assert w.fault(stream=stream)
                w.unpin(stream=stream)
        return sim.calls("cuStreamIsCapturing") - before

    device.keep_stream(stream, never_captures=True)
    assert questions() == 0
    device.keep_stream(stream)
    assert questions() == 5
    device.keep_stream(stream, True)
    assert questions() == 0
    device.keep_stream(stream, never_captures=False)
    assert questions() == 5
    assert device.stats()["broken_promises"] == 0
    for call in (
        device.keep_stream,
        lambda: device.keep_stream(stream, True, True),
        lambda: device.keep_stream(stream, captures=True),
        lambda: device.keep_stream(stream=stream),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("stream", ["0", 1.5, [], object(), -1, 2**64, 2**200, -(2**63)], ids=repr)
def test_a_stream_that_is_none_is_refused(device, vbar, stream):
    w = vbar.alloc(MIB)
    signature = w.fault()

    class Like:
        cuda_stream = stream

    for given in (stream, Like()):
        for call in (
            lambda given=given: w.fault(stream=given),
            lambda given=given: w.unpin(given),
            lambda given=given: w.filled(signature, given),
            lambda given=given: vbar.fault([w], given),
            lambda given=given: vbar.unpin([w], stream=given),
            lambda given=given: vbar.graphs_gone(given),
            lambda given=given: device.keep_stream(given),
        ):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                call()
    assert w.pins == 1
    w.unpin()


@pytest.mark.parametrize(
    "call",
    [
        lambda d, v, w: w.fault(0, 0),
        lambda d, v, w: w.fault(streams=0),
        lambda d, v, w: w.fault(0, stream=0),
        lambda d, v, w: w.unpin(0, 0),
        lambda d, v, w: w.unpin(1, now=2),
        lambda d, v, w: w.filled(),
        lambda d, v, w: w.filled(stream=0),
        lambda d, v, w: w.filled(None),
        lambda d, v, w: w.filled("1"),
        lambda d, v, w: w.filled(-1),
        lambda d, v, w: w.filled(2**64),
        lambda d, v, w: w.filled(1, 0, 0),
        lambda d, v, w: v.fault(),
        lambda d, v, w: v.fault(stream=0),
        lambda d, v, w: v.fault(None),
        lambda d, v, w: v.fault(w),
        lambda d, v, w: v.fault([None]),
        lambda d, v, w: v.fault([w, 3]),
        lambda d, v, w: v.unpin(),
        lambda d, v, w: v.unpin([w, w, object()]),
        lambda d, v, w: v.unpin(7),
        lambda d, v, w: v.free_memory(),
        lambda d, v, w: v.prioritize(1),
        lambda d, v, w: v.trade(),
        lambda d, v, w: v.trade(w),
        lambda d, v, w: v.graphs_gone(0, 0),
        lambda d, v, w: ebbtide.VBAR(None, 1),
        lambda d, v, w: ebbtide.VBAR(v, 1),
        lambda d, v, w: ebbtide.VBAR(d, 1, page_out=5),
        lambda d, v, w: ebbtide.VBAR(d, 1, bytes=3),
        lambda d, v, w: ebbtide.Weight(d, 1),
        lambda d, v, w: ebbtide.Weight(None, 1),
        lambda d, v, w: ebbtide.Device(None),
        lambda d, v, w: ebbtide.Device("cuda"),
        lambda d, v, w: ebbtide.Device(0.5),
        lambda d, v, w: ebbtide.Device(2**40),
        lambda d, v, w: ebbtide.Device(0, memory="1GiB"),
        lambda d, v, w: _core.VBAR(5, 1),
        lambda d, v, w: _core.VBAR(v, 1),
        lambda d, v, w: _core.Weight(5, 1),
        lambda d, v, w: _core.Weight(w, 1),
        lambda d, v, w: delattr(d, "limit"),
        lambda d, v, w: delattr(v, "watermark"),
        lambda d, v, w: setattr(w, "offset", 3),
        lambda d, v, w: setattr(w, "pins", 3),
        lambda d, v, w: setattr(v, "address", 3),
        lambda d, v, w: setattr(v, "device", None),
    ],
)
def test_made_up_arguments_raise_and_change_nothing(device, vbar, call):
    w = vbar.alloc(MIB)
    before = vbar.stats()
    with pytest.raises((TypeError, ValueError, OverflowError, AttributeError)) as raised:
        call(device, vbar, w)
    assert str(raised.value)
    assert (vbar.stats(), w.pins, w.nbytes, device.limit) == (before, 0, MIB, 128 * MIB)


def test_what_only_looks_like_a_weight_is_none(device, vbar):
    class Like:
        pass

    like = Like()
    like.vbar = vbar
    other = ebbtide.VBAR(device, PAGE)
    for item in (like, other.alloc(1)):
        for call in (vbar.fault, vbar.unpin):
            with pytest.raises((TypeError, ValueError), match="no weight of this VBAR"):
                call([item])


def test_nothing_is_made_twice(device, vbar, load_all):
    w = vbar.alloc(MIB)
    with pytest.raises(TypeError, match="once"):
        vbar.__init__(device, PAGE)
    with pytest.raises(TypeError, match="once"):
        w.__init__(vbar, 3 * MIB)
    with pytest.raises(TypeError, match="once"):
        device.__init__("sim")
    assert (w.nbytes, vbar.stats()["allocated"]) == (MIB, MIB)
    assert device.limit == 128 * MIB
    assert load_all(w) == [True]


def test_what_was_never_made_says_so(device, vbar):
    """As in a subclass that forgot super().__init__()."""
    bare = [kind.__new__(kind) for kind in (ebbtide.Device, ebbtide.VBAR, ebbtide.Weight)]
    d, v, w = bare
    for call in (
        *(d.stats, d.trim, d.check, lambda: d.keep_stream(0), lambda: d.limit, lambda: d.headroom),
        *(lambda: setattr(d, "limit", 1), lambda: _core.Device.limit.__set__(d, 5)),
        *(v.stats, v.residency, v.prioritize, v.deprioritize, v.graphs_gone),
        *(lambda: v.fault([]), lambda: v.unpin([]), lambda: v.free_memory(1)),
        *(lambda: v.trade(vbar), lambda: vbar.trade(v)),
        *(lambda: v.set_watermark(1), lambda: v.alloc(1), lambda: v.watermark),
        *(w.fault, w.unpin, lambda: w.filled(1), w._dlpack, lambda: w.address),
        *(lambda: ebbtide.VBAR(d, 1), lambda: ebbtide.Weight(v, 1)),
        *(lambda: vbar.fault([w]), lambda: w.fault(stream=5)),
    ):
        with pytest.raises((TypeError, ValueError, ebbtide.Gone)) as raised:
            call()
        assert str(raised.value)
    assert w.signature is None
    for thing in bare:
        repr(thing) if thing is not w else None
    d.close()
    v.close()


def test_pins_are_counted_for_each_weight(vbar):
    a, b = vbar.alloc(MIB), vbar.alloc(MIB)  # on the same page
    assert a.fault() and b.fault()
    advice = "goes with a fault|between fault"
    with pytest.raises(ebbtide.NotPinned, match=advice):
        vbar.unpin([a, a])  # one of these pins would be b's
    assert (a.pins, b.pins) == (1, 1)
    a.unpin()
    with pytest.raises(ebbtide.NotPinned, match=advice):
        a.unpin()
    with pytest.raises(ebbtide.NotPinned, match=advice):
        a.filled(1)  # only b is pinned
    with pytest.raises(ebbtide.NotPinned, match=advice):
        vbar.unpin([b, a])
    assert (a.pins, b.pins, a.signature) == (0, 1, None)
    assert vbar.residency()[0] == 3 and vbar.stats()["pinned"] == PAGE
    b.unpin()
    assert vbar.stats()["pinned"] == 0
    assert a.fault() == a.fault() and a.pins == 2
    vbar.unpin([a, a])
    assert vbar.stats()["pinned"] == 0


def test_unpinning_in_two_threads_takes_each_pin_once(vbar):
    a, b = vbar.alloc(MIB), vbar.alloc(MIB)
    stream, other = (vbar.device._card.stream().handle for _ in range(2))
    outcomes = []

    def unpin(gate, on):
        gate.wait()
        try:
            a.unpin(on)
            outcomes.append(True)
        except ebbtide.NotPinned:
            outcomes.append(False)

    assert b.fault()
    for _ in range(100):
        assert a.fault(stream)
        gate = threading.Barrier(2)
        threads = [threading.Thread(target=unpin, args=(gate, s)) for s in (stream, other)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert (a.pins, b.pins) == (0, 1)
    assert outcomes.count(True) == outcomes.count(False) == 100
    b.unpin()


def test_several_weights_all_or_none(device, vbar):
    weights = [vbar.alloc(PAGE) for _ in range(6)]
    assert vbar.fault(weights) is None  # four pages may be held
    assert vbar.stats()["pinned"] == 0
    vbar.prioritize()
    signatures = vbar.fault(iter(weights[:4]))
    assert len(signatures) == 4 and [w.pins for w in weights] == [1, 1, 1, 1, 0, 0]
    for w, signature in zip(weights, signatures, strict=False):
        w.filled(signature)
    vbar.unpin(tuple(weights[:4]))
    assert vbar.fault(weights[:4]) == signatures == [w.signature for w in weights[:4]]
    vbar.unpin(weights[:4])
    assert vbar.fault([]) == []
    assert vbar.unpin([]) is None
    assert device.stats()["pinned"] == 0
