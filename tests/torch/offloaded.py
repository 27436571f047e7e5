"""What tests of offload() have in common: models of small squares, and a pair to compare."""

from __future__ import annotations

import copy
import os

import torch
from torch import nn

import ebbtide
from ebbtide import _unseen
from ebbtide._offload.model import TRIES

SIMULATED = not os.environ.get("EBBTIDE_TEST_GPU")
MIB = 1 << 20
WIDTH = 512  # a square of it is 1 MiB


def room_for(simulated, on_a_gpu):
    """MiB beyond what must be: libraries on a GPU take some of it."""
    return (simulated if SIMULATED else on_a_gpu) * MIB


def layers(count=8, width=WIDTH):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def x(width=WIDTH):
    return torch.randn(1, width, device="cuda")


def paged(model):
    """Bytes of the weights that come and go: biases stay on the GPU."""
    return sum(p.nbytes for p in model.parameters() if p.nbytes > 64 << 10)


def inside(model):
    return model.forward.model


def at_rest(model):
    """Nothing of it is in use."""
    ours = inside(model)
    assert all(u.depth == 0 and u.bare == 0 for u in ours.units)
    assert ours.running.depth == 0 and ours.running.run is None
    with ebbtide.Device(0) as device:
        pinned = device.stats()["pinned"]
    assert pinned <= -(-ours.station.ring // (2 * MIB)) * 2 * MIB
    return True


def square():
    return nn.Linear(WIDTH, WIDTH)


def around(part, count=2):
    """A part of a model, with layers before and behind it."""
    before = (nn.Sequential(square(), nn.ReLU()) for _ in range(count))
    behind = (nn.Sequential(square(), nn.ReLU()) for _ in range(count))
    return nn.Sequential(*before, part, *behind)


class Boom(nn.Module):
    """Fails when told to."""

    armed = False

    def __init__(self, part=None):
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        if self.part is not None:
            h = self.part(h)
        if self.armed:
            raise KeyError("boom")
        return h * self.weight


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 20)

    def forward(self, h):
        return (h.to(torch.complex64) @ self.weight.conj()).real


# Passes, all the same, in which a model that streams comes to a course. On an old PyTorch Python
# sees to all of them.
SETTLING = 4 * TRIES if _unseen.by_strategy else 0


class Seen:
    """Whether passes, from here on, go by a course. The ring is left as it is: how large it should
    be depends on how busy this machine is."""

    def __init__(self, model):
        self.ours = inside(model)
        self.ours.adapts = self.ours.timed = False
        self.before, self.streamed = self.ours.course.entries, self.ours.stats()["streamed"]
        self.streams = False

    def look(self):
        """After a pass: whether one has gone by a course."""
        now = self.ours.stats()["streamed"]
        self.streams, self.streamed = now > self.streamed, now
        return self.ours.course.entries > self.before

    def is_right(self, no_course, must=False):
        """If it streams, then by a course, unless there is something that says why it does not."""
        assert self.streams or no_course or not must, "nothing streams"
        by_course = self.ours.course.entries > self.before
        assert by_course == (not no_course) or not (self.streams and SIMULATED), no_course
        return True


def settles(model, again, no_course=""):
    """Passes, of which `again` makes some, go on until they go by a course, if it streams."""
    seen = Seen(model)
    for _ in range(SETTLING):
        assert again()
        if seen.look():
            break
    assert again()
    return seen.is_right(no_course)


class Pair:
    """An offloaded model, and the same one as a plain model on the GPU. Where little of it stays,
    there are always so many passes that some go by a course, unless `no_course` says why none
    does."""

    def __init__(self, room, model, inputs=None, more=None, no_course=""):
        self.model = model
        self.plain = copy.deepcopy(model).cuda()
        self.inputs = x() if inputs is None else inputs
        self.handle = room.offload(model, room_for(2, 30) if more is None else more)
        self.little, self.no_course = room.how == "little", no_course
        self.same()

    def both(self):
        return self.model, self.plain

    @torch.no_grad()
    def each(self, change):
        for model in self.both():
            change(model)
        return self.same()

    @torch.no_grad()
    def same(self):
        inputs = self.inputs.to(next(self.plain.parameters()).dtype)
        expected = self.plain(inputs)
        for _ in range(3):
            assert torch.equal(self.model(inputs), expected)
        if self.little and "forward" in self.model.__dict__:
            again = lambda: torch.equal(self.model(inputs), expected)  # noqa: E731
            assert settles(self.model, again, self.no_course)
        ours, plain = self.model.state_dict(), self.plain.state_dict()
        assert list(ours) == list(plain)
        assert [n for n in ours if not torch.equal(ours[n].cpu(), plain[n].cpu())] == []
        return True

    def back(self):
        """It is a plain model again."""
        self.handle.restore()
        self.plain.cpu()
        self.inputs = self.inputs.cpu()
        assert self.same() and is_plain(self.model)


def is_plain(model):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all("forward" not in m.__dict__ for m in model.modules())
    return all(type(m._parameters) is type(m._buffers) is dict for m in model.modules())


def equal(p, q):
    """Values and all that says where they are."""
    assert (p.shape, p.stride(), p.dtype, p.device) == (q.shape, q.stride(), q.dtype, q.device)
    return torch.equal(p.detach().cpu(), q.detach().cpu())
