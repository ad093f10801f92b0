"""RAPID's drafter: it reads a prompt of its own, and the text stays that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.base import wants_draft_prompt
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.retrievers import ContextDrafter, Rapid, Rasd
from ragspec.sampling.settings import Sampling
from tests.support import tiny

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=2),
]
GIVEN: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def target() -> Any:
    return tiny.model(dtype=torch.float64)


def engine(drafter: Any, budget: Any = 6) -> Engine:
    return Engine(target(), tiny.tokenizer(), drafter, budget=budget)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", ["auto", 6])
def test_the_text_is_that_of_plain_decoding(sampling: Sampling, budget: Any) -> None:
    prompt, other = tiny.prompt(60), tiny.prompt(9, seed=4)
    plain = engine(None).generate(prompt, sampling, **GIVEN)
    for drafter in (Rapid(target()), [ContextDrafter(), Rapid(tiny.model(seed=1))]):
        asked = engine(drafter, budget)
        for own in (other, None, "a short text", prompt):
            found = asked.generate(prompt, sampling, draft_prompt=own, **GIVEN)
            assert found.tokens == plain.tokens and found.label == "exact"


def test_over_the_same_prompt_it_is_the_draft_model() -> None:
    prompt, sampling = tiny.prompt(30), Sampling(temperature=0.9, seed=5)
    for own in (None, prompt):
        found = engine(Rapid(target())).generate(prompt, sampling, draft_prompt=own, **GIVEN)
        model = engine(ModelDrafter(target())).generate(prompt, sampling, **GIVEN)
        assert found.report.per_step_accepted == model.report.per_step_accepted
        assert found.report.accepted_by_source == {"rapid": model.report.accepted}
        assert found.report.draft_acceptance_rate > 0.4  # its own noise: the same choices


def test_what_it_reads_is_its_own_prompt_and_what_was_written() -> None:
    read: list[list[int]] = []

    class Spy(ModelDrafter):
        def open(self, request: Any) -> Any:
            session = super().open(request)
            propose = session.propose

            def watched(context: Any, budget: int) -> Any:
                read.append(list(context.tokens))
                assert context.generated == len(context.tokens) - len(own)
                return propose(context, budget)

            session.propose = watched  # type: ignore[method-assign]
            return session

    prompt, own = tiny.prompt(50), tiny.prompt(7, seed=3)
    found = engine(Rapid(Spy(target()))).generate(prompt, draft_prompt=own, **GIVEN)
    assert read and all(tokens[:7] == own for tokens in read)
    for tokens in read:
        assert tokens[7:] == found.tokens[: len(tokens) - 7]


def test_it_goes_on_after_what_was_written_before() -> None:
    prompt, own = tiny.prompt(40), tiny.prompt(6, seed=3)
    asked = engine(Rapid(target()))
    whole = asked.generate(prompt, draft_prompt=own, **GIVEN)
    first = asked.generate(prompt, draft_prompt=own, pause=11, **GIVEN)
    rest = asked.generate(prompt, draft_prompt=own, written=first.tokens, **GIVEN)
    assert rest.tokens == whole.tokens and rest.report.accepted > 0


def test_where_its_context_is_full_it_falls_silent() -> None:
    small = tiny.model(seed=1, max_position_embeddings=32)
    found = engine(Rapid(small)).generate(
        tiny.prompt(60), draft_prompt=tiny.prompt(20), max_new_tokens=40, ignore_eos=True
    )
    assert found.tokens == engine(None).generate(tiny.prompt(60), **GIVEN).tokens
    assert not found.report.faults


def test_who_wants_a_draft_prompt_is_known_through_others() -> None:
    rapid = Rapid(target())
    assert wants_draft_prompt(rapid) and wants_draft_prompt(
        engine([ContextDrafter(), rapid]).drafter
    )
    assert wants_draft_prompt(Rasd(rapid, [ContextDrafter()]))
    assert not wants_draft_prompt(ContextDrafter()) and not wants_draft_prompt(None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([5, 999], "draft_prompt has 999"),
        (7, "draft_prompt is 7"),
        ([None], "draft_prompt has None"),
    ],
)
def test_bad_draft_prompts_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine(Rapid(target())).generate(tiny.prompt(), draft_prompt=given)


def test_several_prompts_or_no_model_are_refused() -> None:
    with pytest.raises(InputError, match="expected one prompt"):
        engine(None).generate([tiny.prompt(), tiny.prompt(seed=1)], draft_prompt=[5])
    with pytest.raises(InputError, match="no draft model"):
        Rapid()
