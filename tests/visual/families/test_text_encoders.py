"""Prompts of several lengths: padded on the left and masked, as LlamaGen reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError, ModelError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual import ImagePipeline
from ragspec.visual.models.captions import TextEncoder
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel
from tests.support import image_models, tiny_images

LENGTH, WIDTH = 120, 5
SIZES = (9, 20, 30, 119)


@pytest.fixture(scope="module")
def model() -> Any:
    """A text-conditional model with as many places for a prompt as LlamaGen has."""
    config = LlamaGenConfig(
        vocab_size=tiny_images.CODES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        grid_size=tiny_images.SIDE,
        condition="features",
        condition_length=LENGTH,
        caption_dim=WIDTH,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaGenModel(config).double().eval()


def opened(model: Any, drafter: Any = "jacobi", **settings: Any) -> Any:
    pipe = ImagePipeline(model, tiny_images.tokenizer(), drafter, budget=6, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts() -> list[torch.Tensor]:
    sample = torch.Generator().manual_seed(4)
    return [torch.randn(size, WIDTH, generator=sample, dtype=torch.float64) for size in SIZES]


def reference(model: Any, features: torch.Tensor, sampling: Sampling, seed: int) -> list[int]:
    """Return the codes of a prompt [n, d] by two masked forwards over everything, for each code."""
    distribution = TokenDistribution(sampling, NoiseStream(seed, 0), 0)
    empty = LENGTH - len(features)
    padded = torch.cat([torch.full((empty, WIDTH), 9.0, dtype=torch.float64), features])
    codes: list[int] = []
    for index in range(tiny_images.SIDE**2):
        mask = image_models.masked(LENGTH + index, empty)
        ids = torch.tensor([codes], dtype=torch.int64)
        with torch.no_grad():
            current, none = (
                model(ids, condition_embeds=each, attention_mask=mask).logits[0, -1:]
                for each in (model.condition(padded[None]), model.unconditional(1))
            )
        logits = none + 3.0 * (current - none)
        codes.append(int(distribution.select(distribution.process(logits, codes, [[]]), [index])))
    return codes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [None, "jacobi"])
def test_prompts_of_several_lengths_in_one_batch_are_those_of_a_masked_reference(
    model: Any, drafter: Any, temperature: float
) -> None:
    dice = torch.Generator().manual_seed(1)
    pipe = opened(model, drafter, text_encoder=lambda texts: [prompts()[int(n)] for n in texts])
    names = list(map(str, range(len(SIZES))))
    out = pipe(names, generator=dice, guidance_scale=3.0, temperature=temperature)
    for row, features in enumerate(prompts()):
        sampling = Sampling(temperature=temperature, seed=[out.stats.seeds[row]])
        expected = reference(model, features, sampling, out.stats.seeds[row])
        assert out.codes[row].flatten().tolist() == expected


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny T5 encoder and a tokenizer that knows four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("encoder")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 3, "blue": 4, "heart": 5, "cat": 6}
    instance = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    instance.pre_tokenizer = pre_tokenizers.Whitespace()
    instance.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=instance, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = T5Config(
        vocab_size=len(words), d_model=WIDTH, d_kv=4, d_ff=8, num_layers=2, num_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        T5EncoderModel(config).save_pretrained(folder)
    return folder


def test_a_text_encoder_is_named_and_its_padding_is_not_visible(model: Any, encoder: Path) -> None:
    pipe = opened(model, text_encoder=encoder)
    texts = ["red", "blue heart red cat"]
    features = pipe.family.text_encoder(texts)
    assert [len(each) for each in features] == [2, 5]  # the end token included

    def sample(texts: Any) -> torch.Tensor:
        codes: torch.Tensor = pipe(texts, generator=torch.Generator().manual_seed(1)).codes
        return codes

    together = sample(texts)
    assert torch.equal(together[:1], sample("red"))
    with pytest.warns(UserWarning, match="reads the first 3"):
        assert (
            len(
                TextEncoder(pipe.family.text_encoder.tokenizer, pipe.family.text_encoder.model, 3)(
                    texts
                )[1]
            )
            == 3
        )


def test_a_wrong_text_encoder_is_refused(model: Any, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model of classes"):
        ImagePipeline(tiny_images.model(), tiny_images.tokenizer(), text_encoder=encoder)
    with pytest.raises(InputError, match=f"one of {WIDTH} numbers a token"):
        ImagePipeline(tiny_images.model("features"), tiny_images.tokenizer(), text_encoder=encoder)
    with pytest.raises(InputError, match="a function of texts"):
        opened(model, text_encoder=3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="text encoder"):
        opened(model, text_encoder=tmp_path)
