"""offload(): weights between passes. They report the GPU; reading gives their values, writing
reaches them, and whatever else is done to a model is done to it."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle

import pytest
import torch
from offloaded import MIB, WIDTH, inside, layers, settles, x
from torch import nn

import ebbtide
from ebbtide._offload import host


class Pair:
    """An offloaded model, and the same one as a plain model on the GPU."""

    def __init__(self, room, model=None, passes=2, more=4 * MIB):
        self.model = layers(6) if model is None else model
        self.plain = copy.deepcopy(self.model).cuda()
        self.inputs = x()
        self.handle, self.little = room.offload(self.model, more), room.how == "little"
        self.same(passes)

    def both(self):
        return self.model, self.plain

    def same(self, passes=3):
        with torch.no_grad():
            expected = self.plain(self.inputs)
            for _ in range(passes):
                assert torch.equal(self.model(self.inputs), expected)
            if self.little and passes > 1 and "forward" in self.model.__dict__:
                assert settles(self.model, lambda: torch.equal(self.model(self.inputs), expected))
        return True


# ---- reading and writing ------------------------------------------------------------------------


def test_a_weight_reports_the_gpu_and_reads_as_it_is(free_room):
    pair = Pair(free_room)
    p, q = (m[2][0].weight for m in pair.both())
    assert (p.device, p.shape, p.dtype, p.stride()) == (q.device, q.shape, q.dtype, q.stride())
    assert p.is_cuda and p.is_leaf and p.requires_grad and isinstance(p, nn.Parameter)
    assert p.numel() == q.numel() and p.nbytes == q.nbytes and p.is_contiguous()
    with torch.no_grad():
        assert torch.equal(p, q) and torch.equal(p.cpu(), q.cpu())
        assert torch.equal(p[3], q[3]) and torch.equal(p.t(), q.t())
        assert torch.equal(p + 1, q + 1) and p[5, 6].item() == q[5, 6].item()
        assert torch.equal(p.clone(), q) and p.clone().data_ptr()
        assert torch.equal(p.to(torch.float16), q.half())
        assert torch.equal(p.detach().view(-1)[7:9], q.view(-1)[7:9])
        assert torch.equal(torch.cat([p, q]), torch.cat([q, q]))
        assert p[:2, :2].tolist() == q[:2, :2].tolist()
        assert torch.equal(p.chunk(2)[1], q.chunk(2)[1])
        assert "Parameter" in repr(p)
    assert p.detach().norm() == q.detach().norm()
    assert torch.equal(torch.from_numpy(p.detach().cpu().numpy()), q.detach().cpu())


def test_what_a_weight_has_not_raises(free_room):
    pair = Pair(free_room)
    p = pair.model[0][0].weight
    for ask in (
        lambda: int(p.data_ptr()),
        lambda: hex(p.detach().data_ptr()),
        lambda: p[1].data_ptr() + 4,
        lambda: p.untyped_storage().data_ptr(),
        lambda: p.storage().data_ptr(),
        lambda: ctypes.c_void_p(p.data.data_ptr()),
        lambda: p.__cuda_array_interface__,
        lambda: torch.from_dlpack(p.detach()),
        lambda: torch.utils.dlpack.to_dlpack(p.detach()),  # C++ asks no method of a subclass
        lambda: torch.utils.dlpack.to_dlpack(p.detach()[1:]),
        lambda: torch.Tensor.data_ptr(p),
        lambda: p.detach().numpy(),
        lambda: p.pin_memory(),
        lambda: p.share_memory_(),
        lambda: p.detach().resize_(3),
        lambda: p.detach().set_(torch.zeros(2, device="cuda")),
    ):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError, AttributeError)):
            ask()
    assert pair.same()


def test_weights_that_are_tied_are_known_by_their_addresses(free_room):
    model = layers(6)
    model[4][0].weight = model[1][0].weight
    pair = Pair(free_room, model)
    for each in pair.both():
        where = [part[0].weight.data_ptr() for part in each]
        assert where[4] == where[1] and len(set(where)) == 5 and 0 not in where
        p = each[1][0].weight
        assert p.data.data_ptr() == p[0].data_ptr() == p.t().data_ptr() != p[1].data_ptr()
        assert p[1].data_ptr() == p.view(-1)[WIDTH:].data_ptr()


WRITES = {
    "copy_": lambda p, v: p.copy_(v),
    "copy_ from the host": lambda p, v: p.copy_(v.cpu()),
    "fill_": lambda p, v: p.fill_(0.25),
    "mul_": lambda p, v: p.mul_(1.5),
    "add_": lambda p, v: p.add_(v, alpha=0.5),
    "out": lambda p, v: torch.add(v, 1, out=p),
    "data": lambda p, v: setattr(p, "data", v),
    "data in place": lambda p, v: p.data.mul_(2),
    "data item": lambda p, v: p.data.__setitem__((0, 1), 3.0),
    "data rows": lambda p, v: p.data.__setitem__(slice(2, 9), v[2:9]),
    "item": lambda p, v: p.__setitem__(3, 7.0),
    "mask": lambda p, v: p.__setitem__(v > 0, 1.0),
    "view": lambda p, v: p.view(-1)[10:2000].copy_(v.view(-1)[:1990]),
    "transposed": lambda p, v: p.t()[5].zero_(),
    "chunks": lambda p, v: p.chunk(2)[1].add_(1),
    "detached": lambda p, v: p.detach().clamp_(min=0),
    "diagonal": lambda p, v: p.diagonal().fill_(2),
    "foreach": lambda p, v: torch._foreach_mul_([p], 0.5),
    "addcmul_": lambda p, v: p.addcmul_(v, v),
    "lerp_": lambda p, v: p.lerp_(v, 0.5),
    "index_add_": lambda p, v: p.index_add_(0, torch.tensor([1, 4], device=p.device), v[:2]),
    "zeros": lambda p, v: nn.init.zeros_(p),
    "eye": lambda p, v: nn.init.eye_(p),
    "swap with itself": lambda p, v: p.data.copy_(p.data.flip(0).clone()),
}


@pytest.mark.parametrize("how", WRITES)
def test_writing_reaches_the_weight(free_room, how):
    pair = Pair(free_room, layers(3), passes=3)
    values = torch.randn(WIDTH, WIDTH, device="cuda")
    with torch.no_grad():
        for model in pair.both():
            WRITES[how](model[1][0].weight, values)
    assert torch.equal(pair.model[1][0].weight, pair.plain[1][0].weight)
    assert pair.same()


def test_writing_where_weights_are_streamed(room):
    pair = Pair(room, passes=3)
    for how in ("copy_", "data rows", "view", "foreach"):
        values = torch.randn(WIDTH, WIDTH, device="cuda")
        with torch.no_grad():
            for model in pair.both():
                for i in (1, 5):
                    WRITES[how](model[i][0].weight, values)
                    model[i][0].bias.add_(0.5)
        assert pair.same(2)


def test_an_initialisation_gives_the_same_values(free_room):
    pair = Pair(free_room)
    for init in (nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_):
        for model in pair.both():
            torch.manual_seed(3)
            init(model[1][0].weight)
        assert pair.same()
    for model in pair.both():
        torch.manual_seed(4)
        model[2][0].reset_parameters()
    assert pair.same()


def test_an_optimizer_that_is_given_gradients_updates_the_weights(free_room):
    pair = Pair(free_room, layers(3))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        grads = [torch.randn_like(p) for p in pair.plain.parameters()]
        for model in pair.both():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad.clone()
            # Several at once would be others, and rounded otherwise: not all are plain tensors.
            kind(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False).step()
            model.zero_grad()
        assert pair.same()


def test_a_write_in_a_hook_before_the_pass_is_seen(room):
    pair = Pair(room, passes=3)

    def scale(module, args):
        with torch.no_grad():
            module.weight.mul_(1.25)

    for model in pair.both():
        model[4][0].register_forward_pre_hook(scale)
    for _ in range(3):
        assert pair.same(1)


# ---- state --------------------------------------------------------------------------------------


def test_a_state_dict_has_plain_tensors(room):
    pair = Pair(room)
    state = pair.model.state_dict()
    plain = pair.plain.state_dict()
    assert list(state) == list(plain)
    for name, tensor in state.items():
        kept = tensor.nbytes <= 64 << 10  # biases stay on the GPU
        assert type(tensor) is torch.Tensor and tensor.device.type == ("cuda" if kept else "cpu")
        assert torch.equal(tensor.cpu(), plain[name].cpu())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert all(torch.equal(again[name].cpu(), plain[name].cpu()) for name in plain)
    other = layers(6)
    other.load_state_dict(state)
    assert pair.same()
    part = pair.model[2].state_dict(prefix="part.")
    assert torch.equal(part["part.0.weight"], plain["2.0.weight"].cpu())
    assert all(isinstance(t, torch.Tensor) for t in pair.model.state_dict(keep_vars=True).values())


def test_writing_to_a_state_dict_writes_the_weight_as_ever(room):
    """Also right after a pass, which the GPU is still busy with: that has what was before."""
    pair = Pair(room, layers(16))
    for how in ("held", "held", "just asked for"):
        states = [model.state_dict() for model in pair.both()] if how == "held" else []
        for factor in (0.5, 2):
            with torch.no_grad():
                results = [model(pair.inputs) for model in pair.both()]
            for state in states or [model.state_dict() for model in pair.both()]:
                for number in range(16):
                    state[f"{number}.0.weight"].mul_(factor)
                    state[f"{number}.0.bias"][5] = 9
            state = None
            assert torch.equal(*results)
        del states
        assert pair.same()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_loading_a_state_dict(room, assign, where):
    pair = Pair(room, passes=3, more=12 * MIB)
    for _ in range(2):
        state = {name: torch.randn_like(t) for name, t in pair.plain.state_dict().items()}
        pair.plain.load_state_dict(state)
        given = {name: t.to(where, copy=True) for name, t in state.items()}
        pair.model.load_state_dict(given, assign=assign)
        del given
        assert pair.same()
    with pytest.raises(RuntimeError, match="size mismatch"):
        pair.model.load_state_dict({"0.0.weight": torch.zeros(2, 2)}, strict=False)
    assert pair.same()


def test_pickling_is_refused(free_room):
    pair = Pair(free_room)
    for what in (pair.model, pair.model[1], pair.handle):
        with pytest.raises(TypeError, match="cannot be pickled: save its"):
            pickle.dumps(what)
    with pytest.raises(TypeError, match="cannot be pickled: save its"):
        torch.save(pair.model, io.BytesIO())
    # A weight alone goes by its values.
    again = pickle.loads(pickle.dumps(pair.model[1][0].weight))
    assert torch.equal(again.cpu(), pair.plain[1][0].weight.cpu())


# ---- moving and copying -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cuda", "to cuda", "to cuda:0", "requires_grad_", "eval", "float"])
def test_what_is_true_already_changes_nothing(room, how):
    pair = Pair(room, passes=3)
    model = pair.model
    {
        "cuda": model.cuda,
        "to cuda": lambda: model.to("cuda"),
        "to cuda:0": lambda: model.to(torch.device("cuda", 0)),
        "requires_grad_": lambda: model.requires_grad_(False),
        "eval": model.eval,
        "float": model.float,
    }[how]()
    assert pair.same()
    assert pair.handle.stats()["bytes"] >= 6 * MIB


@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "to dtype"])
def test_another_dtype(room, how):
    pair = Pair(room, layers(4), passes=3, more=24 * MIB)
    for model in pair.both():
        model.to(torch.float16) if how == "to dtype" else getattr(model, how)()
    pair.inputs = pair.inputs.to(pair.plain[0][0].weight.dtype)
    assert pair.model[0][0].weight.dtype == pair.plain[0][0].weight.dtype
    assert pair.same()
    for model in pair.both():
        model.float()
    pair.inputs = pair.inputs.float()
    assert pair.same()


def test_on_the_cpu_it_is_a_plain_model(room):
    pair = Pair(room, passes=3)
    pair.model[0].cpu()  # a part of it stays with the others,
    assert pair.model[0][0].weight.device.type == "cuda"
    assert pair.same()  # and so does its bias, which was a plain tensor, from the next pass on
    assert {p.device.type for p in pair.model.parameters()} == {"cuda"}
    pair.model.cpu()
    assert {(type(p), p.device.type) for p in pair.model.parameters()} == {(nn.Parameter, "cpu")}
    with torch.no_grad():
        assert torch.equal(pair.model(pair.inputs.cpu()), pair.plain.cpu()(pair.inputs.cpu()))
    with pytest.raises(ebbtide.Gone):
        pair.handle.stats()


def test_a_deep_copy_is_independent(room):
    pair = Pair(room, passes=3, more=24 * MIB)
    copied = copy.deepcopy(pair.model)
    part = copy.deepcopy(pair.model[3])
    with torch.no_grad():
        expected = pair.plain(pair.inputs)
        assert torch.equal(copied(pair.inputs), expected)
        assert torch.equal(part(pair.inputs), pair.plain[3](pair.inputs))
        for p in copied.parameters():
            p.zero_()
    assert pair.same()
    copied = copy.deepcopy(pair.model)
    with torch.no_grad():
        for p in pair.model.parameters():
            p.zero_()
        assert torch.equal(copied(pair.inputs), expected)
        del pair.model
        assert torch.equal(copied(pair.inputs), expected)
        ebbtide.offload(copied)
        for _ in range(3):
            assert torch.equal(copied(pair.inputs), expected)


# ---- other weights, other modules ---------------------------------------------------------------


def test_a_parameter_that_is_replaced(room):
    pair = Pair(room, passes=3)
    for where in ("cuda", "cpu"):
        values = torch.randn(WIDTH, WIDTH)
        for model in pair.both():
            device = "cuda" if model is pair.plain else where
            model[2][0].weight = nn.Parameter(values.to(device, copy=True))
        assert pair.same()
        assert pair.model[2][0].weight.is_cuda
    for model in pair.both():
        model[2][0].bias = None
    assert pair.same()


def test_modules_that_are_added_replaced_and_removed(room):
    pair = Pair(room, passes=3)
    new = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for model in pair.both():
        mine = copy.deepcopy(new)
        model[1] = mine[0].cuda() if model is pair.plain else mine[0]
        model.append(mine[1].cuda() if model is pair.plain else mine[1])
    assert pair.same()
    for model in pair.both():
        del model[3]
    assert pair.same()
    for model in pair.both():
        model[0], model[4] = model[4], model[0]
    assert pair.same()


class LoRA(nn.Module):
    """A low-rank change of a layer, written by hand."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, h):
        return self.base(h) + self.up(self.down(h))

    def merge(self):
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base


