"""Image models of transformers, tiny and with random weights, against their own decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    JanusConfig,
    JanusForConditionalGeneration,
)

from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from ragspec.sampling.settings import Sampling
from ragspec.visual.families.chameleon import ChameleonTarget
from ragspec.visual.families.emu3 import Emu3Target
from ragspec.visual.families.imagegpt import ImageGPTTarget
from ragspec.visual.families.janus import JanusTarget, janus_unconditional
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ImageTarget
from tests.support.synthetic import SyntheticDrafter

BOOK, PAD, BOS, BOI, LINE = 24, 0, 1, 3, 6
COUNT = 12  # codes of a picture
PROMPTS = [[BOS, 9, 11, 12, BOI], [BOS, 13, 9, 10, BOI]]
SQUARE, ROW = Raster(3, 3), Raster(1, COUNT)
NOTHING = [BOS, PAD, PAD, PAD, BOI]
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "initializer_range": 0.4,
}
VQ: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}


@cache
def model(kind: str, seed: int = 0) -> Any:
    """Return a float64 model with random weights; the same object for equal calls."""
    makers: dict[str, Callable[[], Any]] = {
        "janus": _janus,
        "emu3": _emu3,
        "chameleon": _chameleon,
        "imagegpt": _imagegpt,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return makers[kind]().double().eval()


def _janus() -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 8, "patch_size": 4, "projection_dim": 32, "num_image_tokens": COUNT}
    book = {"num_embeddings": BOOK, "embed_dim": 4, "projection_dim": 32, "latent_channels": 32}
    instance = JanusForConditionalGeneration(
        JanusConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config=vision | sizes,
            vq_config=VQ | book | {"image_token_embed_dim": 32},
            image_token_id=5,
        )
    )
    for part in (instance.model.generation_embeddings, instance.model.generation_head):
        for weight in part.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    for weight in instance.model.generation_aligner.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return instance


def _emu3() -> Any:
    names = {f"<|visual token {i:06d}|>": 20 + i for i in range(BOOK)}
    return Emu3ForConditionalGeneration(
        Emu3Config(
            text_config=TEXT,
            vq_config=VQ | {"codebook_size": BOOK, "embed_dim": 4},
            vocabulary_map=names | {"<image>": 5, "<|extra_200|>": LINE},
        )
    )


def _chameleon() -> Any:
    letters = ("".join(chr(65 + int(digit)) for digit in str(i)) for i in range(BOOK))
    names = {f"IMGIMG{word}Z": 20 + (7 * i) % BOOK for i, word in enumerate(letters)}
    return ChameleonForConditionalGeneration(
        ChameleonConfig(
            **TEXT,
            vq_config=VQ | {"num_embeddings": BOOK, "embed_dim": 4, "latent_channels": 32},
            vocabulary_map=names | {"<image>": 5},
        )
    )


def _imagegpt() -> Any:
    sizes = {"n_positions": COUNT, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return ImageGPTForCausalImageModeling(
        ImageGPTConfig(vocab_size=BOOK + 1, initializer_range=0.4, **sizes)
    )


def target(kind: str, seed: int = 0, scale: float = 3.0) -> ImageTarget:
    instance = model(kind, seed)
    if kind == "imagegpt":
        return ImageGPTTarget(instance)
    if kind == "emu3":
        return Emu3Target(instance, PROMPTS, NOTHING, scale, raster=SQUARE)
    if kind == "chameleon":
        return ChameleonTarget(instance, PROMPTS, NOTHING, scale, raster=ROW)
    return JanusTarget(instance, PROMPTS, janus_unconditional(PROMPTS[0], BOS, BOI, PAD), scale)


def local_janus(row: int) -> list[int]:
    instance = model("janus")
    settings = {"boi_token_id": BOI}
    instance.generation_config.generation_kwargs = settings
    ids = torch.tensor(PROMPTS[row : row + 1])
    sample = instance.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_mode="image",
        guidance_scale=3.0,
        do_sample=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
    )
    return list(sample[0].tolist())


def local_emu3(row: int) -> list[int]:
    instance, ids = model("emu3"), torch.tensor(PROMPTS[row : row + 1])

    def allowed(batch: int, text: torch.Tensor) -> list[int]:
        offset = len(text) - len(PROMPTS[row]) + 1
        return [LINE] if offset % 4 == 0 else list(range(20, 20 + BOOK))

    sample = instance.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        prefix_allowed_tokens_fn=allowed,
        negative_prompt_ids=torch.tensor([NOTHING]),
        negative_prompt_attention_mask=torch.ones_like(ids),
        guidance_scale=3.0,
        do_sample=False,
        max_new_tokens=COUNT,
    )
    tokens = sample[0, len(PROMPTS[row]) :].tolist()
    return [BOOK if token == LINE else token - 20 for token in tokens]


def local_chameleon(row: int) -> list[int]:
    """Decode by whole forwards: the model's own generate never draws a code."""
    instance = model("chameleon")
    known = instance.model.vocabulary_mapping.img2bpe
    text_ids = torch.tensor([known[code] for code in range(BOOK)])
    codes: list[int] = []
    for _ in range(COUNT):
        sample = [int(text_ids[code]) for code in codes]
        both = torch.tensor([PROMPTS[row] + sample, NOTHING + sample])
        with torch.no_grad():
            states = instance.model(both, use_cache=False).last_hidden_state
            c, u = instance.lm_head(states[:, -1])[:, text_ids]
        codes.append(int((u + 3.0 * (c - u)).argmax()))
    return codes


