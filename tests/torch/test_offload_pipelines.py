"""offload() and pipelines of transformers: they take an offloaded model for one on the GPU, and say
what they say with a plain one."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from offloaded import settles

os.environ["HF_HUB_OFFLINE"] = "1"

transformers = pytest.importorskip("transformers")

WORDS = 200


pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture
def room(either_room):
    return either_room


@pytest.fixture(scope="module")
def tokenizer():
    """Of words that are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )


def llama():
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def same(room, model, ask):
    """What `ask` gets of an offloaded model is what it gets of a plain one."""
    plain = copy.deepcopy(model).cuda()
    expected = ask(plain)
    del plain
    handle = room.offload(model)
    for _ in range(2):
        assert ask(model) == expected
    if room.how == "little":
        assert settles(model, lambda: ask(model) == expected)
    stats = handle.stats()
    assert stats["units"] > 4
    assert stats["one_by_one"] == 0
    assert (stats["streamed"] > 0) == (room.how == "little")
    return expected


def pipeline(task, model, **options):
    """The device is not told: it is the model's."""
    made = transformers.pipeline(task, model=model, **options)
    assert made.device == torch.device("cuda", 0)
    assert made.model is model
    return made


def test_text_generation(room, tokenizer):
    def ask(model):
        made = pipeline("text-generation", model, tokenizer=tokenizer)
        torch.manual_seed(3)
        return [
            made("w5 w17 w30", max_new_tokens=6, do_sample=False),
            made(["w9 w4", "w100 w3 w8 w9"], batch_size=2, max_new_tokens=6, do_sample=False),
            made("w5 w6", max_new_tokens=4, num_beams=2, do_sample=False),
            made("w7", max_new_tokens=4, do_sample=True, num_return_sequences=2),
        ]

    one, *_ = same(room, llama(), ask)
    assert len(one[0]["generated_text"].split("w")) == 1 + 3 + 6


def test_feature_extraction(room, tokenizer):
    def ask(model):
        made = pipeline("feature-extraction", model, tokenizer=tokenizer)
        return made(["w5 w17", "w9 w8 w7"])

    one, other = same(room, llama().model, ask)
    assert (len(one[0]), len(other[0]), len(one[0][0])) == (2, 3, 192)


def test_image_classification(room):
    from PIL import Image

    config = transformers.ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    values = np.random.default_rng(0).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})

    def ask(model):
        made = pipeline("image-classification", model, image_processor=processor)
        return made([image, image.rotate(90)], top_k=5)

    one, other = same(room, transformers.ViTForImageClassification(config).eval(), ask)
    assert one != other and len(one) == 5
