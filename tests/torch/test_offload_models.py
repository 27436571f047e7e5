"""offload(): other people's models, unchanged, and torch.compile()."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import ebbtide

os.environ["HF_HUB_OFFLINE"] = "1"

MIB = 1 << 20
WIDTH = 512


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Models of a few MiB have several units."""
    monkeypatch.setattr("ebbtide._offload.units.MIB", 128 << 10)


def llama(transformers, **options):
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(transformers):
    config = transformers.GPT2Config(
        n_embd=192,
        n_layer=4,
        n_head=4,
        n_positions=128,
        vocab_size=200,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def tied_llama(transformers):
    return llama(transformers, tie_word_embeddings=True)


@pytest.mark.parametrize("build", [llama, gpt2, tied_llama])
def test_a_language_model_generates_the_same_words(room, build):
    model = build(pytest.importorskip("transformers")).eval()
    words = torch.randint(3, 200, (2, 7)).cuda()

    def generate(m):
        return m.generate(words, max_new_tokens=8, do_sample=False)

    plain = copy.deepcopy(model).cuda()
    expected = generate(plain)
    with torch.no_grad():
        logits = plain(words).logits
    del plain
    handle = room.offload(model)
    for _ in range(2):
        assert torch.equal(generate(model), expected)
    with torch.no_grad():
        assert torch.equal(model(words).logits, logits)
    assert handle.stats()["units"] > 4
    assert model.device.type == "cuda"
    if room.how == "little":
        assert handle.stats()["streamed"] > 0


def test_a_language_model_saves_what_it_has(free_room, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = llama(transformers).eval()
    words = torch.randint(3, 200, (1, 5)).cuda()
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(words).logits
        free_room.offload(model)
        model(words)
        model.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).cuda()
        assert torch.equal(again(words).logits, expected)
        del again
        handle = ebbtide.offload(transformers.LlamaForCausalLM.from_pretrained(tmp_path))
    assert "gone" in repr(handle)


def test_a_vision_transformer_sees_the_same(room):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10).eval()
    room.same(model, torch.randn(1, 3, 32, 32), passes=3)


def test_a_resnet_sees_the_same(room):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10).eval()
    room.same(model, torch.randn(1, 3, 32, 32), passes=3, more=40 * MIB)


def test_a_resnet_in_training_keeps_its_statistics(free_room):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10).train()
    free_room.same(model, torch.randn(2, 3, 32, 32), passes=3)


def layers(count=6):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)))


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of what it does not compile
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_gives_the_same(free_room, when):
    room = free_room
    room.how = "little" if when == "before" else "all"  # one is enough: compiling takes its time
    model = layers(3)
    inputs = torch.randn(1, WIDTH, device="cuda")
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        expected = plain(inputs)
        del plain
        if when == "before":
            compiled = torch.compile(model, backend="aot_eager")
            room.offload(model)
        else:
            room.offload(model)
            model(inputs)
            compiled = torch.compile(model, backend="aot_eager")
        for _ in range(4):
            assert torch.equal(compiled(inputs), expected)
        del compiled
        torch._dynamo.reset()
        assert torch.equal(model(inputs), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_offloaded(free_room):
    model = layers(3)
    inputs = torch.randn(1, WIDTH, device="cuda")
    with torch.no_grad():
        plain = copy.deepcopy(model).cuda()
        expected = plain(inputs)
        del plain
        compiled = torch.compile(model, backend="aot_eager")
        free_room.offload(compiled)
        for _ in range(3):
            assert torch.equal(compiled(inputs), expected)
    del compiled
    torch._dynamo.reset()
