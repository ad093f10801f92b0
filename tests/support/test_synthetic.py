from __future__ import annotations

import pytest

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.operations import check
from tests.support.synthetic import SyntheticDrafter

PROMPT = (3, 1, 2)
TRUTH = [index * 7 % 20 for index in range(2000)]


def propose(drafter: SyntheticDrafter, done: int, budget: int, remaining: int = 5000) -> list[int]:
    session = drafter.open(DraftRequest(PROMPT, 20))
    place = DraftContext([*PROMPT, *TRUTH[:done]], len(PROMPT), remaining)
    tree = session.propose(place, budget)
    check(tree, 20)
    session.observe(Step(tree, (), (1,)))
    drafted: list[int] = tree.tokens.tolist()
    return drafted


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_tokens_are_right_as_often_as_requested(acceptance: float) -> None:
    drafted = propose(SyntheticDrafter(acceptance, TRUTH), 0, len(TRUTH))
    right = sum(a == b for a, b in zip(drafted, TRUTH, strict=True)) / len(TRUTH)
    assert right == pytest.approx(acceptance, abs=0.04)  # four standard errors of 2,000 draws


def test_the_draft_depends_on_seed_and_index_alone() -> None:
    drafter = SyntheticDrafter(0.5, TRUTH, seed=1)
    whole = propose(drafter, 0, 40)
    assert propose(drafter, 0, 40) == whole
    assert propose(drafter, 10, 30) == whole[10:]
    assert propose(SyntheticDrafter(0.5, TRUTH, seed=2), 0, 40) != whole


def test_the_draft_ends_with_budget_text_and_continuation() -> None:
    drafter = SyntheticDrafter(1.0, TRUTH[:12])
    assert propose(drafter, 0, 5) == TRUTH[:5]
    assert propose(drafter, 0, 50, remaining=4) == TRUTH[:3]
    assert propose(drafter, 9, 50) == TRUTH[9:12]
    assert propose(drafter, 12, 50) == []


def test_accept_prob_falls_by_the_acceptance() -> None:
    session = SyntheticDrafter(0.5, TRUTH).open(DraftRequest(PROMPT, 20))
    tree = session.propose(DraftContext(list(PROMPT), 3, 50), 3)
    assert tree.accept_prob.tolist() == [0.5, 0.25, 0.125]


def test_continuations_by_prompt() -> None:
    drafter = SyntheticDrafter(1.0, {PROMPT: [5, 6], (1,): [7]})
    assert propose(drafter, 0, 5) == [5, 6]
    with pytest.raises(InputError, match="no continuation is known"):
        drafter.open(DraftRequest((2,), 20))


def test_what_it_needs_is_said() -> None:
    with pytest.raises(InputError, match="got no continuation"):
        SyntheticDrafter()
    with pytest.raises(InputError, match=r"acceptance is 1\.5"):
        SyntheticDrafter(1.5, [1])
