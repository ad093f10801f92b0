"""The rows of one call: seeds, samples, the capacity they need and what became of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.options import RowSettings
from ragspec.engine.rows import Run
from ragspec.errors import InputError, SamplingError
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule
from tests.support import tiny
from tests.support.mixing import MixingDrafter

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model("llama"), tiny.tokenizer(), drafter=None)


def run(engine: Engine, sampling: Sampling, first: int = 0, **more: Any) -> Run:
    settings = RowSettings(sampling, StopRule(frozenset(), 4, **more))
    return Run(engine.parts, PROMPTS, settings, first)


def test_every_prompt_has_n_rows_of_one_seed(engine: Engine) -> None:
    instance = run(engine, Sampling(temperature=1.0, n=2, seed=[1, 2, 3, 4]), first=2)
    assert instance.prompt_of_row == [0, 0, 1, 1]
    assert [
        (row.distribution.noise.seed, row.distribution.noise.sample) for row in instance.rows
    ] == [
        (3, 0),
        (3, 1),
        (4, 0),
        (4, 1),
    ]
    assert [row.context.tokens for row in instance.rows] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    assert instance.rows[0].context.tokens is not instance.rows[1].context.tokens


def test_seeds_that_nobody_gave_differ_and_are_reported(engine: Engine) -> None:
    instance = run(engine, Sampling(temperature=1.0, n=2))
    seeds = [row.distribution.noise.seed for row in instance.rows]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    with pytest.raises(SamplingError, match="1 seeds for at least 2 prompts"):
        run(engine, Sampling(temperature=1.0, seed=[1]))


def test_rows_that_did_not_end_were_cancelled(engine: Engine) -> None:
    instance = run(engine, Sampling())
    instance.rows[0].stop.push(3)
    for token in (1, 2, 3, 4):
        instance.rows[1].stop.push(token)
    instance.close(1.5)
    first, second = (results[0] for results in instance.results())
    assert first.finish_reason == "cancelled"
    assert second.finish_reason == "length"
    assert first.report.seconds == 1.5


@pytest.mark.parametrize("budget", ["auto", 4, 0])
def test_tree_sizes_are_counted_for_every_step(budget: str | int, engine: Engine) -> None:
    for new in (2, 9):
        plain = engine.generate(PROMPTS[0], max_new_tokens=new, ignore_eos=True)
        drafting = Engine(
            engine.model, drafter=MixingDrafter({tuple(PROMPTS[0]): plain.tokens}), budget=budget
        )
        result = drafting.generate(PROMPTS[0], max_new_tokens=new, ignore_eos=True).report
        assert sum(result.budget_sizes.values()) == result.steps > 0
        assert result.budget_sizes == Counter(result.per_step_drafted)


def test_a_stop_string_is_cut_from_the_text_but_not_from_the_tokens(engine: Engine) -> None:
    whole = engine.generate("ab", max_new_tokens=12)
    result = engine.generate("ab", max_new_tokens=12, stop=[whole.text[3:5], whole.text[4:6]])
    assert result.text == whole.text[:3]
    assert result.tokens == whole.tokens[:5]
    assert result.finish_reason == "stop"


def test_end_tokens_go_on_where_they_are_ignored(engine: Engine) -> None:
    whole = engine.generate([5, 6, 7], max_new_tokens=10, ignore_eos=True).tokens
    tuned = Engine(tiny.model("llama"), drafter=MixingDrafter({(5, 6, 7): whole}), budget=6)
    tuned.model.generation_config.eos_token_id, selected = (
        whole[4],
        tuned.model.generation_config.eos_token_id,
    )
    try:
        ended = tuned.generate([5, 6, 7], max_new_tokens=10)
        ignoring = tuned.generate([5, 6, 7], max_new_tokens=10, ignore_eos=True)
        other = tuned.generate(
            [5, 6, 7], max_new_tokens=10, ignore_eos=True, stop_token_ids=[whole[2]]
        )
    finally:
        tuned.model.generation_config.eos_token_id = selected
    assert ended.tokens == whole[: whole.index(whole[4]) + 1]
    assert ignoring.tokens == whole
    assert other.tokens == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"stop": ["a", ""]}, "empty"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 98}, "0 to 97"),
        ({"sampling": Sampling(seed=[1, 2])}, "2 seeds for 1 prompts"),
        ({"sampling": {"temperature": 1.0}}, "expected a Sampling"),
        ({"sampling": 0.7}, "expected a Sampling"),
        ({"sampling": Sampling(logit_bias={97: 1.0})}, "token id 97"),
        ({"sampling": Sampling(logit_bias={-1: 1.0})}, "token id -1"),
    ],
)
def test_requests_are_checked_before_any_work(
    arguments: dict[str, Any], match: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.target, "forward", lambda *a, **k: pytest.fail("a forward ran"))
    with pytest.raises(InputError, match=match):
        engine.generate([1, 2], **arguments)


def test_a_failing_processor_leaves_model_and_engine_usable(engine: Engine) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no scores today")

    before = engine.model.config._attn_implementation
    expected = engine.generate([1, 2], max_new_tokens=3).tokens
    with pytest.raises(RuntimeError, match="no scores today"):
        engine.generate([1, 2], max_new_tokens=3, logits_processor=[fail])
    assert engine.model.config._attn_implementation == before
    assert engine.generate([1, 2], max_new_tokens=3).tokens == expected


EQUAL = [[5, 6, 7, 8]] * 3


def texts(seed: object) -> list[list[int]]:
    engine = Engine(tiny.model("llama"), drafter=None, batch_size=2)
    sampling = Sampling(temperature=1.5, seed=seed)  # type: ignore[arg-type]
    return [result.tokens for result in engine.generate(EQUAL, sampling, max_new_tokens=8)]


def test_one_seed_is_one_noise_for_every_prompt() -> None:
    first, *others = texts(7)
    assert others == [first, first]


def test_a_range_of_seeds_is_a_noise_for_each() -> None:
    result = texts(range(7, 10))
    assert len(set(map(tuple, result))) == 3
    assert result == texts([7, 8, 9])
    assert [texts(seed)[0] for seed in range(7, 10)] == result


def test_without_a_seed_each_prompt_draws_its_its() -> None:
    assert len(set(map(tuple, texts(None)))) == 3
