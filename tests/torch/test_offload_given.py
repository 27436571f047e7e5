"""offload(): what state_dict() gives is the weights' own bytes, while somebody holds them."""

from __future__ import annotations

import io

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, inside, layers, square
from torch import nn


@pytest.mark.hazards
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kept", ["all", "a view", "nothing"])
def test_what_a_state_dict_gave_is_looked_at_while_it_is_held(room, kept, inference):
    pair = Pair(room, layers(6), more=4 * MIB)
    with torch.inference_mode(inference):
        state = pair.model.state_dict()
        again = pair.model.state_dict()
        assert again["1.0.weight"].untyped_storage()._cdata == storage_of(state["1.0.weight"])
        half = state["1.0.weight"].t().detach()[: WIDTH // 2]
    del again
    if kept != "all":
        del state
    if kept == "nothing":
        half.fill_(0.5)  # and nobody has it any more by the time it is looked for
        del half
    pair.plain[1][0].weight.data[:, : WIDTH // 2] = 0.5
    for factor in (0.5, 2) if kept != "nothing" else ():
        with torch.inference_mode(inference):
            half.fill_(factor)
        pair.plain[1][0].weight.data[:, : WIDTH // 2] = factor
        with torch.no_grad():
            assert torch.equal(pair.model(pair.inputs), pair.plain(pair.inputs))
            assert inside(pair.model).handed
    state = half = None
    with torch.no_grad():
        assert torch.equal(pair.model(pair.inputs), pair.plain(pair.inputs))
    ours = inside(pair.model)
    assert not ours.handed and ours.running.watched == ours.tracking
    assert pair.same()


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


def test_a_part_of_a_state_dict_is_saved_without_the_rest(room):
    model = nn.Sequential(nn.Sequential(*(square() for _ in range(3))), Tied())
    pair = Pair(room, model, more=4 * MIB)
    state = pair.model.state_dict()
    for names, count in (("0.1.weight",), 1), (("1.first.weight", "1.second.weight"), 1):
        file = io.BytesIO()
        torch.save({name: state[name] for name in names}, file)
        assert 0 <= file.tell() - count * WIDTH * WIDTH * 4 < 4096
        file.seek(0)
        again = torch.load(file, weights_only=True)
        assert all(torch.equal(again[name], state[name]) for name in names)
        assert len({storage_of(tensor) for tensor in again.values()}) == count


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = square(), square()
        self.second.weight = self.first.weight

    def forward(self, h):
        return self.second(torch.relu(self.first(h)))
