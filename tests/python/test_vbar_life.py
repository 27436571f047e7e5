"""What Device, VBAR and Weight do over time: who keeps whom, saving, threads, forks, importance."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import re
import sys
import threading
import time
import weakref

import pytest

import ebbtide
from ebbtide import _core, sim

MIB = 1 << 20
PAGE = 32 * MIB

pytestmark = pytest.mark.usefixtures("simulator")


def shown(vbar):
    """One character for each page: resident, pinned, neither."""
    return "".join({0: ".", 1: "#", 3: "*"}[flags] for flags in vbar.residency())


# ---- who keeps whom -----------------------------------------------------------------------------


def test_a_weight_that_is_dropped_lets_go_of_its_pins(vbar):
    a, b = vbar.alloc(MIB), vbar.alloc(PAGE)
    for _ in range(3):
        assert a.fault()
    assert b.fault()
    assert shown(vbar).startswith("**.")
    del a
    gc.collect()
    assert shown(vbar).startswith("**.")  # b has a part of the first page too
    b.unpin()
    assert shown(vbar).startswith("##.")


def test_a_weight_keeps_its_vbar(device, load_all):
    vbar = ebbtide.VBAR(device, PAGE)
    gone = weakref.ref(vbar)
    w = vbar.alloc(MIB)
    del vbar
    gc.collect()
    assert load_all(w) == [True]
    assert w.vbar.device is device
    del w
    gc.collect()
    assert gone() is None
    assert device.stats()["vbars"] == 0


def test_a_vbar_keeps_its_device(load_all):
    w = ebbtide.VBAR(ebbtide.Device("sim", memory="64MiB"), PAGE).alloc(MIB)
    gc.collect()
    assert load_all(w) == [True]
    w.vbar.device.check()


class Saver:
    """A page_out that knows the weights, which know the VBAR."""

    def __init__(self, device):
        self.vbar = ebbtide.VBAR(device, PAGE, page_out=self.save)
        self.weights = [self.vbar.alloc(MIB)]

    def save(self, offset, size):
        raise AssertionError("nothing is saved when a VBAR goes as a whole")


@pytest.mark.parametrize("pinned", [False, True])
def test_a_page_out_that_knows_its_weights_is_collected(device, pinned):
    def make():
        saver = Saver(device)
        if pinned:
            assert saver.weights[0].fault()
        return weakref.ref(saver), weakref.ref(saver.vbar)

    gone = make()
    gc.collect()
    gc.collect()  # what was pinned at the first look is not at the second
    assert [ref() for ref in gone] == [None, None]
    assert device.stats()["vbars"] == 0


def test_a_page_out_that_has_only_a_weight_is_collected(device):
    def make():
        held = []
        vbar = ebbtide.VBAR(device, PAGE, page_out=lambda offset, size: held)
        held.append(vbar.alloc(MIB))
        return weakref.ref(vbar)

    gone = make()
    gc.collect()
    assert gone() is None


def test_they_are_not_copied(device, vbar):
    for thing in (device, vbar, vbar.alloc(MIB)):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot pickle"):
                call(thing)


def test_nothing_is_leaked_by_what_is_refused(vbar):
    w = vbar.alloc(MIB)
    other = object()
    before = sys.getrefcount(other), sys.getrefcount(w), sys.getrefcount(vbar)
    for _ in range(100):
        for call in (
            lambda: vbar.fault([w, other]),
            lambda: w.fault(stream=other),
            lambda: w.unpin(),
            lambda: ebbtide.VBAR(other, 1),
            lambda: ebbtide.VBAR(vbar.device, 1, page_out=5),
            lambda: ebbtide.Weight(other, 1),
            lambda: vbar.unpin([w]),
        ):
            with pytest.raises((TypeError, ValueError, ebbtide.NotPinned)):
                call()
        vbar.fault([w])
        vbar.unpin([w])
    del call
    assert (sys.getrefcount(other), sys.getrefcount(w), sys.getrefcount(vbar)) == before


# ---- importance ---------------------------------------------------------------------------------


def test_the_story_of_two_models(device, load_all):
    first = ebbtide.VBAR(device, "192MiB")
    a = [first.alloc(PAGE) for _ in range(6)]
    assert load_all(*a) == [True] * 4 + [False] * 2  # the tail is streamed
    assert shown(first) == "####.."
    second = ebbtide.VBAR(device, "64MiB")
    b = [second.alloc(PAGE) for _ in range(2)]
    assert load_all(*b) == [True] * 2  # newer: from the top of the first
    assert (shown(first), shown(second)) == ("##....", "##")
    assert (first.watermark, first.loaded_size) == (2 * PAGE, 2 * PAGE)
    assert load_all(*a) == [True] * 2 + [False] * 4
    first.prioritize()
    assert first.watermark == 6 * PAGE
    assert load_all(*a) == [True] * 4 + [False] * 2
    assert (shown(first), shown(second)) == ("####..", "..")
    first.deprioritize()
    second.prioritize()
    assert load_all(*b) == [True] * 2
    assert first.free_memory("1MiB") == PAGE
    assert (shown(first), first.watermark) == ("#.....", PAGE)
    second.trade(first)
    assert load_all(*b) == [True] * 2  # still there
    first.watermark = 6 * PAGE
    assert load_all(*a) == [True] * 4 + [False] * 2
    stats = device.stats()
    assert stats["evictions_for_weights"] == 8
    assert stats["evictions_asked_for"] == 1
    assert first.stats()["rank"] > second.stats()["rank"]


def test_importance_is_traded_on_one_device_only(device, vbar):
    with (
        ebbtide.Device("sim", memory="256MiB") as other,
        ebbtide.VBAR(other, "64MiB") as far,
        pytest.raises(ValueError, match="different devices"),
    ):
        vbar.trade(far)
    with pytest.raises(ebbtide.Gone):
        vbar.trade(far)


def test_watermarks(vbar, load_all):
    weights = [vbar.alloc(PAGE) for _ in range(8)]
    vbar.watermark = PAGE
    assert load_all(*weights) == [True] + [False] * 7
    vbar.watermark_limit = 2 * PAGE
    vbar.prioritize()
    assert load_all(*weights) == [True] * 2 + [False] * 6
    vbar.watermark = "1TiB"
    assert vbar.watermark == 2 * PAGE  # never above its limit


def test_the_limit_while_running(device, vbar, load_all):
    weights = [vbar.alloc(PAGE) for _ in range(4)]
    assert load_all(*weights) == [True] * 4
    assert weights[3].fault()
    device.limit = "64MiB"
    assert shown(vbar)[:4] == "#..*"
    with pytest.raises(ebbtide.Busy, match="set"):
        device.limit = 0
    assert device.limit == 0
    assert shown(vbar)[:4] == "...*"
    weights[3].unpin()
    assert load_all(*weights) == [False] * 4
    assert device.stats()["held"] == 0
    device.limit = "128MiB"


def test_headroom_is_left_to_others(load_all):
    with ebbtide.Device("sim", memory="256MiB", headroom="128MiB") as device:
        vbar = ebbtide.VBAR(device, "256MiB")
        assert load_all(*(vbar.alloc(PAGE) for _ in range(8))).count(True) == 3  # and a context
        assert device.stats()["free"] >= 128 * MIB
        device.headroom = 0
        vbar.prioritize()
        w = vbar.alloc  # no more addresses, so the old ones again
        with pytest.raises(ebbtide.Full):
            w(1)
        device.check()


def test_free_frames_are_given_back_when_asked(device, vbar, load_all):
    load_all(vbar.alloc(PAGE))
    vbar.close()
    held = device.stats()["held"]
    assert device.trim() == held - device.stats()["held"]
    assert device.stats()["held"] == 0


def test_the_figures_are_those_of_the_header(device, vbar, repository):
    header = (repository / "include/ebbtide.h").read_text()
    reasons = ["for_weights", "for_tensors", "for_limit", "asked_for"]
    for struct, stats in (("ebb_device_stats", device.stats()), ("ebb_vbar_stats", vbar.stats())):
        body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", header, re.DOTALL)[1]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        names = set()
        for fields in re.findall(r"u?int64_t ([^;]+);", body):
            for name in re.split(r",\s*", fields):
                if name.startswith("evictions["):
                    names |= {f"evictions_{reason}" for reason in reasons}
                else:
                    names.add(name)
        assert set(stats) == names
        assert all(type(value) is int for value in stats.values())


# ---- saving -------------------------------------------------------------------------------------


def test_a_page_is_saved_before_it_goes(device, load_all):
    calls = []

    def save(offset, size):
        calls.append((offset, size, threading.get_ident()))
        device.stats()  # the device may be asked
        assert sim.peek(vbar.address + offset, 4) == bytes([7, 7, 7, 7])

    vbar = ebbtide.VBAR(device, "128MiB", page_out=save)
    w = vbar.alloc(2 * PAGE)
    card = device._card
    signature = w.fault()
    card.fill(w.address, 7, w.nbytes, card.default_stream)
    w.filled(signature)
    w.unpin()
    assert vbar.free_memory(PAGE) == PAGE
    me = threading.get_ident()
    assert calls == [(PAGE, PAGE, me)]
    more = ebbtide.VBAR(device, "128MiB")
    assert load_all(*(more.alloc(PAGE) for _ in range(4))) == [True] * 4
    assert calls[1:] == [(0, PAGE, me)]
    assert device.stats()["page_outs"] == 2
    vbar.close()
    assert len(calls) == 2


def test_a_page_that_could_not_be_saved_stays(device, load_all, monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)

    def save(offset, size):
        raise OSError("the disk is full")

    vbar = ebbtide.VBAR(device, "128MiB", page_out=save)
    weights = [vbar.alloc(PAGE) for _ in range(4)]
    assert load_all(*weights) == [True] * 4
    assert vbar.free_memory(PAGE) == 0
    assert shown(vbar) == "####"
    (report,) = {str(r.exc_value) for r in reports}
    assert report == "the disk is full" and reports[0].object is save
    more = ebbtide.VBAR(device, PAGE)
    assert more.alloc(1).fault() is None  # there is nothing to be had
    assert load_all(*weights) == [True] * 4
    reports.clear()


def test_a_page_out_that_asks_for_its_own_vbar_does_not_hang(device):
    seen = []

    def save(offset, size):
        for call in (w.fault, vbar.close, lambda: vbar.free_memory(PAGE), vbar.stats):
            try:
                seen.append(call())
            except ebbtide.Error as error:
                seen.append(type(error))

    vbar = ebbtide.VBAR(device, PAGE, page_out=save)
    w = vbar.alloc(MIB)
    w.fault()
    w.unpin()
    done = threading.Thread(target=vbar.free_memory, args=(PAGE,), daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    assert len(seen) == 4
    for _ in range(w.pins):
        w.unpin()
    device.check()


def test_a_vbar_dropped_while_it_saves(device):
    """Its function runs in another thread when the last reference goes."""
    inside, go_on = threading.Event(), threading.Event()

    def save(offset, size):
        inside.set()
        go_on.wait(10)

    vbar = ebbtide.VBAR(device, PAGE, page_out=save)
    w = vbar.alloc(MIB)
    w.fault()
    w.unpin()
    more = ebbtide.VBAR(device, "128MiB").alloc("128MiB")
    taker = threading.Thread(target=more.fault)
    taker.start()
    assert inside.wait(10)
    del save, w, vbar
    gc.collect()
    go_on.set()
    taker.join(10)
    assert more.pins == 1
    more.unpin()


# ---- threads ------------------------------------------------------------------------------------


def test_a_fault_that_waits_lets_other_threads_run(device):
    card = device._card
    stream = card.stream()
    old = ebbtide.VBAR(device, "128MiB")
    w = old.alloc("128MiB")
    assert w.fault(stream.handle)
    card.launch("slow", stream, reads=[(w.address, w.nbytes)], nanoseconds=300_000_000)
    w.unpin(stream.handle)
    new = ebbtide.VBAR(device, PAGE).alloc(PAGE)
    counted, over = [], threading.Event()

    def count():
        for _ in itertools.takewhile(lambda _: not over.is_set(), itertools.count()):
            counted.append(time.perf_counter())
            time.sleep(0.002)

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.perf_counter()
    assert new.fault()
    ended = time.perf_counter()
    over.set()
    thread.join()
    assert ended - begun > 0.1  # it did wait
    assert sum(begun + 0.02 < t < ended - 0.02 for t in counted) > 10
    assert device.stats()["waits"] >= 1
    new.unpin()


def test_closing_while_others_use_it(device):
    """Whoever is late is told; nobody crashes."""
    for _ in range(20):
        vbar = ebbtide.VBAR(device, "256MiB")
        weights = [vbar.alloc(PAGE) for _ in range(8)]
        outcomes, gate = set(), threading.Barrier(4)

        def use(weights=weights, outcomes=outcomes, gate=gate):
            gate.wait()
            for w in weights * 20:
                try:
                    if w.fault():
                        w.unpin()
                except ebbtide.Gone:
                    outcomes.add("gone")
                except ebbtide.NotPinned:
                    outcomes.add("not pinned")

        threads = [threading.Thread(target=use) for _ in range(3)]
        [thread.start() for thread in threads]
        gate.wait()
        while True:
            try:
                vbar.close()
                break
            except ebbtide.Busy:
                time.sleep(0)
        [thread.join() for thread in threads]
        assert outcomes <= {"gone"}
    assert device.stats()["pinned"] == 0


# ---- forks --------------------------------------------------------------------------------------


def in_child(function):
    """What `function` returns in a forked child, as text; the child then ends as a program does."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, repr(function()).encode())
        except BaseException as error:
            os.write(send, f"{error!r}".encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as answers:
        text = answers.read()
    assert os.waitpid(child, 0)[1] == 0, text
    return text


def test_a_forked_child_is_told(device, vbar):
    w = vbar.alloc(MIB)
    assert w.fault()

    def child():
        told = []
        for call in (w.fault, lambda: w.filled(1), vbar.stats, vbar.prioritize, device.stats):
            try:
                told.append(call())
            except ebbtide.Forked as error:
                told.append(str(error))
        return told

    text = in_child(child)
    assert text.count("forked after it was opened") == 5, text
    assert "closed" not in text and "spawn" in text
    w.unpin()
    device.check()  # the parent has lost nothing


def test_a_forked_child_drops_everything_and_the_parent_goes_on(device, vbar, load_all):
    things = {"w": vbar.alloc(MIB), "v": ebbtide.VBAR(device, PAGE, page_out=print)}
    assert things["w"].fault()

    def child():
        things.clear()
        gc.collect()
        ebbtide.Device.__del__(device)
        try:
            device.close()
        except ebbtide.Forked:
            return "told"

    in_child(child)
    assert things["w"].pins == 1
    things["w"].unpin()
    assert load_all(things["w"]) == [True]
    device.check()


def test_without_torch_nothing_of_it_is_loaded(python):
    code = """
import sys
sys.modules["torch"] = None  # forbidden
import ebbtide
with ebbtide.Device("sim", memory="64MiB") as device:
    w = ebbtide.VBAR(device, "32MiB").alloc(5)
    assert w.fault()
    w.unpin()
import os
from ebbtide import _core, sim
card = sim.add_card(memory=64 << 20)
os.environ["EBBTIDE_DRIVER"] = str(sim.library())
with ebbtide.Device(card.ordinal) as device:
    w = ebbtide.VBAR(device, "32MiB").alloc(5)
    assert w.fault()
    w.unpin()
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_may_end_in_the_middle(python):
    code = """
import threading, time, ebbtide
device = ebbtide.Device("sim", memory="256MiB", limit="64MiB")
vbar = ebbtide.VBAR(device, "256MiB", page_out=lambda offset, size: None)
weights = [vbar.alloc("32MiB") for _ in range(8)]
weights[0].fault()
def use():
    while True:
        for w in weights:
            if w.fault():
                w.unpin()
        vbar.prioritize()
for _ in range(2):
    threading.Thread(target=use, daemon=True).start()
time.sleep(0.1)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vbar_dropped_while_a_graph_holds_it(python):
    """The graph's addresses stay; what is saved for other pages is still saved."""
    code = """
import ctypes, gc, ebbtide
from ebbtide import _core, sim
PAGE = 32 << 20
device = ebbtide.Device("sim", memory="256MiB", limit="64MiB")
card = device._card
stream = card.stream()
calls = []
vbar = ebbtide.VBAR(device, 2 * PAGE, page_out=lambda offset, size: calls.append((offset, size)))
a, b = vbar.alloc(PAGE), vbar.alloc(PAGE)
for w in (a, b):
    assert w.fault(stream.handle)
    w.filled(1, stream.handle)
    w.unpin(stream.handle)
library = ctypes.CDLL(str(sim.library()))
def driver(name, *arguments):
    found = ctypes.c_void_p()
    library.cuGetProcAddress_v2(name, ctypes.byref(found), 12000, ctypes.c_uint64(0), None)
    assert ctypes.CFUNCTYPE(ctypes.c_int)(found.value)(*arguments) == 0
handle = ctypes.c_void_p(stream.handle)
driver(b"cuStreamBeginCapture", handle, 0)
assert a.fault(stream.handle)
card.fill(a.address, 1, PAGE, stream)
a.unpin(stream.handle)
graph = ctypes.c_void_p()
driver(b"cuStreamEndCapture", handle, ctypes.byref(graph))
address = a.address
del vbar, a, b, w
gc.collect()
junk = [object() for _ in range(10000)]  # whatever was freed is something else now
more = ebbtide.VBAR(device, PAGE).alloc(PAGE)
assert more.fault() is not None
more.unpin()
assert calls == [(PAGE, PAGE)], calls
assert len(sim.peek(address, 4)) == 4
try:
    device.close()
except ebbtide.Busy as error:
    print(error)
device.check()
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "graphs that are gone" in done.stdout


# ---- a mover ------------------------------------------------------------------------------------


def test_an_outlook_changes_with_what_it_is_of(device, vbar):
    mover = _core.Mover(device)
    seen = [mover.outlook(vbar)]
    assert mover.outlook(vbar) == seen[0]
    device.limit = device.limit // 2
    seen.append(mover.outlook(vbar))
    mover.set_ring(2 * MIB)
    seen.append(mover.outlook(vbar))
    vbar.watermark_limit = PAGE
    seen.append(mover.outlook(vbar))
    assert len(set(seen)) == 4
    with pytest.raises(TypeError):
        mover.outlook(device)
    mover.close()
    with pytest.raises(ebbtide.Gone, match="the mover was closed"):
        mover.outlook(vbar)
