"""Other people's models: torchvision, timm and transformers, unchanged. And two processes on two
cards."""

import copy
import os
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"


def test_a_resnet_trains_as_on_the_cpu():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    batches = [(torch.randn(2, 3, 64, 64), torch.randint(10, (2,))) for _ in range(2)]

    def train(device):
        network = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
        losses = []
        for step in range(10):
            x, y = (t.to(device) for t in batches[step % 2])
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().cpu() for p in network.parameters()]

    here, there = train("cpu"), train("cuda")
    assert here[0] == there[0]
    assert all(torch.equal(a, b) for a, b in zip(here[1], there[1], strict=True))


def llama(transformers):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(transformers):
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=100,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_language_model_generates_as_on_the_cpu(build):
    model = build(pytest.importorskip("transformers")).eval()
    words = torch.randint(3, 100, (2, 7))
    expected = model.generate(words, max_new_tokens=12, do_sample=False)
    got = model.cuda().generate(words.cuda(), max_new_tokens=12, do_sample=False)
    assert torch.equal(got.cpu(), expected)


def test_a_vision_transformer_sees_as_on_the_cpu():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(model.cuda()(x.cuda()).cpu(), expected)


# ---- several processes ---------------------------------------------------------------------------


def distributed(rank, kind, device, store, results):
    import torch.distributed as dist

    import ebbtide.sim as sim

    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(place)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(3):
        dice = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 16, generator=dice), torch.randint(4, (8,), generator=dice)
        part = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[part].to(place)), y[part].to(place))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    full = [p.full_tensor() if kind == "fsdp2" else p for p in model.parameters()]
    hazards = [h.text for h in sim.hazards()] if device == "cuda" else []
    results.put((rank, losses, [p.detach().cpu().tolist() for p in full], hazards))
    dist.barrier()
    dist.destroy_process_group()


def collect(results, processes):
    """One answer of each process. If one dies, the others are ended: they would wait for it."""
    answers = []
    while len(answers) < len(processes):
        if not results.empty():
            answers.append(results.get())
        elif any(p.exitcode not in (None, 0) for p in processes):
            for process in processes:
                process.terminate()
            pytest.fail(f"a process ended with {[p.exitcode for p in processes]}")
        else:
            time.sleep(0.02)
    return sorted(answers)


def test_a_process_that_dies_fails_at_once():
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    processes = [context.Process(target=os._exit, args=(3,))]
    processes[0].start()
    with pytest.raises(pytest.fail.Exception, match="ended with"):
        collect(context.SimpleQueue(), processes)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_on_two_cards_as_on_the_cpu(kind, tmp_path):
    import torch.multiprocessing as mp

    if kind == "fsdp2" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.xfail("this PyTorch's FSDP2 cannot run on the CPU: there is nothing to compare with")
    context = mp.get_context("spawn")

    def run(device):
        results = context.SimpleQueue()
        arguments = (kind, device, tmp_path / device, results)
        processes = [
            context.Process(target=distributed, args=(rank, *arguments)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        answers = collect(results, processes)
        for process in processes:
            process.join()
            assert process.exitcode == 0
        return answers

    here, there = run("cpu"), run("cuda")
    assert [a[1:3] for a in there] == [a[1:3] for a in here]
    assert [a[3] for a in there] == [[], []]
