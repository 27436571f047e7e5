"""What the CPU computes, the simulated GPU computes, to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = [{"foreach": True}, {"fused": True}, {"foreach": False}]


def train(device, model, batches, loss, optimizer, steps=10):
    """The losses and the parameters after some steps of AdamW."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    losses = []
    for step in range(steps):
        x, y = (t.to(device) for t in batches[step % len(batches)])
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))


def agrees(model, batches, loss, optimizer):
    return same(
        train("cpu", model, batches, loss, optimizer),
        train("cuda", model, batches, loss, optimizer),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 100)

    def forward(self, x):
        return self.head(self.layers(self.embed(x))).flatten(0, 1)


def cross_entropy(x, y):
    return F.cross_entropy(x, y.flatten())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_transformer_trains_as_on_the_cpu(optimizer):
    batches = [(torch.randint(100, (4, 16)), torch.randint(100, (4, 16))) for _ in range(3)]
    assert agrees(Transformer(), batches, cross_entropy, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_convolutions_and_batch_norm_train_as_on_the_cpu(optimizer):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(3)]
    assert agrees(model, batches, cross_entropy, optimizer)


class Recurrent(nn.Module):
    def __init__(self, cell, **options):
        super().__init__()
        self.cell = cell(8, 16, 2, batch_first=True, **options)
        self.head = nn.LazyLinear(5)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_trains_as_on_the_cpu(cell, optimizer):
    assert torch.backends.cudnn.enabled
    model = Recurrent(cell)
    batches = [(torch.randn(4, 7, 8), torch.randint(5, (4,))) for _ in range(3)]
    model(batches[0][0])
    assert agrees(model, batches, cross_entropy, optimizer)


@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"bias": False}, {"proj_size": 5}], ids=str
)
def test_a_recurrent_network_takes_packed_sequences(options):
    network = nn.LSTM(8, 16, 2, **options)
    there = copy.deepcopy(network).cuda()
    packed = pack_padded_sequence(torch.randn(7, 4, 8), [7, 5, 3, 2])
    expected = pad_packed_sequence(network(packed)[0])[0]
    got = pad_packed_sequence(there(packed.to("cuda"))[0])[0]
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_is_the_cpus(dtype, causal):
    def run(device):
        q, k, v = (
            torch.randn(2, 4, 64, 32, dtype=dtype, generator=torch.Generator().manual_seed(i))
            .to(device)
            .requires_grad_()
            for i in range(3)
        )
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        output.float().pow(2).sum().backward()
        return [t.detach().cpu() for t in (output, q.grad, k.grad, v.grad)]

    assert all(torch.equal(a, b) for a, b in zip(run("cuda"), run("cpu"), strict=True))


def test_fused_attention_keeps_no_matrix_of_scores():
    q = torch.randn(1, 8, 1024, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    F.scaled_dot_product_attention(q, q, q)
    assert torch.cuda.max_memory_allocated() - before < 8 * 1024 * 1024  # not 8 heads' squares


def test_a_training_step_in_a_graph_is_the_same_step():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(6)]

    def plain():
        network = copy.deepcopy(model)
        optimizer = torch.optim.SGD(network.parameters(), 1e-2)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in network.parameters()]

    def graphed():
        network = copy.deepcopy(model).cuda()
        optimizer = torch.optim.SGD(network.parameters(), 1e-2)
        x, y = (t.cuda() for t in batches[0])
        start = copy.deepcopy(network.state_dict())

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            return loss

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        network.load_state_dict(start)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        losses = []
        for a, b in batches:
            x.copy_(a)
            y.copy_(b)
            graph.replay()
            losses.append(loss.item())
        return losses, [p.detach().cpu() for p in network.parameters()]

    assert same(graphed(), plain())


def test_a_capture_changes_nothing_and_a_launch_does():
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = x * 2
        noise = torch.rand(4, device="cuda")
    assert x.tolist() == [0] * 4
    graph.replay()
    first = noise.tolist()
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([2] * 4, [4] * 4)
    assert noise.tolist() != first


def test_autocast_and_a_scaler():
    model = nn.Linear(16, 16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(torch.randn(4, 16, device="cuda"))
        assert output.dtype == torch.float16
    scaler.scale(output.float().pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)


def test_checkpointing_draws_the_same_dropout_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    x = torch.randn(4, 8, device="cuda", requires_grad=True)

    def run(function):
        torch.manual_seed(3)
        x.grad = None
        output = function(x)
        output.sum().backward()
        return output.detach().cpu(), x.grad.cpu()

    plain = run(model)
    checkpointed = run(lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert (plain[0] == 0).any()


def test_compiled_with_aot_eager():
    model, x = nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda")
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


def test_inference_mode_views_in_place_and_out():
    with torch.inference_mode():
        here = torch.randn(4, 6)
        there = here.cuda()
        for x in (here, there):
            x.t()[1:3].add_(1)
            x[:, ::2] *= 2
        assert torch.equal(there.cpu(), here)
        out = torch.empty(4, 4, device="cuda")
        assert torch.mm(there, there.t(), out=out) is out
        assert torch.equal(out.cpu(), here @ here.t())


def test_a_kernel_that_was_not_redirected_is_an_error_that_names_it():
    with pytest.raises(Exception, match="simulated GPU"):
        torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(
            torch.ones(3, device="cuda")
        )
