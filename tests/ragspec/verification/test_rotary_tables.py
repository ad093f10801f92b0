"""Tables of rotary positions that change with the length: texts that cross the border are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, PromptTooLongError
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, TreeSession
from ragspec.verification.constant_width import ConstantWidthTarget
from ragspec.verification.open import open_target
from ragspec.verification.path_rows import PathSession, PathTarget
from ragspec.verification.rotary_tables import rereads, table_border
from tests.support.architectures import COMMON, VOCAB
from tests.support.architectures_sweep import TOWERS
from tests.support.noisy import NoisyTrees

BORDER = 64
NEW = 60
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
}
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": BORDER, "sliding_window": None},
    "phimoe": EXPERTS | {"rope_parameters": LONGROPE | MSCALE, "attention_bias": False},
    "phi4_multimodal": TOWERS | {"original_max_position_embeddings": BORDER},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 16},  # chains cannot be cropped, so tokens are replayed
}


def build(name: str) -> Any:
    """Return a tiny model with one table up to 64 tokens and another beyond."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = COMMON | {"rope_parameters": LONGROPE} | MODELS[name]
    config = AutoConfig.for_model(name, **copy.deepcopy(settings))
    dtype = torch.float32 if name == "phimoe" else torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB - 1, (length,), generator=random).tolist()


def greedy(model: Any, text: list[int]) -> list[int]:
    """Return what transformers' own plain decoding writes.

    For Phi 4 the text that the model would choose if it read all of it for every token: its own
    `generate` drops its cache beyond the border and goes on from the last token alone.
    """
    ids = torch.tensor([text])
    if model.config.model_type == "phi4_multimodal":
        with torch.no_grad():
            for _ in range(NEW):
                best = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, best], dim=1)
        written: list[int] = ids[0, len(text) :].tolist()
        return written
    mask = torch.ones_like(ids)
    current = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    tokens: list[int] = current[0, len(text) :].tolist()
    return tokens


@pytest.mark.parametrize("mode", ["tree", "chain"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_that_cross_the_border_are_those_of_plain_decoding(name: str, mode: str) -> None:
    model = build(name)
    target = CausalTarget(model) if mode == "tree" else PathTarget(model)
    text = prompt(40)
    expected = greedy(copy.deepcopy(model), text)
    plain = Engine(target, drafter=None)
    assert plain.generate(text, max_new_tokens=NEW).tokens == expected
    for budget in (4, 9):
        drafter = NoisyTrees({tuple(text): expected})
        out = Engine(target, drafter=drafter, budget=budget).generate(text, max_new_tokens=NEW)
        assert out.tokens == expected
        assert out.label == "exact"
        assert not out.report.faults
        assert out.report.accepted > 10


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_forwards_of_one_width_cross_the_border_too(name: str) -> None:
    target, text = ConstantWidthTarget(build(name)), prompt(40)
    expected = greedy(build(name), text)
    for drafter in (None, NoisyTrees({tuple(text): expected})):
        out = Engine(target, drafter=drafter, budget=9).generate(text, max_new_tokens=NEW)
        assert out.tokens == expected


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_do_not_choose_each_others_table(name: str, drafted: bool) -> None:
    model = build(name)
    texts = [prompt(40, 1), prompt(90, 2), prompt(64, 3), prompt(9, 4)]
    expected = [greedy(copy.deepcopy(model), text) for text in texts]
    truths = {tuple(text): out for text, out in zip(texts, expected, strict=True)}
    engine = Engine(open_target(model), drafter=NoisyTrees(truths) if drafted else None, budget=9)
    assert [out.tokens for out in engine.generate(texts, max_new_tokens=NEW)] == expected


def test_samples_of_one_prompt_cross_the_border_alike() -> None:
    model, text = build("phi3"), prompt(60)
    sampling = Sampling(temperature=0.8, seed=3, n=3)
    plain = Engine(open_target(model), drafter=None).generate(text, sampling, max_new_tokens=NEW)
    truths = {tuple(text): plain[1].tokens}
    engine = Engine(open_target(model), drafter=NoisyTrees(truths), budget=9)
    drafted = engine.generate(text, sampling, max_new_tokens=NEW)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]


def test_one_row_verifies_trees_and_several_take_turns() -> None:
    target = open_target(build("llama"))
    with target.open(1, 8) as one, target.open(2, 8) as two:
        assert isinstance(one, TreeSession) and isinstance(two, PathSession)
    assert min(target.time_forward(2, 8, texts) for texts in (1, 2)) > 0


@pytest.mark.parametrize("texts", [([1] * 65, [1, 2]), ([1] * 62, [1, 2])])
def test_rows_on_both_sides_of_the_border_are_refused(texts: tuple[list[int], ...]) -> None:
    """A target that was not opened by the probe must not choose the wrong table silently."""
    with CausalTarget(build("llama")).open(2, 80) as session:
        trees = [DraftTree.chain([3, 4, 5], "test"), DraftTree.empty()]
        with pytest.raises(InputError, match="both sides of 64"):
            session.verify(texts, trees)


def test_models_with_one_table_are_let_be() -> None:
    from tests.support.architectures import build as plain

    assert table_border(plain("llama")) is table_border(plain("phi3")) is None
    assert table_border(build("llama")) == table_border(build("phi3")) == BORDER
    assert rereads(build("phi3")) and not rereads(build("llama"))


def test_dynamic_scaling_is_used_within_its_first_table() -> None:
    """Beyond `max_position_embeddings` its table would change with every token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    settings = COMMON | {"rope_parameters": dynamic, "max_position_embeddings": BORDER}
    config = AutoConfig.for_model("llama", **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    text = prompt(40)
    expected = greedy(model, text)[: BORDER - 40]
    engine = Engine(CausalTarget(model), drafter=NoisyTrees({tuple(text): expected}), budget=9)
    assert engine.generate(text, max_new_tokens=BORDER - 40).tokens == expected
    with pytest.raises(PromptTooLongError):
        engine.generate(text, max_new_tokens=BORDER - 39)
