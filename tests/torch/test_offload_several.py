"""offload(): several models, threads, streams and cards."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref

import pytest
import torch
from offloaded import MIB, at_rest, inside, layers, paged, x

import ebbtide

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
            assert (stats["vbars"], stats["pinned"], stats["resident"]) == (0, 0, 0)
        finally:
            gc.enable()
    assert "gone" in repr(handle)
    with pytest.raises(ebbtide.Gone, match="deleted"):
        handle.stats()


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


def test_the_newest_model_comes_first_or_the_one_that_is_told_to(free_room):
    inputs = x()
    models = [layers(12), layers(12)]
    size = paged(models[0])
    with torch.no_grad():
        expected = [copy.deepcopy(m).cuda()(inputs) for m in models]
    free_room.of = lambda model: size + 10 * MIB
    handles = [free_room.offload(m) for m in models]

    def use():
        with torch.no_grad():
            for _ in range(3):
                for model, result in zip(models, expected, strict=False):
                    assert torch.equal(model(inputs), result)
        return [handles[i].stats()["resident"] for i in range(len(models))]

    one, other = use()
    assert other >= size > one
    handles[0].prioritize()
    one, other = use()
    assert one >= size > other
    handles[1].prioritize()
    one, other = use()
    assert other >= size > one
    models.pop()
    assert use()[0] >= size


def run_threads(count, work):
    errors = []

    def run(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
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