def local_imagegpt(row: int) -> list[int]:
    start = torch.tensor([[BOOK]])
    instance = model("imagegpt")
    sample = instance.generate(
        start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=COUNT
    )
    return list(sample[0, 1:].tolist())


OF_MODEL = {
    "janus": local_janus,
    "emu3": local_emu3,
    "chameleon": local_chameleon,
    "imagegpt": local_imagegpt,
}
KINDS = pytest.mark.parametrize("kind", OF_MODEL)


def draw(engine: Engine, rows: list[int], sampling: Sampling) -> list[list[int]]:
    instance: Any = engine.target
    prompts = [instance.prompt(row) for row in rows]
    results = engine.generate(prompts, sampling, max_new_tokens=COUNT, ignore_eos=True)
    return [each.tokens for each in results]


def rows_of(kind: str) -> list[int]:
    return [0] if kind == "imagegpt" else [0, 1]


@KINDS
def test_greedy_decoding_is_that_of_the_model(kind: str) -> None:
    rows = rows_of(kind)
    result = draw(Engine(target(kind), None, drafter=None), rows, Sampling())
    assert result == [OF_MODEL[kind](row) for row in rows]
    assert len({tuple(tokens) for tokens in result}) == len(rows)  # the prompt matters
    assert all(len(set(tokens)) > 3 for tokens in result)


@pytest.mark.filterwarnings("ignore:drafter 'model' is switched off")  # ImageGPT's last codes
@KINDS
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=9, seed=2)])
def test_trees_draw_what_plain_decoding_draws(kind: str, sampling: Sampling) -> None:
    instance, rows = target(kind), rows_of(kind)
    plain = draw(Engine(instance, None, drafter=None), rows, sampling)
    truth = {tuple(instance.prompt(row)): codes for row, codes in zip(rows, plain, strict=True)}
    drafters = [SyntheticDrafter(0.6, truth, seed) for seed in range(2)]
    engine = Engine(instance, None, drafter=drafters, budget=7)
    assert draw(engine, rows, sampling) == plain
    assert draw(engine, rows[:1], sampling) == plain[:1]
    small = ModelDrafter(target(kind, 1), depth=3, width=2, min_expected_gain=0.0)
    assert draw(Engine(instance, None, drafter=small, budget=5), rows, sampling) == plain


@KINDS
def test_the_model_is_left_as_it_was_detected(kind: str) -> None:
    instance = model(kind)
    before = instance.config._attn_implementation
    draw(Engine(target(kind), None, drafter=None), [0], Sampling())
    assert instance.config._attn_implementation == before


@KINDS
def test_codes_beyond_the_picture_are_refused(kind: str) -> None:
    instance = target(kind)
    with pytest.raises(PromptTooLongError):
        Engine(instance, None, drafter=None).generate(instance.prompt(0), max_new_tokens=COUNT + 1)


@pytest.mark.parametrize("kind", ["janus", "emu3", "chameleon"])
def test_without_guidance_one_row_is_run(kind: str) -> None:
    instance = target(kind, scale=1.0)
    assert instance.copies == 1
    plain = draw(Engine(instance, None, drafter=None), [1], Sampling())
    drafter = SyntheticDrafter(0.7, plain[0])
    assert draw(Engine(instance, None, drafter=drafter, budget=4), [1], Sampling()) == plain


