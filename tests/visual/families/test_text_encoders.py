"""Encoders of prompts for LlamaGen's models: transformers' and the bundled one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ragspec.errors import InputError, ModelError
from ragspec.models.resolve import resolve_model
from ragspec.visual import ImagePipeline
from ragspec.visual.models.captions import EMBEDDER, CaptionEncoder, TextEncoder
from tests.support import image_models, tiny_images

WIDTH = 224


def opened(encoder: Any, model: Any = None) -> Any:
    model = tiny_images.model("features") if model is None else model
    return ImagePipeline(model, tiny_images.tokenizer(), budget=6, text_encoder=encoder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny T5 encoder and a tokenizer that knows four words and two marks."""
    folder = tmp_path_factory.mktemp("encoder")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 3, "blue": 4, "heart": 5, "cat": 6}
    words |= {"-": 7, '"': 8}
    instance = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    instance.pre_tokenizer = pre_tokenizers.Whitespace()
    end = [("</s>", 1)]
    instance.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=end)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=instance, **special).save_pretrained(folder)
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=len(words), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        T5EncoderModel(config).save_pretrained(folder)
    return folder


def test_a_text_encoder_is_named_and_its_padding_is_not_visible(encoder: Path) -> None:
    pipe = opened(encoder)
    texts = ["red", "blue heart red"]
    features = pipe.family.text_encoder(texts)
    assert [len(each) for each in features] == [2, 4]  # the end token included

    def sample(texts: Any) -> Any:
        return pipe(texts, generator=torch.Generator().manual_seed(1)).codes

    assert torch.equal(sample(texts)[:1], sample("red"))
    pipe.save_pretrained(encoder.parent / "named")
    for again in (ImagePipeline(**pipe.components), opened(pipe.family.text_encoder)):
        assert torch.equal(again(texts, seed=1).codes, pipe(texts, seed=1).codes)
    with pytest.warns(UserWarning, match="is not saved"):
        again.save_pretrained(encoder.parent / "object")
    named = ImagePipeline.from_pretrained(encoder.parent / "named", budget=6)
    assert torch.equal(named(texts, seed=1).codes, pipe(texts, seed=1).codes)
    parts = pipe.family.text_encoder.tokenizer, pipe.family.text_encoder.model
    with pytest.warns(UserWarning, match="reads the first 3"):
        short = TextEncoder(*parts, 3)(texts)[1]
    texts = ["Blue\u00a0HEART", "blue heart", "RED \u2014\u2013 \u201c cat", 'red - " cat']
    loud, plain, *marked = TextEncoder(*parts, 9)(texts)
    assert torch.allclose(short, plain, atol=1e-5)  # with its end token
    assert torch.equal(loud, plain) and torch.equal(*marked)


def test_a_wrong_text_encoder_is_refused(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model of classes"):
        opened(encoder, tiny_images.model())
    with pytest.raises(InputError, match=f"one of {WIDTH} numbers a token"):
        opened(encoder, image_models.model("features"))
    with pytest.raises(InputError, match="a function of texts"):
        opened(3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="text encoder"):
        opened(tmp_path)


@pytest.fixture(scope="module")
def captions() -> CaptionEncoder:
    return CaptionEncoder.from_pretrained(resolve_model(EMBEDDER, offline=True).folder, 4)


def test_a_text_becomes_the_vectors_of_its_tokens(captions: CaptionEncoder) -> None:
    both = captions(["cat face", "cat"])
    assert both.shape == (2, 4, captions.width)
    ids = captions.tokenizer.encode("cat", add_special_tokens=False).ids
    assert (both[1, : len(ids)] == captions.vectors[ids]).all()
    assert not both[1, len(ids) :].any()
    assert (both[0, 0] == both[1, 0]).all()  # no context: a token is its vector


def test_a_long_text_is_cut_with_a_warning(captions: CaptionEncoder) -> None:
    with pytest.warns(UserWarning, match="^a prompt has 7 tokens; the model reads the first 4"):
        result = captions(["one two three four five six seven"])
    assert result[0].any(1).all()


def test_an_empty_text_is_refused(captions: CaptionEncoder) -> None:
    with pytest.raises(InputError, match="holds no word"):
        captions(["cat", ""])
