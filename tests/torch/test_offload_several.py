"""offload(): several models, threads, streams and cards."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from offloaded import MIB, WIDTH, at_rest, inside, layers, x
from torch import nn

import ebbtide
from ebbtide._offload.handle import is_parked

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")


def test_a_deleted_model_leaves_nothing_behind(room):
    inputs = x()
    model = layers()
    model[6][0].weight = model[1][0].weight
    handle = room.offload(model)
    with ebbtide.Device(0) as device, torch.no_grad():
        gc.disable()
        try:
            model(inputs)
            model(inputs)
            last = weakref.ref(inside(model))
            host = weakref.ref(inside(model).weights.bindings[0].piece)
            assert device.stats()["vbars"]
            del model
            assert last() is None and host() is None
            stats = device.stats()
            left = {name: stats[name] for name in ("vbars", "pinned", "resident", "unused")}
            assert not any(left.values())  # and other processes can have it
        finally:
            gc.enable()
    assert "gone" in repr(handle)
    with pytest.raises(ebbtide.Gone, match="deleted"):
        handle.stats()


ENDING = """
import os
import ebbtide.sim
if not os.environ.get("EBBTIDE_TEST_GPU"):
    ebbtide.sim.start(memory="64MiB")
import torch
from ebbtide._offload import model as module  # it goes before what is ours
torch.of_mine = lambda: None  # so that ours goes last
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(40)))
ebbtide.offload(model, limit="24MiB")
with torch.no_grad():
    model(torch.ones(2, 512, device="cuda"))
print("the end")
"""


def test_a_model_that_is_there_until_the_end_goes_quietly():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the end\n")
    assert "Traceback" not in done.stderr, done.stderr


def test_a_part_that_outlives_its_model_still_works(room):
    inputs = x()
    model = layers()
    with torch.no_grad():
        expected = copy.deepcopy(model[5]).cuda()(inputs)
        room.offload(model)
        model(inputs)
        part = model[5]
        del model
        for _ in range(4):
            assert torch.equal(part(inputs), expected)


def run_threads(count, work, new_streams=True):
    errors = []

    def run(i):
        try:
            stream = torch.cuda.Stream() if new_streams else None
            with torch.cuda.stream(stream), torch.no_grad():
                work(i)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_run_two_models(room):
    models = [layers(6), layers(6)]
    inputs = x()
    with torch.no_grad():
        expected = [copy.deepcopy(m).cuda()(inputs) for m in models]
    torch.cuda.synchronize()
    for model in models:
        room.offload(model, 8 * MIB)

    def work(i):
        for _ in range(15):
            assert torch.equal(models[i](inputs), expected[i])

    run_threads(2, work)
    assert all(at_rest(m) for m in models)


def test_two_threads_run_the_same_model(room):
    model = layers(6)
    inputs = [x(), x()]
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        expected = [plain(i) for i in inputs]
        del plain
    torch.cuda.synchronize()
    room.offload(model, 6 * MIB)

    def work(i):
        for _ in range(15):
            assert torch.equal(model(inputs[i]), expected[i])

    run_threads(2, work)
    assert at_rest(model)
    with torch.no_grad():
        assert torch.equal(model(inputs[0]), expected[0])


def test_threads_that_never_rest_leave_a_model_as_it_is(room):
    """Their orders are one another's, which is no reason to plan anew; and where one is, another
    one comes in."""
    model = layers(6)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = room.offload(model, 6 * MIB)
        for _ in range(5):
            model(inputs)
    vbar, before = inside(model).vbar, handle.stats()

    def work(i):
        for _ in range(40):
            assert torch.equal(model(inputs), expected)

    run_threads(3, work, new_streams=False)
    assert inside(model).vbar is vbar
    if room.how == "all":
        assert handle.stats()["slow_entries"] == before["slow_entries"]
    assert at_rest(model)


def beside(work):
    """What another thread makes of it, meanwhile."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results.pop()


class Halves(nn.Module):
    """One unit of two weights, between which something may happen."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 32) for _ in range(2))
        self.between = self.taken = lambda: None

    def forward(self, h):
        h = h @ self.one.t()
        self.between()
        other = self.other
        self.taken()
        return h @ other.t()


def halves(room, count=8, **options):
    model = nn.Sequential(*(Halves() for _ in range(count)))
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        room.offload(model, **options)
        for _ in range(12):
            assert torch.equal(model(inputs), expected)
    return model, inputs, expected


def test_a_unit_in_use_shows_its_tensors_to_nobody_else(room):
    """They are over memory that is another weight's a moment later."""
    model, inputs, expected = halves(room)
    values = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    seen = []

    def look():
        mine = model[3].other
        seen.append((is_parked(mine), beside(lambda: is_parked(model[3].other))))
        seen.append(beside(lambda: model.state_dict()))
        seen.append(beside(lambda: dict(model.named_parameters())))
        seen.append(beside(lambda: model[3].one.detach().sum().item()))

    model[3].between = look
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
    shown, *dicts, total = seen
    assert shown == (False, True)
    for found in dicts:
        assert all(torch.equal(t.detach().cpu(), values[name]) for name, t in found.items())
    assert total == values["3.one"].cuda().sum().item()
    assert at_rest(model)


