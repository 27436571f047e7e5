"""offload(): what programs do with weights themselves: exchange them, copy them, give them
attributes. As with a plain model, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from offloaded import MIB, WIDTH, Complex, Pair, around, equal, inside, layers, square, x
from torch import nn

import ebbtide


def weights(model):
    return {name: p for name, p in model.named_parameters() if p.nbytes > 64 << 10}


# ---- p.data = ... -------------------------------------------------------------------------------


@torch.no_grad()
def test_weights_that_are_exchanged_and_put_back_are_what_they_were(room):
    """As an average of weights is tried out."""
    pair = Pair(room, layers(6), more=30 * MIB)
    torch.manual_seed(1)
    average = {name: torch.randn_like(p) / 20 for name, p in pair.plain.named_parameters()}
    before = pair.plain(pair.inputs)
    kept = [{name: p.data for name, p in model.named_parameters()} for model in pair.both()]
    for _ in range(2):
        for model in pair.both():
            for name, p in model.named_parameters():
                p.data = average[name].clone()
        assert pair.same() and not torch.equal(pair.plain(pair.inputs), before)
        for model, backup in zip(pair.both(), kept, strict=True):
            for name, p in model.named_parameters():
                p.data = backup[name]
        assert pair.same() and torch.equal(pair.plain(pair.inputs), before)
    # What was put back is looked at by both.
    for backup in kept:
        backup["2.0.weight"].mul_(2)
    assert pair.same()


@torch.no_grad()
def test_views_of_before_an_assignment_to_data_keep_the_old_values(either_room):
    pair = Pair(either_room, layers(3))
    values = torch.randn(WIDTH, WIDTH, device="cuda") / 20
    seen = []
    for model in pair.both():
        p = model[1][0].weight
        views = [p.data, p[3:5], p.t(), p.detach().view(-1)[7:]]
        p.data = values.clone()
        views[1].add_(1)
        seen.append((views, p))
    (ours, p), (plain, q) = seen
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert torch.equal(p, q) and torch.equal(p, values) and not torch.equal(ours[0], p)
    assert pair.same()


@torch.no_grad()
def test_what_has_been_given_out_keeps_the_old_values(either_room):
    pair = Pair(either_room, layers(3))
    for model in pair.both():
        state = model.state_dict()
        before = state["1.0.weight"].clone()
        model[1][0].weight.data = torch.zeros(WIDTH, WIDTH, device="cuda")
        assert torch.equal(state["1.0.weight"], before)
    assert pair.same()


class Tied(nn.Module):
    """One parameter in two places, and another one over the same memory."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(square() for _ in range(4))
        self.parts[1].weight = self.parts[0].weight
        self.parts[2].weight = nn.Parameter(self.parts[0].weight.data)

    def forward(self, h):
        for part in self.parts:
            h = part(h)
        return h


@torch.no_grad()
def test_tied_weights_are_exchanged_together_and_those_of_the_same_memory_are_not(either_room):
    pair = Pair(either_room, around(Tied()), no_course="units share weights")
    values = torch.randn(WIDTH, WIDTH, device="cuda") / 20
    for model in pair.both():
        a, b, c, _ = (part.weight for part in model[2].parts)
        old = c.clone()
        b.data = values.clone()
        assert a is b and torch.equal(a, values) and torch.equal(c, old)
    assert pair.same()
    for model in pair.both():
        a, b, c, _ = (part.weight for part in model[2].parts)
        c.data = a.data
        a.mul_(1.5)
        assert torch.equal(a, c)
    assert pair.same()


@torch.no_grad()
def test_an_assignment_to_data_in_a_hook_before_the_pass_is_seen(either_room):
    pair = Pair(either_room, layers(5))

    def exchange(module, args):
        module.weight.data = module.weight.data.flip(0)

    for model in pair.both():
        model[3][0].register_forward_pre_hook(exchange)
    for _ in range(3):
        assert torch.equal(pair.model(pair.inputs), pair.plain(pair.inputs))


