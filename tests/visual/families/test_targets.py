"""Image models of transformers as targets, tiny and with random weights: trees, rows, refusals.

`test_multimodal` compares their images with the generation of transformers.
"""

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from ragspec.visual import ChameleonTarget, Emu3Target, ImageGPTTarget, ImageTarget, Raster
from ragspec.visual.families.janus import JanusTarget
from tests.support import tiny_prompted
from tests.support.noisy import NoisyTrees
from tests.support.tiny_prompted import BOOK

PAD, BOS, BOI = 0, 1, 4
COUNT = 9  # tokens of a picture
PROMPTS = [[BOS, 11, 13, 14, BOI], [BOS, 15, 11, 12, BOI]]
GRID, ROW, SQUARE = Raster(3, 2), Raster(1, COUNT), Raster(3, 3)  # the grid has line ends
NOTHING = [BOS, PAD, PAD, PAD, BOI]
KINDS = pytest.mark.parametrize("kind", ["janus", "emu3", "chameleon", "imagegpt"])


def model(kind: str, seed: int = 1) -> Any:
    return tiny_prompted.model(kind, seed)


def target(
    kind: str, seed: int = 1, scale: float = 3.0, prompts: Any = PROMPTS, beside: Any = None
) -> ImageTarget:
    """Return the target of prompts; beside: unconditional prompts, None for the usual ones."""
    instance = model(kind, seed)
    if kind == "imagegpt":
        return ImageGPTTarget(instance)
    if kind == "janus":
        usual = [[x if x in (BOS, BOI) else PAD for x in prompt] for prompt in prompts]
        return JanusTarget(instance, prompts, beside or usual, scale, raster=SQUARE)
    beside = beside or [NOTHING] * len(prompts)
    if kind == "emu3":
        return Emu3Target(instance, prompts, beside, scale, raster=GRID)
    return ChameleonTarget(instance, prompts, beside, scale, raster=ROW)


def draw(engine: Engine, rows: list[int], sampling: Sampling) -> list[list[int]]:
    instance: Any = engine.target
    prompts = [instance.prompt(row) for row in rows]
    results = engine.generate(prompts, sampling, max_new_tokens=COUNT, ignore_eos=True)
    return [each.tokens for each in results]


def test_greedy_decoding_of_imagegpt_is_that_of_the_model() -> None:
    start = {"input_ids": torch.tensor([[BOOK]]), "attention_mask": torch.tensor([[1]])}
    sample = model("imagegpt").generate(**start, do_sample=False, max_new_tokens=COUNT)
    result = draw(Engine(target("imagegpt"), None, drafter=None), [0], Sampling())
    assert result == sample[:, 1:].tolist()


@pytest.mark.filterwarnings("ignore:drafter 'model' is switched off")  # ImageGPT's last codes
@KINDS
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=9, seed=2)])
def test_trees_draw_what_plain_decoding_draws(kind: str, sampling: Sampling) -> None:
    instance, rows = target(kind), [0] if kind == "imagegpt" else [0, 1]
    plain = draw(Engine(instance, None, drafter=None), rows, sampling)
    assert len({tuple(tokens) for tokens in plain}) == len(rows)  # the prompt matters
    assert all(len(set(tokens)) > 3 for tokens in plain)
    truth = {tuple(instance.prompt(row)): codes for row, codes in zip(rows, plain, strict=True)}
    engine = Engine(instance, None, drafter=NoisyTrees(truth), budget=7)
    assert draw(engine, rows, sampling) == plain
    assert draw(engine, rows[:1], sampling) == plain[:1]
    small = ModelDrafter(target(kind, 2), depth=3, width=2, min_expected_gain=0.0)
    assert draw(Engine(instance, None, drafter=small, budget=5), rows, sampling) == plain


@KINDS
def test_codes_beyond_the_picture_are_refused(kind: str) -> None:
    instance = target(kind)
    with pytest.raises(PromptTooLongError):
        Engine(instance, None, drafter=None).generate(instance.prompt(0), max_new_tokens=COUNT + 1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'emu3'; expected 'janus'"):
        JanusTarget(model("emu3"), PROMPTS, [NOTHING] * 2, raster=SQUARE)
    with pytest.raises(InputError, match="unconditional"):
        JanusTarget(model("janus"), PROMPTS, None, 3.0, raster=SQUARE)
    nothing: list[list[list[int]]] = [[], [[]], [PROMPTS[0], []]]
    for empty in nothing:
        with pytest.raises(InputError, match=r"at least one, .* and none that is empty"):
            ChameleonTarget(model("chameleon"), empty, raster=ROW)
    with pytest.raises(InputError, match=r"2 prompts, of .* each with an unconditional one"):
        ChameleonTarget(model("chameleon"), PROMPTS, [NOTHING] * 3, raster=ROW)
    for wrong in (-1, 49, 1 << 70):
        with pytest.raises(InputError, match=f"token id {wrong} in a prompt; expected 0 to 48"):
            ChameleonTarget(model("chameleon"), [[5, wrong, 8]], raster=ROW)
    with pytest.raises(InputError, match="condition ids"):
        Engine(target("janus"), None, drafter=None).generate(PROMPTS[0])


@pytest.mark.parametrize("wrong", [0, -1, 3.5, None])
def test_sizes_of_a_picture_are_counts(wrong: Any) -> None:
    for name, side in (("height", "width"), ("width", "height")):
        with pytest.raises(InputError, match=f"{name} is"):
            Raster(**{name: wrong, side: 3})


def test_the_prompts_of_an_offloaded_model_are_read_where_it_runs() -> None:
    offloaded, tokens = copy.deepcopy(model("chameleon")), []
    cpu_offload(offloaded, torch.device("cpu"))
    for each in (offloaded, model("chameleon")):
        instance = ChameleonTarget(each, PROMPTS, raster=ROW)
        tokens.append(draw(Engine(instance, drafter=None), [0], Sampling()))
    assert tokens[0] == tokens[1]


def test_generation_settings_for_text_do_not_affect_images() -> None:
    instance: Any = target("janus", seed=17)
    plain = draw(Engine(instance, drafter=None), [0], Sampling())
    config = instance.model.generation_config
    config.guidance_scale, config.repetition_penalty = 5.0, 3.0
    config.suppress_tokens = plain[0][:2]
    assert draw(Engine(instance, drafter=None), [0], Sampling()) == plain
