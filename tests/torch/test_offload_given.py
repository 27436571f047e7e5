"""offload(): what state_dict() gives is the weights' own bytes, while somebody holds them."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from offloaded import MIB, WIDTH, Pair, equal, inside, layers, square
from torch import nn

import ebbtide


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


@pytest.mark.parametrize("by", ["context", "default"])
def test_a_state_dict_where_another_device_is_the_default(free_room, by):
    pair = Pair(free_room, layers(4))
    if by == "context":
        with torch.device("meta"):
            other = layers(4)
            other.load_state_dict(pair.model.state_dict(), assign=True)
    else:

        def load():
            torch.set_default_device("cuda")
            made = layers(4).cpu()
            made.load_state_dict(pair.model.state_dict(), assign=True)
            return made

        # The default is the thread's, and to take it back leaves 2.6 unable to say what it is.
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(load).result()
    assert all(equal(p, q) for p, q in zip(other.parameters(), here(pair.plain), strict=True))


def here(model):
    return [p.cpu() if p.nbytes > 64 << 10 else p for p in model.parameters()]


def test_a_weight_that_is_written_with_its_own_values_in_other_places(room):
    """PyTorch refuses that where they overlap, for it might read what it has just written."""
    pair = Pair(room, layers(6), more=4 * MIB)
    state = pair.model.state_dict()
    weight = pair.model[1][0].weight
    with torch.no_grad():
        for to, values in (
            (weight, state["1.0.weight"].t()),
            (weight[1:], state["1.0.weight"][:-1]),
            (weight[1:], weight[:-1]),
        ):
            with pytest.raises(RuntimeError, match="single memory location"):
                to.copy_(values)
        assert pair.same()
        pair.model.load_state_dict(state)  # these are where they are
        assert pair.same()
        weight[:-1].copy_(state["1.0.weight"][1:].clone())
        pair.plain[1][0].weight[:-1].copy_(pair.plain[1][0].weight[1:].clone())
    assert pair.same()


def test_what_is_shared_with_another_process_is_a_copy(room):
    pair = Pair(room, layers(6), more=4 * MIB)
    state = pair.model.state_dict()
    for tensor in state.values():
        if tensor.device.type == "cpu":
            tensor.share_memory_()
    values = {name: torch.randn_like(tensor) / 20 for name, tensor in state.items()}
    for model in pair.both():
        model.load_state_dict(values)
    assert pair.same()  # which looks at another one
    shared = [name for name, tensor in state.items() if not tensor.is_cuda]
    assert len(shared) == 6 and all(state[name].is_shared() for name in shared)
    assert not any(torch.equal(state[name], values[name]) for name in shared)


@pytest.mark.hazards
@pytest.mark.parametrize("how", ["shared", "copied", "put back"])
def test_what_was_given_before_it_was_another_models_weight(free_room, how):
    """Or was none for a while."""
    pair = Pair(free_room, layers(6))
    plain = pair.plain
    if how == "shared":
        state, other = pair.model.state_dict(), nn.Sequential(nn.ReLU(), nn.Sequential(square()))
        plain = copy.deepcopy(other).cuda()
        other[1][0].weight = pair.model[1][0].weight
        plain[1][0].weight = pair.plain[1][0].weight
        ebbtide.offload(other)
    elif how == "copied":
        other = copy.deepcopy(pair.model)
        state = other.state_dict()
        ebbtide.offload(other)
    else:
        state, other = pair.model.state_dict(), pair.model
        weight, other[1][0].weight = other[1][0].weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
        other(pair.inputs)
        other[1][0].weight = weight
    with torch.no_grad():
        for factor in (1, 2, 3):
            state["1.0.weight"].mul_(factor)
            plain[1][0].weight.mul_(factor)
            for _ in range(2):
                assert torch.equal(other(pair.inputs), plain(pair.inputs))


def test_of_a_mapped_weight_that_is_written_nothing_stays_where_it_was(room, tmp_path):
    model = layers(6)
    torch.save(model.state_dict(), tmp_path / "weights")
    model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
    pair = Pair(room, model, more=4 * MIB)
    for last in False, True:
        state = pair.model.state_dict()
        names = ("1.0.weight", "2.0.weight") if last else ("3.0.weight",)
        for name in names:
            state[name].mul_(2)
            pair.plain.state_dict()[name].mul_(2)
        if last:
            del state
        with torch.no_grad():
            assert torch.equal(pair.model(pair.inputs), pair.plain(pair.inputs))
            pageable = pair.handle.stats()["pageable"]
            state = None
            pair.model(pair.inputs)
        assert (pageable > 0) != last and pair.handle.stats()["pageable"] == 0
        assert pair.same()