@torch.no_grad()
def test_a_weight_that_was_assigned_to_data_is_pinned(free_room):
    model = layers(6)
    free_room.offload(model, 8 * MIB)
    model(x())
    for p in weights(model).values():
        p.data = torch.randn(WIDTH, WIDTH, device="cuda")
    model(x())
    mover = inside(model).mover
    assert all(mover.pinned(p._piece.source) is not None for p in weights(model).values())


def test_a_weight_that_is_emptied_and_filled_again(free_room):
    pair = Pair(free_room, layers(3))
    values = torch.randn(WIDTH, WIDTH, device="cuda") / 20
    for model in pair.both():
        model[1][0].weight.data = torch.empty(0, device="cuda")
        assert model[1][0].weight.shape == (0,)
        model[1][0].weight.data = values.clone()
    assert pair.same()


def test_a_weight_takes_the_values_of_what_is_assigned_to_its_data(free_room):
    model = layers(3)
    free_room.offload(model)
    values = torch.zeros(WIDTH, WIDTH, device="cuda")
    model[1][0].weight.data = values
    values.fill_(3)
    assert not model[1][0].weight.any()


@pytest.mark.two_cards
def test_a_weight_takes_the_values_of_one_of_another_card(free_room):
    """A plain one would go there."""
    pair, other = Pair(free_room, layers(3)), layers(3)
    ebbtide.offload(other, "cuda:1")
    for model in pair.both():
        model[1][0].weight.data = other[1][0].weight.data.to(model[1][0].weight.device)
    pair.model[2][0].weight.data = other[2][0].weight.data
    pair.plain[2][0].weight.data = other[2][0].weight.data.to("cuda:0")
    assert {p.device.index for p in pair.model.parameters()} == {0}
    assert pair.same()


def test_data_of_every_kind(free_room):
    pair = Pair(free_room, around(Complex()))
    values = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.complex64) / 20
    new = {
        "transposed": lambda p: values.t(),
        "conjugate": lambda p: values.conj(),
        "on the host": lambda p: values.to(p.device if p.device != values.device else "cpu"),
        "a part of a larger one": lambda p: torch.cat([values, values])[5 : WIDTH + 5],
    }
    for how, make in new.items():
        for model in pair.both():
            p = model[2].weight
            made = make(p)
            p.data = made.cuda() if model is pair.plain else made
            assert torch.equal(p.detach().resolve_conj(), made.cuda().resolve_conj()), how
        assert pair.same()
    with torch.inference_mode():
        for model in pair.both():
            model[2].weight.data = values * 2
    assert pair.same()


# ---- exchanged as a whole -----------------------------------------------------------------------


@pytest.fixture
def swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@torch.no_grad()
def test_another_dtype_where_parameters_are_swapped(room, swaps):
    pair = Pair(room, layers(6), more=24 * MIB)
    for dtype in (torch.float16, torch.float64, torch.float32):
        for model in pair.both():
            model.to(dtype)
        assert {p.dtype for p in pair.model.parameters()} == {dtype}
        assert pair.same()


@pytest.mark.parametrize("assign", [False, True])
@torch.no_grad()
def test_loading_a_state_dict_where_parameters_are_swapped(either_room, swaps, assign):
    pair = Pair(either_room, layers(4), more=12 * MIB)
    state = {name: torch.randn_like(t) / 20 for name, t in pair.plain.state_dict().items()}
    for model in pair.both():
        model.load_state_dict({n: t.clone() for n, t in state.items()}, assign=assign)
    assert pair.same()


@torch.no_grad()
def test_weights_that_are_swapped_by_hand(either_room):
    pair = Pair(either_room, layers(4))
    for model in pair.both():
        torch.utils.swap_tensors(model[1][0].weight, model[3][0].weight)
    assert pair.same()
    values = torch.randn(WIDTH, WIDTH, device="cuda") / 20
    for model in pair.both():
        torch.utils.swap_tensors(model[2][0].weight, nn.Parameter(values.clone()))
    assert pair.same()


