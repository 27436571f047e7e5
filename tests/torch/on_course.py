"""A model whose passes go by a course, beside the plain one."""

from __future__ import annotations

import copy

import torch
from offloaded import MIB, at_rest, inside, layers, x
from torch import nn

from ebbtide._offload.model import TRIES


class Course:
    """An offloaded model whose passes go by a course, beside the plain one. Its ring is not looked
    at, unless that is said: how large it should be depends on how busy this machine is."""

    def __init__(self, room, model=None, inputs=None, more=2 * MIB, steady=True, prefetch=2):
        self.model = layers(12) if model is None else model
        self.inputs = x() if inputs is None else inputs
        with torch.no_grad():
            self.plain = copy.deepcopy(self.model).cuda()
            self.room = room
            room.how = "little"
            self.handle = room.offload(self.model, more, prefetch=prefetch)
            self.ours = inside(self.model)
            if steady:
                assert self.settles()

    def settles(self):
        """After some passes one goes by a course, and the next one may."""
        return any(self.goes_by_itself() and self.course.left for _ in range(50 * TRIES))

    @property
    def course(self):
        return self.ours.course

    def same(self, inputs=None):
        with torch.no_grad():
            given = self.inputs if inputs is None else inputs
            assert torch.equal(self.model(given), self.plain(given))
        return at_rest(self.model)

    def has_the_same(self):
        ours, plain = self.model.state_dict(), self.plain.state_dict()
        return all(torch.equal(ours[name].cpu(), plain[name].cpu()) for name in ours)

    def goes_by_itself(self):
        """The next pass does, all of it."""
        before = self.course.entries, self.ours.slow_entries
        assert self.same()
        return self.course.entries > before[0] and self.ours.slow_entries == before[1]


class Inside(nn.Module):
    """Calls something, once, in the middle of the model."""

    def __init__(self):
        super().__init__()
        self.do, self.calls = None, 0

    def forward(self, h):
        self.calls += 1
        do, self.do = self.do, None
        if do is not None:
            do()
        return h


def seen_by(seen, method):
    def wrapped(*arguments):
        seen.append(arguments)
        return method(*arguments)

    return wrapped