def adapt(model, device):
    torch.manual_seed(7)
    for part in model:
        part[0] = LoRA(part[0])
        part[0].down.to(device)
        part[0].up.to(device)


@pytest.mark.parametrize("when", ["before", "after", "after, on the host"])
def test_lora_added_and_merged(room, when):
    model = layers(6)
    if when == "before":
        adapt(model, "cpu")
    pair = Pair(room, model, passes=3, more=8 * MIB)
    if when != "before":
        torch.manual_seed(7)
        low = [LoRA(nn.Identity()) for _ in model]
        for each in pair.both():
            for part, given in zip(each, low, strict=True):
                on = "cpu" if "host" in when and each is model else "cuda"
                part[0] = wrapped(part[0], given, on)
    assert pair.same()
    for each in pair.both():
        for part in each:
            part[0] = part[0].merge()
    assert pair.same()


def wrapped(base, given, device):
    made = LoRA(base)
    made.down = copy.deepcopy(given.down).to(device)
    made.up = copy.deepcopy(given.up).to(device)
    return made


def test_a_weight_that_is_shared_afterwards(room):
    pair = Pair(room, passes=3)
    for model in pair.both():
        model[4][0].weight = model[1][0].weight
    assert pair.same()
    with torch.no_grad():
        for model in pair.both():
            model[1][0].weight.mul_(1.1)
    assert pair.same()
    assert pair.model[4][0].weight is pair.model[1][0].weight