# ---- copies, and the thing itself ---------------------------------------------------------------


@torch.no_grad()
def test_a_shallow_copy_of_a_weight_looks_at_the_same_memory(free_room):
    pair = Pair(free_room, layers(3))
    copies = []
    for model in pair.both():
        p = model[1][0].weight
        p.requires_grad_(False)
        p.note = ["said"]
        q, part = copy.copy(p), copy.copy(p[2:4])
        assert q is not p and isinstance(q, nn.Parameter) and not isinstance(part, nn.Parameter)
        assert q.requires_grad is False and q.note is p.note and q.data_ptr() == p.data_ptr()
        q.add_(1)
        part.mul_(2)
        copies.append((q, part))
    assert all(equal(a, b) for a, b in zip(*copies, strict=True))
    assert pair.same()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, h):
        return h @ self.table


def test_a_state_dict_of_variables_has_the_parameters_themselves(either_room):
    pair = Pair(either_room, around(Table()))
    for model in pair.both():
        state = model.state_dict(keep_vars=True)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert set(state) == set(named)
        assert all(state[name] is named[name] for name in named)
        with torch.no_grad():
            for p in state.values():
                p.mul_(1.5)
    assert pair.same()


class Kind(torch.Tensor):
    """A tensor that is more than its memory, or may be."""


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.a.weight = self.b.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).as_subclass(Kind))

    def forward(self, h):
        return self.b(self.a(h)).as_subclass(torch.Tensor)


def test_tied_weights_that_are_more_than_their_memory_stay_tied(either_room):
    made = []
    for _ in range(2):  # PyTorch does not copy such ones
        torch.manual_seed(1)
        made.append(around(Kinds()))
    model, plain = made[0], made[1].cuda()
    with pytest.warns(UserWarning, match="cannot page"):
        either_room.offload(model, 8 * MIB)
    for each in (model, plain):
        weight = each[2].a.weight
        assert weight is each[2].b.weight and weight.is_cuda
        assert isinstance(weight, Kind) and isinstance(weight, nn.Parameter)
        with torch.no_grad():
            weight.mul_(2)
    inputs = x()
    with torch.no_grad():
        assert all(torch.equal(model(inputs), plain(inputs)) for _ in range(3))


# ---- inference mode -----------------------------------------------------------------------------


class Head(nn.Module):
    """Reads a weight outside of its unit, in another dtype."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, WIDTH)
        self.body = layers(4)

    def forward(self, h):
        return nn.functional.linear(self.body(h).bfloat16(), self.table.weight.to(torch.bfloat16))


READS = {
    "contiguous": lambda w: w.t().contiguous(),
    "reshape": lambda w: w.t().reshape(-1),
    "flatten": lambda w: w.t().flatten(),
    "half": lambda w: w.half(),
    "to": lambda w: w.to(torch.float64),
    "to cpu": lambda w: w.to("cpu"),
    "to itself": lambda w: w.to("cuda"),
    "matmul": lambda w: w @ w.t(),
    "chunk": lambda w: torch.cat(w.chunk(3)[::-1]),
    "clone": lambda w: w.clone(),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", READS)
def test_weights_are_read_in_every_mode(free_room, mode, how):
    pair = Pair(free_room, layers(3))
    with mode():
        ours, plain = (READS[how](model[1][0].weight) for model in pair.both())
    assert equal(ours, plain)


def test_weights_read_outside_of_their_unit_in_inference_mode(room):
    model, inputs = Head(), x()
    plain = copy.deepcopy(model).cuda()
    room.offload(model, 30 * MIB)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(model(inputs), plain(inputs))
        for each in (model, plain):
            each.cuda().half()
        for _ in range(3):
            assert torch.equal(model(inputs.half()), plain(inputs.half()))
    assert torch.equal(model.table.weight.cpu(), plain.table.weight.cpu())


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_what_wants_a_gradient_says_so_while_it_is_used(room, grad):
    """PyTorch's operators choose their kernels by it."""
    model = nn.Transformer(WIDTH, 8, 1, 1, WIDTH, batch_first=True).eval()
    inputs = torch.randn(2, 3, WIDTH, device="cuda")
    plain = copy.deepcopy(model).cuda()
    room.offload(model, 60 * MIB)
    with torch.set_grad_enabled(grad):
        for wanted in (True, False, True):
            for each in (model, plain):
                each.requires_grad_(wanted)
            for _ in range(3):
                assert torch.equal(model(inputs, inputs), plain(inputs, inputs))