@pytest.mark.parametrize("kind", ["janus", "emu3", "chameleon"])
def test_prompts_of_several_lengths_draw_what_each_draws_alone(kind: str) -> None:
    """Padding is neither seen nor counted, in prompts and in what they are guided from."""
    longer = [BOS, 9, 9, 11, 12, 13, 10, BOI]
    prompts = [*PROMPTS, longer, [BOS, BOI]]
    none = [[BOS, BOI], NOTHING, [BOS, *[PAD] * 8, BOI], [BOS, 12, BOI]]

    def instance(rows: list[list[int]], beside: list[list[int]]) -> ImageTarget:
        if kind == "emu3":
            return Emu3Target(model(kind), rows, beside, raster=SQUARE)
        if kind == "chameleon":
            return ChameleonTarget(model(kind), rows, beside, 3.0, raster=ROW)
        return JanusTarget(model(kind), rows, beside, 3.0)

    sampling = Sampling(temperature=1.0, seed=[1, 2, 3, 4])
    together = instance(prompts, none)
    for drafters in (None, SyntheticDrafter(0.6, [1] * COUNT)):
        result = draw(Engine(together, None, drafter=drafters, budget=5), [0, 1, 2, 3], sampling)
        for row, (prompt, beside) in enumerate(zip(prompts, none, strict=True)):
            alone = instance([prompt], [beside])
            assert alone.condition_length == max(len(prompt), len(beside))
            one = Sampling(temperature=1.0, seed=row + 1)
            assert draw(Engine(alone, None, drafter=None), [0], one) == [result[row]]


def test_lines_end_where_they_must() -> None:
    instance = target("emu3")
    assert isinstance(instance, Emu3Target)
    for seed in range(4):
        sampling = Sampling(temperature=3.0, seed=seed)
        tokens = draw(Engine(instance, None, drafter=None), [0], sampling)[0]
        assert [i for i, token in enumerate(tokens) if token == BOOK] == [3, 7, 11]
        assert instance.raster is not None
        codes = instance.raster.known(tokens)
        assert len(codes) == 9 and max(codes) < BOOK


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'emu3'; expected 'janus'"):
        JanusTarget(model("emu3"), PROMPTS, NOTHING)
    with pytest.raises(InputError, match="unconditional"):
        JanusTarget(model("janus"), PROMPTS)
    nothing: list[list[list[int]]] = [[], [[]], [PROMPTS[0], []]]
    for empty in nothing:
        with pytest.raises(InputError, match="at least one, and none that is empty"):
            ChameleonTarget(model("chameleon"), empty)
    with pytest.raises(InputError, match="2 unconditional prompts for 3"):
        ChameleonTarget(model("chameleon"), [PROMPTS[0]] * 3, [NOTHING] * 2)
    for wrong in (-1, 60, 1 << 70):
        with pytest.raises(InputError, match=f"token id {wrong}; expected ids from 0 to 59"):
            ChameleonTarget(model("chameleon"), [[5, wrong, 8]])
    prompts: list[Any] = [[[1.0, 2.0]], ["ab"], "ab", [1, 2], torch.tensor([1, 2]), 3, [None]]
    for inputs in prompts:
        with pytest.raises(InputError, match="expected a list of lists of token ids"):
            ChameleonTarget(model("chameleon"), inputs)
    with pytest.raises(InputError, match="expected a list of lists of token ids"):
        ChameleonTarget(model("chameleon"), PROMPTS, prompts[0][0])
    with pytest.raises(InputError, match="condition ids"):
        Engine(target("janus"), None, drafter=None).generate(PROMPTS[0])


@pytest.mark.parametrize("wrong", [0, -1, 3.5, None])
def test_sizes_of_a_picture_are_counts(wrong: Any) -> None:
    with pytest.raises(InputError, match="height is"):
        Raster(wrong, 3)
    with pytest.raises(InputError, match="width is"):
        Raster(3, wrong)


def test_the_prompts_of_an_offloaded_model_are_read_where_it_runs() -> None:
    from accelerate import cpu_offload

    offloaded = copy.deepcopy(model("chameleon"))
    cpu_offload(offloaded, torch.device("cpu"))
    targets = [ChameleonTarget(each, PROMPTS) for each in (offloaded, model("chameleon"))]
    sample = [
        Engine(target, drafter=None).generate(target.prompt(0), max_new_tokens=4).tokens
        for target in targets
    ]
    assert sample[0] == sample[1]


def test_what_a_model_asks_of_text_is_not_requested_of_its_pictures() -> None:
    instance: Any = target("janus", seed=17)
    plain = draw(Engine(instance, drafter=None), [0], Sampling())
    config = instance.model.generation_config
    config.guidance_scale, config.repetition_penalty = 5.0, 3.0
    config.suppress_tokens = plain[0][:2]
    assert draw(Engine(instance, drafter=None), [0], Sampling()) == plain
