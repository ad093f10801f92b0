from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.pipelines.cli.compare import (
    compare,
    first_difference,
    margin_at,
    plain_engine,
    same_seed,
)
from ragspec.sampling.settings import Sampling
from tests.support import tiny

PROMPT = tiny.prompt(20, seed=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = copy.deepcopy(tiny.model())
    model.generation_config.eos_token_id = None  # random models end anywhere
    return Engine(model, None, drafter="context", budget=4)


def generate(engine: Engine, sampling: Sampling) -> Generation:
    generation: Generation = engine.generate(PROMPT, sampling, max_new_tokens=12)
    return generation


def changed_at(generation: Generation, index: int) -> Generation:
    tokens = list(generation.tokens)
    tokens[index] = (tokens[index] + 1) % 96
    return replace(generation, tokens=tokens)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_an_unseeded_run_is_repeated_with_the_seed_it_drew(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0)
    speculative = generate(engine, sampling)
    plain = generate(plain_engine(engine), same_seed(sampling, speculative))
    result = compare(engine, speculative, plain, sampling)
    assert result.equal and result.first_divergence is None
    assert result.ratio == pytest.approx(plain.report.seconds / speculative.report.seconds)
    decoding = plain.report.decode_seconds / speculative.report.decode_seconds
    assert result.decode_ratio == pytest.approx(decoding)
    assert "the same tokens" in result.summary()


def test_plain_engine_shares_the_model_and_drafts_nothing(engine: Engine) -> None:
    plain = plain_engine(engine)
    assert plain.model is engine.model and plain.drafter is None
    assert generate(plain, Sampling()).report.drafted == 0


def test_greedy_margin_is_the_distance_of_the_best_two_logits(engine: Engine) -> None:
    plain = generate(engine, Sampling())
    other = changed_at(plain, 5)
    result = compare(engine, other, plain, Sampling()).first_divergence
    assert result is not None
    assert (result.index, result.plain, result.speculative) == (5, plain.tokens[5], other.tokens[5])
    ids = torch.tensor([[*PROMPT, *plain.tokens[:5]]])
    best = tiny.model()(ids).logits[0, -1].detach().topk(2)
    assert int(best.indices[0]) == plain.tokens[5]
    assert result.margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_sampled_margin_belongs_to_the_token_that_was_sampled(engine: Engine) -> None:
    sampling = Sampling(temperature=0.9, top_k=20, seed=11)
    plain = generate(engine, sampling)
    margins = [margin_at(engine, plain, i, sampling) for i in range(len(plain.tokens))]
    assert all(margin > 0 for margin in margins)
    # Temperature is part of the choice: the same logits at another one have another margin.
    other = margin_at(engine, plain, 0, replace(sampling, temperature=0.5))
    assert other != pytest.approx(margins[0])


def test_a_shorter_text_differs_at_its_end(engine: Engine) -> None:
    plain = generate(engine, Sampling())
    shorter = replace(plain, tokens=plain.tokens[:4])
    result = compare(engine, shorter, plain, Sampling())
    assert not result.equal and result.first_divergence is not None
    assert (result.first_divergence.index, result.first_divergence.speculative) == (4, None)
    assert "part at number 4" in result.summary()
    assert result.to_dict()["first_divergence"]["plain"] == plain.tokens[4]