# ---- weights of two models ----------------------------------------------------------------------


def test_a_weight_of_two_models(room):
    """Both see what is written to it, and one goes on when the other is restored or gone."""
    one, other = layers(4), layers(4)
    other[2][0].weight = one[1][0].weight
    plain = [copy.deepcopy(m).cuda() for m in (one, other)]
    inputs = x()
    handle = room.offload(one, 30 * MIB)
    room.offload(other, 60 * MIB)

    def same(*models):
        return all(torch.equal(m(inputs), p(inputs)) for m, p in models for _ in range(3))

    with torch.no_grad():
        both = [(one, plain[0]), (other, plain[1])]
        assert same(*both)
        one[1][0].weight.mul_(2)
        plain[0][1][0].weight.mul_(2)
        plain[1][2][0].weight.mul_(2)
        assert same(*both)
        handle.restore()
        assert all(type(p) is nn.Parameter for p in one.parameters())
        assert same((other, plain[1])) and same((one.cuda(), plain[0]))
        assert all(type(p) is nn.Parameter for p in one.parameters())
        other[2][0].weight.fill_(0.01)
        plain[1][2][0].weight.fill_(0.01)
        assert same((other, plain[1]))


# ---- attributes of weights ----------------------------------------------------------------------


class Scaled(nn.Module):
    """As quantizers have it: what belongs to a weight is an attribute of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)
        self.weight.scale, self.weight.times = 1.0, 0
        self.register_buffer("table", torch.randn(WIDTH, WIDTH) / 20)
        self.table.factor = 0.5

    def forward(self, h):
        self.weight.times += 1
        h = h @ self.weight * self.weight.scale * self.weight.times
        return h @ self.table * self.table.factor


@torch.no_grad()
def test_attributes_of_weights_are_theirs_in_use_and_at_rest(room):
    model = around(Scaled())
    plain = around(Scaled()).cuda()
    plain.load_state_dict(model.state_dict())
    for part in (plain[2], model[2]):
        part.weight.scale, part.weight.times, part.table.factor = 1.0, 0, 0.5
    inputs = x()
    handle = room.offload(model)
    for scale in (1.0, 1.0, 2.0, 3.0, 3.0):
        for part in (plain[2], model[2]):
            part.weight.scale, part.table.factor = scale, scale / 4
        assert torch.equal(model(inputs), plain(inputs))
        assert model[2].weight.times == plain[2].weight.times
    handle.pin(model[2])  # planned anew
    for part in (plain[2], model[2]):
        part.weight.fresh = [1]
        part.weight.times -= 3
        del part.weight.scale
        part.weight.scale = 0.25
    for _ in range(3):
        assert torch.equal(model(inputs), plain(inputs))
    assert model[2].weight.fresh == [1]
    weight, table = handle.restore()[2].weight, model[2].table
    assert (weight.scale, weight.times) == (0.25, plain[2].weight.times)
    assert table.factor == plain[2].table.factor == 0.75


@torch.no_grad()
def test_a_weight_in_use_is_copied_with_its_attributes(free_room):
    class Copies(Scaled):
        def forward(self, h):
            made = copy.deepcopy(self.table)
            return h @ made * made.factor

    model = nn.Sequential(Copies())
    plain = copy.deepcopy(model).cuda()
    plain[0].table.factor, plain[0].weight.scale, plain[0].weight.times = 0.5, 1.0, 0
    free_room.offload(model, more=24 * MIB)
    inputs = x()
    for _ in range(3):
        assert torch.equal(model(inputs), plain(inputs))