def test_a_unit_in_use_is_not_written_to_by_others(room):
    model, inputs, expected = halves(room)
    values = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    other = {name: tensor + 1 for name, tensor in values.items()}

    def change():
        beside(lambda: model.load_state_dict(values))
        beside(lambda: model.load_state_dict(other))

    model[3].between = change
    with torch.no_grad():
        model(inputs)
        model[3].between = lambda: None
        got = model.state_dict()
        assert all(torch.equal(got[name].cpu(), other[name]) for name in other)
        model.load_state_dict(values)
        assert torch.equal(model(inputs), expected)
    assert at_rest(model)


def test_a_thread_whose_weights_come_one_by_one_does_not_use_those_of_another(free_room):
    """It finds no room, and another one comes into the same unit later, with weights in the
    ring."""
    free_room.of = lambda model: 12 * MIB
    model, inputs, expected = halves(free_room, count=12, prefetch=1)
    first, third, unit = model[0], model[3], inside(model).units[0]
    events = {name: threading.Event() for name in ("holds", "late", "both", "took", "over")}
    mine = threading.local()

    def wait(name):
        assert events[name].wait(20), name

    def in_first():
        if mine.late:
            events["late"].set()
            wait("both")
        elif events["late"].is_set():
            events["both"].set()
            wait("took")

    def in_third():
        if not mine.late and not events["holds"].is_set():
            events["holds"].set()
            wait("late")

    def has_taken():
        if mine.late:
            assert (unit.depth, unit.bare) == (1, 1)
            events["took"].set()
            wait("over")

    first.between, first.taken, third.between = in_first, has_taken, in_third

    def work(number):
        mine.late = number == 1
        if mine.late:
            wait("holds")
            assert torch.equal(model(inputs), expected)
            return
        for _ in range(3):
            assert torch.equal(model(inputs), expected)
        events["over"].set()

    run_threads(2, work)
    assert at_rest(model)


def test_a_thread_that_waited_while_another_one_has_planned(room):
    model, inputs, expected = halves(room)
    ours = inside(model)
    results = []

    def late():
        with torch.no_grad():
            results.append(model[7](inputs))

    with torch.no_grad():
        right = inputs @ model[7].one.t() @ model[7].other.t()
    thread = threading.Thread(target=late)
    with ours.lock:
        ours.tracking = True
        thread.start()
        time.sleep(0.2)
        ours.weights.excluded.add("7")
        ours.dirty()
        ours.plan()
    thread.join()
    assert torch.equal(results.pop(), right)
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("how", ["by an operator", "by copy_()"])
def test_a_weight_that_is_written_while_another_thread_runs_the_model(free_room, monkeypatch, how):
    """What that has brought ahead by then is not read while it changes."""
    free_room.how = "little"
    model, inputs, _ = halves(free_room)
    weight, others = model[3].one, []
    synchronize = torch.cuda.synchronize

    def run():
        with torch.no_grad():
            model(inputs)

    def meanwhile(*device):
        synchronize(*device)
        if threading.current_thread() is threading.main_thread():
            others.append(threading.Thread(target=run))
            others[-1].start()
            others[-1].join(0.2)  # it is to wait

    with torch.no_grad():
        for _ in range(3):
            model(inputs)
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "synchronize", meanwhile)
                if how == "by an operator":
                    weight += 1.0
                else:
                    weight.copy_(torch.ones_like(weight, device="cpu"))
            while others:
                others.pop().join()
            torch.cuda.synchronize()
        got = model(inputs)
        for layer in model:  # every weight comes anew, without anybody beside it
            layer.one.copy_(layer.one.cpu())
            layer.other.copy_(layer.other.cpu())
        assert torch.equal(model(inputs), got)


def test_passes_on_changing_streams(room):
    model = layers(6)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        room.offload(model, 6 * MIB)
        streams = [torch.cuda.Stream() for _ in range(3)]
        for i in range(9):
            stream = streams[i % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = model(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(got, expected)


@pytest.mark.two_cards
def test_a_model_on_another_card(free_room):
    model = layers(4)
    inputs = x()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
        handle = ebbtide.offload(model, "cuda:1")
        for _ in range(3):
            assert torch.equal(model(inputs.to("cuda:1")).to("cuda:0"), expected)
        assert handle.stats()["resident"] > 0
    assert model[0][0].weight.device == torch.device("cuda", 1)
    del model
