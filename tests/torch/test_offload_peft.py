"""offload() and PEFT's adapters: whatever is done with them, before or after, an offloaded model
gives what a plain one gives."""

from __future__ import annotations

import copy
import gc
import os

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

os.environ["HF_HUB_OFFLINE"] = "1"

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture
def room(either_room):
    return either_room


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def lora(**options):
    """Not the usual start, at which an adapter changes nothing."""
    given = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.LoraConfig(lora_alpha=32, **given)


def adapted(model, **options):
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora(**options)).eval()


def add(model, name, **options):
    torch.manual_seed(len(name))
    model.add_adapter(name, lora(**options))
    model.set_adapter(name)


class Pair:
    """An offloaded model with an adapter, and the same one as a plain model on the GPU."""

    def __init__(self, room, when="after", tied=False, **options):
        model = llama(tie_word_embeddings=tied)
        self.room = room
        self.words = torch.randint(3, 200, (2, 7)).cuda()
        self.plain = adapted(copy.deepcopy(model).cuda(), **options)
        if when == "before":
            self.model = adapted(model, **options)
            self.handle = room.offload(self.model)
        else:
            self.handle = room.offload(model, MIB)
            self.logits(model)
            self.model = adapted(model, **options)
        self.same(3)

    def both(self):
        return self.model, self.plain

    def logits(self, model):
        with torch.no_grad():
            return model(input_ids=self.words).logits

    def same(self, passes=2):
        """It gives the same, and is the same. What it gives."""
        expected = self.logits(self.plain)
        for _ in range(passes):
            assert torch.equal(self.logits(self.model), expected)
        now, state = self.model.state_dict(), self.plain.state_dict()
        assert list(now) == list(state)
        assert [name for name in now if not torch.equal(now[name].cpu(), state[name].cpu())] == []
        assert self.room.held() <= self.room.limit
        return expected

    def same_words(self):
        made = [m.generate(input_ids=self.words, max_new_tokens=4) for m in self.both()]
        assert torch.equal(*made)

    def pages_well(self):
        """It still comes by units, and none of them is taken for more than it is."""
        stats = self.handle.stats()
        assert stats["one_by_one"] == 0
        assert stats["units"] > 5
        assert (stats["streamed"] > 0) == (self.room.how == "little")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adapter_is_merged_disabled_and_joined_by_others(room, when):
    pair = Pair(room, when)
    first = pair.same()
    pair.same_words()

    for model in pair.both():
        model.merge_adapter()
    pair.same()
    for model in pair.both():
        model.unmerge_adapter()
    pair.same()

    with pair.model.disable_adapter(), pair.plain.disable_adapter():
        assert not torch.equal(pair.same(), first)
        pair.same_words()
    pair.same()

    for model in pair.both():
        add(model, "second", r=4)
    assert not torch.equal(pair.same(), first)
    for model in pair.both():
        model.set_adapter("default")
    pair.same()

    for model in pair.both():
        model.merge_adapter(["default", "second"], safe_merge=True)
    pair.same()
    for model in pair.both():
        model.unmerge_adapter()
        model.add_weighted_adapter(
            ["default", "second"], [0.5, 0.25], "mixed", combination_type="cat"
        )
        model.set_adapter("mixed")
        model.delete_adapter("second")
    pair.same()
    pair.same_words()
    pair.pages_well()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adapter_is_merged_and_taken_off(room, when, tied, tmp_path):
    pair = Pair(room, when, tied)
    first = pair.same(1)
    pair.model, pair.plain = (m.merge_and_unload() for m in pair.both())
    gc.collect()  # whoever wrapped the model is gone
    assert not any("lora" in name for name, _ in pair.model.named_modules())
    assert torch.allclose(pair.same(4), first, atol=1e-3)
    pair.same_words()
    pair.pages_well()
    assert pair.model.config.tie_word_embeddings is tied
    assert (pair.model.lm_head.weight is pair.model.get_input_embeddings().weight) is tied

    pair.model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    state = pair.plain.state_dict()
    assert all(torch.equal(t, state[name].cpu()) for name, t in again.state_dict().items())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_that_was_tied_and_is_no_more(free_room):
    pair = Pair(free_room, tied=True, modules_to_save=["lm_head"], target_modules=["q_proj"])
    for model in pair.both():
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
    pair.same()
    with pytest.warns(UserWarning, match="no longer tied"):
        pair.model = pair.model.merge_and_unload()
    with pytest.warns(UserWarning, match="no longer tied"):
        pair.plain = pair.plain.merge_and_unload()
    pair.same()
    assert pair.model.config.tie_word_embeddings is False


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adapter_is_taken_off_unmerged_and_another_put_on(room, when):
    pair = Pair(room, when)
    pair.model, pair.plain = (m.unload() for m in pair.both())
    gc.collect()
    pair.same()
    pair.model, pair.plain = (adapted(m, r=2) for m in pair.both())
    pair.same()
    pair.pages_well()


def test_an_adapter_is_saved_and_loaded(room, tmp_path):
    pair = Pair(room)
    first = pair.same(1)
    saved = []
    for model, name in zip(pair.both(), ("offloaded", "plain"), strict=True):
        add(model, "second", r=4)
        model.save_pretrained(tmp_path / name)
        saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
        saved.append(load_file(tmp_path / name / "second" / "adapter_model.safetensors"))
    assert [list(s) for s in saved[:2]] == [list(s) for s in saved[2:]]
    for got, expected in zip(saved[:2], saved[2:], strict=True):
        assert all(torch.equal(got[name], expected[name]) for name in expected)

    for model in pair.both():
        model.load_adapter(tmp_path / "offloaded", "loaded")
        model.set_adapter("loaded")
    assert torch.equal(pair.same(), first)
    pair.model, pair.plain = (
        peft.PeftModel.from_pretrained(m.unload(), tmp_path / "plain") for m in pair.both()
    )
    assert torch.equal(pair.same(), first)
    pair.pages_well()


def test_adapters_that_read_the_weights_they_adapt(room):
    """DoRA computes with the norm of a layer's weight."""
    pair = Pair(room, use_dora=True, target_modules=["q_proj", "o_proj"])
    pair.same_words()
    for model in pair.both():
        model.merge_adapter()
    pair.same()
    for model in pair.both():
        model.unmerge_adapter()
    pair.same()
    pair.pages_well()
