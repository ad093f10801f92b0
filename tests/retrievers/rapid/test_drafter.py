"""RAPID's drafter: it reads a prompt of its own, and the text stays that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.base import DraftContext, DraftRequest
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
INPUTS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def target() -> Any:
    return tiny.model(dtype=torch.float64)


def engine(drafter: Any = None, budget: Any = 6) -> Engine:
    return Engine(target(), tiny.tokenizer(), drafter, budget=budget)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", ["auto", 6])
def test_the_text_is_that_of_plain_decoding(sampling: Sampling, budget: Any) -> None:
    prompt, other = tiny.prompt(60), tiny.prompt(9, seed=4)
    plain = engine(None).generate(prompt, sampling, **INPUTS)
    for drafter in (Rapid(target()), [ContextDrafter(), Rapid(tiny.model(seed=1))]):
        request = engine(drafter, budget)
        for current in (other, None, "a short text", prompt):
            result = request.generate(prompt, sampling, draft_prompt=current, **INPUTS)
            assert result.tokens == plain.tokens and result.label == "exact"


def test_over_the_same_prompt_it_is_the_draft_model() -> None:
    prompt, sampling = tiny.prompt(30), Sampling(temperature=0.9, seed=5)
    for current in (None, prompt):
        result = engine(Rapid(target())).generate(prompt, sampling, draft_prompt=current, **INPUTS)
        model = engine(ModelDrafter(target())).generate(prompt, sampling, **INPUTS)
        assert result.report.per_step_accepted == model.report.per_step_accepted
        assert result.report.accepted_by_source == {"rapid": model.report.accepted}
        assert result.report.draft_acceptance_rate > 0.4  # its own noise: the same choices
    session = Rapid(target()).open(DraftRequest(tuple(prompt), tiny.VOCAB))
    assert session.distributions() is None
    session.propose(DraftContext(prompt, len(prompt), 20), 4)
    assert session.distributions()


def test_what_it_reads_is_its_prompt_and_what_was_written() -> None:
    read: list[list[int]] = []

    class Spy(ModelDrafter):
        def open(self, request: Any) -> Any:
            session = super().open(request)
            propose = session.propose
            assert request.distribution.prompt_length == len(current)  # penalties count from there
            assert len(request.prompt) == len(current) + 1 and not request.spans

            def watched(context: Any, budget: int) -> Any:
                read.append(list(context.tokens))
                assert context.generated == len(context.tokens) - len(current)
                return propose(context, budget)

            session.propose = watched  # type: ignore[method-assign]
            return session

    prompt, current = tiny.prompt(50), tiny.prompt(7, seed=3)
    sources: dict[str, Any] = {"draft_prompt": current, "spans": [(0, 20, 0, 0)]}
    result = engine(Rapid(Spy(target()))).generate(prompt, **sources, **INPUTS)
    assert read and not result.report.faults and all(tokens[:7] == current for tokens in read)
    for tokens in read:
        assert tokens[7:] == result.tokens[: len(tokens) - 7]


def test_it_goes_on_after_what_was_written_before() -> None:
    prompt, current = tiny.prompt(40), tiny.prompt(6, seed=3)
    request = engine(Rapid(target()))
    whole = request.generate(prompt, draft_prompt=current, **INPUTS)
    first = request.generate(prompt, draft_prompt=current, stop_after=11, **INPUTS)
    rest = request.generate(prompt, draft_prompt=current, resume_from=first.tokens, **INPUTS)
    assert rest.tokens == whole.tokens and rest.report.accepted > 0


def test_where_its_context_is_full_it_falls_silent() -> None:
    result = engine(Rapid(tiny.model(seed=1, max_position_embeddings=32))).generate(
        tiny.prompt(60), draft_prompt=tiny.prompt(20), max_new_tokens=40, ignore_eos=True
    )
    assert result.tokens == engine(None).generate(tiny.prompt(60), **INPUTS).tokens
    assert not result.report.faults


def test_a_draft_ends_after_a_token_that_is_hardly_expected() -> None:
    """The confidence stop of the published code, on the probability of the whole path."""
    last: dict[float, list[float]] = {}
    for least in (0.0, 0.1):
        drafter = Rapid(ModelDrafter(tiny.model(seed=1), width=1, min_expected_gain=least))
        result = engine(drafter, 10).generate(tiny.prompt(40), Sampling(seed=1), **INPUTS)
        trees = [step.tree for step in result.steps if len(step.tree) > 1]
        last[least] = [float(each) for tree in trees for each in tree.accept_prob[:-1]]
    assert len(last[0.0]) > len(last[0.1]) > 0 and min(last[0.0]) < 0.1 <= min(last[0.1])


def test_who_wants_a_draft_prompt_is_known_through_others() -> None:
    rapid = Rapid(target())
    assert rapid.needs.draft_prompt and engine([ContextDrafter(), rapid]).needs.draft_prompt
    assert Rasd(rapid, [ContextDrafter()]).needs.draft_prompt
    assert not ContextDrafter().needs.draft_prompt and not engine(None).needs.draft_prompt


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([5, 999], "draft_prompt has the token id 999"),
        (7, "got int as draft_prompt"),
        ([None], "draft_prompt has the token id None"),
    ],
)
def test_bad_draft_prompts_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine(Rapid(target())).generate(tiny.prompt(), draft_prompt=inputs)


def test_several_prompts_or_no_model_are_refused() -> None:
    with pytest.raises(InputError, match="expected one prompt"):
        engine(None).generate([tiny.prompt(), tiny.prompt(seed=1)], draft_prompt=[5])
    with pytest.raises(InputError, match="no draft model"):
        Rapid()
