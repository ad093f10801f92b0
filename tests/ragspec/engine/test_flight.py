"""Forwards that are launched before the tokens of the last one are handed on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.engine.pool import Pool
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling
from ragspec.verification.base import StepSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.session import StaticSession
from tests.support import tiny
from tests.support.mixing import MixingDrafter

PROMPTS = [[5, 6, 7, 8, 9, 5], [40, 41, 3], [9] * 8, [1, 2, 3, 4, 5]]
NEW = 24
SAMPLED = Sampling(temperature=0.9, repetition_penalty=1.3, seed=[3, 4, 5, 6])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def target(model: Any) -> CausalTarget:
    return Engine(model, drafter=None, static="eager").target


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    results = Engine(model, drafter=None).generate(PROMPTS, SAMPLED, max_new_tokens=NEW)
    return [result.tokens for result in results]


def engine_of(target: CausalTarget, expected: list[list[int]]) -> Engine:
    truth = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
    return Engine(target, tiny.tokenizer(), drafter=MixingDrafter(truth, right=0.8), budget=10)


def ended(handle: RequestHandle) -> tuple[list[int], BaseException | None]:
    """Return all tokens that a caller was handed, and what ended the text."""
    results: list[int] = []
    with contextlib.suppress(ZeroDivisionError):
        for emission in handle:
            results += emission.step.tokens
    return results, handle.future.exception()


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note when forwards are launched, settle and are abandoned."""
    results: list[str] = []
    for name in ("launch", "settle", "abandon"):
        whole = getattr(StaticSession, name)

        def noted(self: Any, *args: Any, name: str = name, whole: Any = whole) -> Any:
            results.append(name)
            return whole(self, *args)

        monkeypatch.setattr(StaticSession, name, noted)
    yield results


def test_a_forward_is_under_variant_while_tokens_are_handed_on(
    target: CausalTarget, expected: list[list[int]], message: list[str]
) -> None:
    known: list[list[str]] = []

    def on_step(row: int, step: Step) -> None:
        known.append(message.copy())
        message.clear()

    assert isinstance(target.open(1, 9), StepSession)
    distribution = Sampling(temperature=0.9, repetition_penalty=1.3, seed=3)
    result = engine_of(target, expected).generate(
        PROMPTS[0], distribution, max_new_tokens=NEW, on_step=on_step
    )
    assert result.tokens == expected[0]
    assert known[0][-1] == "launch", "the prompt is read, the first step on its way"
    assert all(each == ["settle", "launch"] for each in known[1:-1])
    assert known[-1] == ["settle"], "nothing is launched for texts that have ended"


def test_texts_are_those_of_plain_decoding(target: CausalTarget, expected: list[list[int]]) -> None:
    result = engine_of(target, expected).generate(PROMPTS, SAMPLED, max_new_tokens=NEW)
    assert [each.tokens for each in result] == expected
    assert len({len(each.steps) for each in result}) > 1, "rows end at their own time"


def test_rows_that_leave_take_their_forward_back(
    target: CausalTarget, expected: list[list[int]], message: list[str]
) -> None:
    """Callers that leave or raise do so while a forward is under way, at any time."""
    rng = random.Random(0)

    def leaves(at: int) -> Callable[[Step], None]:
        left = [at]

        def on_step(step: Step) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise ZeroDivisionError("a caller")

        return on_step

    with Pool(engine_of(target, expected), slots=4) as pool:
        for _ in range(5):
            distributions = [
                Sampling(temperature=0.9, repetition_penalty=1.3, seed=3 + i) for i in range(4)
            ]
            handles = [
                pool.submit(
                    prompt,
                    distribution,
                    max_new_tokens=NEW,
                    on_step=leaves(rng.choice([1, 2, 3, 99])),
                )
                for prompt, distribution in zip(PROMPTS, distributions, strict=True)
            ]
            for handle, whole in zip(handles, expected, strict=True):
                result, error = ended(handle)
                assert result == whole[: len(result)]
                assert len(result) == len(whole) or isinstance(error, ZeroDivisionError)
    assert "abandon" in message


def test_what_fails_ahead_loses_no_token(
    target: CausalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, drafter=None)
    whole = engine.generate(PROMPTS[0], max_new_tokens=NEW).tokens
    launch, known = StaticSession.launch, list[int]()

    def failing(self: StaticSession, *inputs: Any) -> None:
        if len(known) == 2:
            raise ZeroDivisionError("a device of somebody")
        launch(self, *inputs)

    monkeypatch.setattr(StaticSession, "launch", failing)
    with pytest.raises(ZeroDivisionError, match="a device of somebody"):
        engine.generate(PROMPTS[0], max_new_tokens=NEW, on_step=lambda _, s: known.extend(s.tokens))
    assert known == whole[:3], "what was written before is handed on first"
    monkeypatch.undo()
    assert engine.generate(PROMPTS[0], max_new_tokens=NEW).tokens == whole