def test_a_parametrization_that_is_added_afterwards(room):
    pair = Pair(room, passes=3, more=24 * MIB)
    for model in pair.both():
        with torch.no_grad():
            nn.utils.parametrizations.weight_norm(model[2][0])
    assert pair.same()
    for model in pair.both():
        nn.utils.parametrize.remove_parametrizations(model[2][0], "weight")
    assert pair.same()


# ---- memory of the host -------------------------------------------------------------------------


def test_weights_that_are_pinned_already_are_not_copied(room):
    model = layers(6)
    for p in model.parameters():
        p.data = p.data.pin_memory()
    where = model[3][0].weight.data_ptr()
    pair = Pair(room, model, passes=3)
    assert pair.model.state_dict()["3.0.weight"].data_ptr() == where


@pytest.mark.parametrize("pinned", [False, True])
def test_weights_that_lie_in_one_storage_come_one_by_one(room, pinned):
    """Slices of one large tensor; two that overlap are one weight."""
    model = layers(6)
    flat = torch.empty(len(model) * (MIB // 4 + WIDTH), pin_memory=pinned)
    at = 0
    for p in model.parameters():
        flat[at : at + p.numel()] = p.detach().flatten()
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    model[4][0].weight.data = (
        model[3][0].weight.data.view(-1).as_strided((WIDTH, WIDTH), (1, WIDTH))
    )
    pair = Pair(room, model, passes=4)
    stats = pair.handle.stats()
    assert stats["bytes"] == (len(model) - 1) * MIB
    assert stats["largest_unit"] == MIB
    if pinned:
        where = pair.model.state_dict()["3.0.weight"].data_ptr()
        assert flat.data_ptr() < where < flat.data_ptr() + flat.nbytes
    with torch.no_grad():
        pair.model[3][0].weight.mul_(2)
        pair.plain[3][0].weight.mul_(2)
        pair.plain[4][0].weight.copy_(pair.plain[3][0].weight.t())
    assert pair.same()


def from_file(how, path):
    """A model whose weights are mapped from a file, and its values."""
    values = layers(6).state_dict()
    if how == "torch":
        torch.save(values, path)
        mapped = torch.load(path, mmap=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(values, path)
        mapped = safetensors.load_file(path)
    with torch.device("meta"):
        model = layers(6)
    model.load_state_dict(mapped, assign=True)
    return model, mapped, values


def times_mapped(path):
    return sum(str(path) in line for line in open("/proc/self/maps"))


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_weights_mapped_from_a_file_are_not_copied(room, how, tmp_path):
    path = tmp_path / "weights"
    model, mapped, values = from_file(how, path)
    where = model[3][0].weight.data_ptr()
    pair = Pair(room, model, passes=3)
    assert pair.model.state_dict()["3.0.weight"].data_ptr() == where
    # The GPU reads the file's own pages, at other addresses than the program.
    assert times_mapped(path) >= 2
    assert where not in [g.host for unit in inside(model).units for g in unit.groups]
    # One file or many, a weight is as large as it is.
    assert pair.handle.stats()["bytes"] == len(model) * MIB
    # Written, it is a copy, and the file is as it was.
    with torch.no_grad():
        for each in pair.both():
            each[3][0].weight.mul_(2)
    assert pair.same()
    assert torch.equal(mapped["1.0.weight"], values["1.0.weight"])
    # Nothing of it is left.
    pair.handle.restore()
    del model, mapped, pair, each
    gc.collect()
    assert times_mapped(path) == 0


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_a_mapped_weight_is_written_through_a_view_that_was_given_out(room, how, tmp_path):
    model, mapped, values = from_file(how, tmp_path / "weights")
    pair = Pair(room, model, passes=3)
    view = model.state_dict()["3.0.weight"]
    for by in (2, 3):
        view.mul_(by)  # the program's own pages: the file has other bytes
        with torch.no_grad():
            pair.plain[3][0].weight.mul_(by)
        assert pair.same()
    assert torch.equal(model[3][0].weight.cpu(), pair.plain[3][0].weight.cpu())
    assert torch.equal(mapped["1.0.weight"], values["1.0.weight"])


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_a_mapped_weight_that_has_been_written_before(room, how, tmp_path):
    model, _, values = from_file(how, tmp_path / "weights")
    with torch.no_grad():
        model[3][0].weight[: WIDTH // 2].mul_(2)  # one row might change nothing behind a ReLU
    assert Pair(room, model, passes=3).same()
    assert not torch.equal(model[3][0].weight.cpu(), values["3.0.weight"])
    assert torch.equal(model[2][0].weight.cpu(), values["2.0.weight"])


@pytest.mark.parametrize("how", ["assigned", "loaded"])
def test_a_mapped_tensor_that_is_written_and_put_in_anew(room, how, tmp_path):
    model, mapped, _ = from_file("torch", tmp_path / "weights")
    pair = Pair(room, model, passes=3)
    with torch.no_grad():
        mapped["3.0.weight"].mul_(2)  # an adapter is merged into it, say
        pair.plain[3][0].weight.mul_(2)
    if how == "assigned":
        model[3][0].weight = nn.Parameter(mapped["3.0.weight"])
    else:
        model.load_state_dict(mapped, assign=True)
    assert pair.same(6)


def test_two_storages_of_a_file_that_begin_together(room, tmp_path):
    values, size = torch.randn(2, WIDTH, WIDTH) / 20, WIDTH * WIDTH
    (tmp_path / "weights").write_bytes(values.numpy().tobytes())
    whole = torch.UntypedStorage.from_file(str(tmp_path / "weights"), False, values.nbytes)
    model = layers(2)
    model[0][0].weight = nn.Parameter(
        torch.empty(0).set_(whole[: values.nbytes // 2], 0, (WIDTH, WIDTH))
    )
    model[1][0].weight = nn.Parameter(torch.empty(0).set_(whole, size, (WIDTH, WIDTH)))
    with torch.no_grad():
        model[1][0].weight.mul_(2)
    assert Pair(room, model, passes=4).same()
    assert torch.equal(model[1][0].weight.cpu(), 2 * values[1])


def test_a_file_stays_mapped_until_it_has_been_given_back(free_room, tmp_path, monkeypatch):
    """Another one may come to lie where it was, and would be taken for it."""
    seen, gives = [], host._give_back

    def watched(function, arguments, held):
        if isinstance(held, torch.UntypedStorage):
            seen.append(times_mapped(tmp_path / "weights"))
        gives(function, arguments, held)

    monkeypatch.setattr(host, "_give_back", watched)
    model, mapped, _ = from_file("torch", tmp_path / "weights")
    Pair(free_room, model)
    del mapped
    for layer in model:
        layer[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    model(x())
    gc.collect()
    assert len(seen) == len(model) and min(seen) == 2  # by the program, and for the GPU
    assert times_mapped(tmp_path / "weights") == 0


def test_a_mapped_file_that_has_been_deleted(room, tmp_path):
    model, _, values = from_file("torch", tmp_path / "weights")
    (tmp_path / "weights").unlink()
    assert Pair(room, model, passes=3).same()
    assert torch.equal(model[2][0].weight.cpu(), values["2.0.weight"])
