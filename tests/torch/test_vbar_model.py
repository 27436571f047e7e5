"""Random programs over Device, VBAR and Weight with real tensors.

What is pinned has the right values, no more is held than may be, the books balance, and nothing is
touched too early.
"""

import gc

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ebbtide
from ebbtide import sim

MIB = 1 << 20
PAGE = 32 * MIB
PAGES = 3  # that may be held, at most
WORDS = 256  # of a weight that are looked at

pick = st.integers(0, 63)
streams = st.integers(0, 2)


class Layer:
    """A weight, what it should hold, and the streams of its pins."""

    def __init__(self, vbar, size, number):
        self.weight = vbar.alloc(size)
        self.host = torch.full((WORDS,), number, dtype=torch.int32).pin_memory()
        self.tensor = self.weight.tensor((WORDS,), torch.int32)
        self.pins = []  # (stream, whether it is filled for that use)


class Paging(RuleBasedStateMachine):
    @initialize(rise=st.booleans())
    def begin(self, rise):
        sim.clear_hazards()
        self.device = ebbtide.Device(0)
        self.limit = PAGES * PAGE
        self.device.limit = self.limit
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.vbars, self.layers, self.results = [], [], []
        self.number = 0
        self.new_vbar(rise)
        self.new_layer(0, PAGE)

    # ---- what there is ----

    @precondition(lambda self: len(self.vbars) < 3)
    @rule(rise=st.booleans())
    def new_vbar(self, rise):
        self.vbars.append(ebbtide.VBAR(self.device, 5 * PAGE, rise=rise))

    @precondition(lambda self: len(self.layers) < 12)
    @rule(i=pick, size=st.sampled_from([4096, 20 * MIB, PAGE, PAGE + 4096]))
    def new_layer(self, i, size):
        vbar = self.vbars[i % len(self.vbars)]
        self.number += 1
        try:
            self.layers.append(Layer(vbar, size, self.number))
        except ebbtide.Full:
            assert vbar.stats()["allocated"] + size > 5 * PAGE

    @rule(i=pick)
    def close_vbar(self, i):
        vbar = self.vbars[i % len(self.vbars)]
        mine = [layer for layer in self.layers if layer.weight.vbar is vbar]
        try:
            vbar.close()
            assert not any(layer.pins for layer in mine)
        except ebbtide.Busy:
            assert any(layer.pins for layer in mine)
            return
        self.layers = [layer for layer in self.layers if layer not in mine]
        self.vbars.remove(vbar)
        if not self.vbars:
            self.new_vbar(False)

    @precondition(lambda self: self.layers)
    @rule(i=pick)
    def drop_layer(self, i):
        layer = self.layers.pop(i % len(self.layers))
        if layer.pins:  # dropped while pinned, and all its uses are of one stream or over
            torch.cuda.synchronize()

    # ---- uses ----

    def layer(self, i):
        return self.layers[i % len(self.layers)] if self.layers else None

    @precondition(lambda self: self.layers)
    @rule(i=pick, s=streams)
    def fault(self, i, s):
        layer, stream = self.layer(i), self.streams[s]
        with torch.cuda.stream(stream):
            signature = layer.weight.fault()
            if signature is None:
                assert not layer.pins  # what is pinned is always a hit
                return
            if signature != layer.weight.signature:
                assert not layer.pins  # nobody else uses it unfilled: this program fills at once
                torch.cuda._sleep(100_000)
                layer.tensor.copy_(layer.host, non_blocking=True)
                layer.weight.filled(signature)
            layer.pins.append(stream)

    @precondition(lambda self: self.layers)
    @rule(i=pick)
    def work(self, i):
        """The values, taken on the stream of a pin, and looked at much later."""
        layer = self.layer(i)
        if layer.pins:
            with torch.cuda.stream(layer.pins[-1]):
                self.results.append((layer.tensor.clone(), layer.host))

    @precondition(lambda self: self.layers)
    @rule(i=pick)
    def unpin(self, i):
        layer = self.layer(i)
        if layer.pins:
            with torch.cuda.stream(layer.pins.pop()):
                layer.weight.unpin()
        else:
            try:
                layer.weight.unpin()
                raise AssertionError("there was no pin")
            except ebbtide.NotPinned:
                pass

    @precondition(lambda self: self.layers)
    @rule(i=pick, s=streams)
    def resident(self, i, s):
        layer = self.layer(i)
        with torch.cuda.stream(self.streams[s]), layer.weight.resident(layer.host) as t:
            self.results.append((t.clone(), layer.host))

    @precondition(lambda self: self.layers)
    @rule(i=pick, s=streams)
    def several(self, i, s):
        """All weights of a VBAR, or none."""
        vbar, stream = self.vbars[i % len(self.vbars)], self.streams[s]
        mine = [layer for layer in self.layers if layer.weight.vbar is vbar][: 1 + i % 4]
        with torch.cuda.stream(stream):
            signatures = vbar.fault([layer.weight for layer in mine])
            if signatures is None:
                return
            for layer, signature in zip(mine, signatures, strict=True):
                if signature != layer.weight.signature:
                    layer.tensor.copy_(layer.host, non_blocking=True)
                    layer.weight.filled(signature)
                self.results.append((layer.tensor.clone(), layer.host))
            vbar.unpin([layer.weight for layer in mine])

    # ---- pressure ----

    @rule(i=pick, up=st.booleans())
    def importance(self, i, up):
        vbar = self.vbars[i % len(self.vbars)]
        vbar.prioritize() if up else vbar.deprioritize()

    @rule(i=pick, pages=st.integers(0, 3))
    def free_memory(self, i, pages):
        vbar = self.vbars[i % len(self.vbars)]
        before = vbar.loaded_size
        assert vbar.free_memory(pages * PAGE) >= before - vbar.loaded_size - PAGE

    @rule(i=pick, pages=st.integers(0, 5))
    def watermark(self, i, pages):
        self.vbars[i % len(self.vbars)].watermark = pages * PAGE

    @rule(pages=st.integers(1, PAGES))
    def set_limit(self, pages):
        self.limit = pages * PAGE
        try:
            self.device.limit = self.limit
        except ebbtide.Busy:
            assert any(layer.pins for layer in self.layers)

    @rule()
    def trim(self):
        self.device.trim()
        assert self.device.stats()["unused"] == 0

    @rule()
    def others_take_memory(self):
        self.results.append((torch.ones(8 * MIB // 4, device="cuda")[:1], torch.ones(1)))

    # ---- what always holds ----

    @invariant()
    def right(self):
        if not hasattr(self, "device"):
            return
        self.device.check()
        stats = self.device.stats()
        assert stats["held"] <= max(self.limit, stats["pinned"])
        for layer in self.layers:
            assert layer.weight.pins == len(layer.pins)
            flags = layer.weight.vbar.residency()[layer.weight.offset // PAGE]
            assert not layer.pins or flags & 3 == 3
        if len(self.results) > 8:
            self.look()

    def look(self):
        torch.cuda.synchronize()
        for result, host in self.results:
            assert torch.equal(result.cpu(), host)
        self.results.clear()
        for layer in self.layers:
            if layer.pins:
                assert torch.equal(layer.tensor.cpu(), layer.host)
        assert [h.text for h in sim.hazards()] == []

    def teardown(self):
        if not hasattr(self, "device"):
            return
        self.look()
        for layer in self.layers:
            for _ in layer.pins:
                layer.weight.unpin()
        for vbar in self.vbars:
            vbar.close()
        self.layers.clear()
        gc.collect()
        assert self.device.stats()["vbars"] == 0
        self.device.close()


TestPaging = Paging.TestCase
TestPaging.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
