"""Jacobi drafts: the coupled form changes no code, the sampled form no distribution."""

import copy
from typing import Any, get_args

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.rules.rejection import ChainRejection
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check
from ragspec.visual.drafting.jacobi import _RATES, _SECOND, Form, JacobiDrafter, JacobiSession
from tests.support.distributions import Distributions, DistributionTarget, emitted
from tests.support.enumeration import Tokens, enumerate_outcomes
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity, target
from tests.support.loops import draft_request

PROMPT = (7, 7)
FORMS = get_args(Form)
LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def session(drafter: JacobiDrafter, vocab: int = 50) -> Any:
    return drafter.open(draft_request(PROMPT, Sampling(temperature=1.0), vocab=vocab))


def at(codes: list[int], left: int = 50) -> DraftContext:
    return DraftContext([*PROMPT, *codes], len(PROMPT), left)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize(("width", "branches"), [(None, 0), (4, 0), (None, 2)])
def test_the_coupled_form_writes_what_plain_decoding_writes(
    width: int | None, branches: int, settings: str, batch: int
) -> None:
    check_identity(JacobiDrafter(6, width=width, branches=branches), settings, batch, copies=False)


@pytest.mark.parametrize("form", FORMS)
def test_first_drafts_end_rows_with_the_line_end(form: Any) -> None:
    opened = session(JacobiDrafter(8, form, width=4, end=19))
    assert opened.propose(at([5]), 8).tokens.tolist() == [5, 5, 19, 5, 5, 5, 19, 5]


@pytest.mark.parametrize("drafter", [JacobiDrafter(8), [JacobiDrafter(5), "context"]])
def test_it_saves_forwards_where_distributions_hardly_depend_on_last_codes(drafter: Any) -> None:
    model, sampling = faint(), Sampling(temperature=1.0, seed=4)
    plain = Engine(model, drafter=None).generate(PROMPTS[0], sampling, **LONG)
    drafted = Engine(model, drafter=drafter, budget=8).generate(PROMPTS[0], sampling, **LONG)
    assert drafted.tokens == plain.tokens
    assert len(drafted.steps) < 0.7 * len(plain.steps)


def faint() -> Any:
    """Return a model whose distributions depend little on the text."""
    instance = copy.deepcopy(target())
    with torch.no_grad():
        instance.lm_head.weight *= 0.1
    return instance


def test_the_sampled_form_is_of_use_too() -> None:
    engine = Engine(faint(), drafter=JacobiDrafter(8, "sampled"), budget=8, rule="rejection")
    result = engine.generate(PROMPTS[0], Sampling(temperature=1.0, seed=4), **LONG)
    assert len(result.steps) < 30
    assert {step.tree.kind for step in result.steps[1:] if len(step.tree)} == {DraftKind.SAMPLED}
    assert result.label == "exact-for(distribution)"


def written(
    distributions: Distributions, noise: NoiseStream, drafter: JacobiDrafter, steps: int
) -> Tokens:
    """Return what some steps of drafter, rejection rule and observation emit on a toy target."""
    distribution = TokenDistribution(Sampling(temperature=1.0), noise)
    request = DraftRequest((), distributions.vocab, distribution=distribution)
    opened: JacobiSession = drafter.open(request)
    context: Tokens = ()
    rule = ChainRejection()
    for number in range(steps):
        room = DraftContext(list(context) or [0], 0 if context else 1, 50)
        tree = opened.propose(room, 4) if number else DraftTree.empty(DraftKind.SAMPLED)
        view = DistributionTarget(distributions, tree, context, noise)
        verdict = rule.judge(tree, view)
        fresh = emitted(tree, verdict)
        if number:
            # The view still has the distributions of the text before the verdict.
            opened.observe(Step(tree, verdict.path, fresh, view=view))  # type: ignore[arg-type]
        context = (*context, *fresh)
    return context


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("window", "steps", "length"), [(1, 4, 4), (2, 3, 4), (2, 4, 3)])
def test_sampling_keeps_the_distribution(seed: int, window: int, steps: int, length: int) -> None:
    """By enumeration; each sample has noise of its own, within a step and across steps."""
    distributions = Distributions(2 if window == 2 else 3, seed)
    drafter = JacobiDrafter(window, "sampled")
    outcomes = enumerate_outcomes(lambda noise: written(distributions, noise, drafter, steps))
    assert abs(sum(outcomes.values()) - 1.0) < 1e-9
    assert len(outcomes) > distributions.vocab**2
    assert distributions.variation(outcomes, length) < 1e-9


def test_drafts_with_a_wrong_q_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A q other than the distribution of the code biases the text, which the check detects."""
    propose = JacobiSession.propose

    def row_order(self: JacobiSession, context: DraftContext, budget: int) -> DraftTree:
        tree = propose(self, context, budget)
        if tree.q is not None:
            tree.q[: len(tree)] = 1.0 / tree.q.shape[1]
        return tree

    monkeypatch.setattr(JacobiSession, "propose", row_order)
    distributions = Distributions(3, 0)
    drafter = JacobiDrafter(1, "sampled")
    outcomes = enumerate_outcomes(lambda noise: written(distributions, noise, drafter, 3))
    assert distributions.variation(outcomes, 3) > 1e-3


def test_fresh_positions_start_from_the_left_or_from_above() -> None:
    codes = [1, 2, 3, 4, 5]  # rows of three: 1 2 3 / 4 5
    left = session(JacobiDrafter(4, width=3)).propose(at(codes), 9)
    assert left.tokens.tolist() == [5, 4, 4, 4]  # 4 5 [5] / [4] [4] [4]: a row begins from above
    assert session(JacobiDrafter(3)).propose(at(codes), 9).tokens.tolist() == [5, 5, 5]
    assert session(JacobiDrafter(3, width=3)).propose(at([9]), 9).tokens.tolist() == [9, 9, 9]


def test_windows_end_with_budget_and_picture() -> None:
    opened = session(JacobiDrafter(8))
    assert len(opened.propose(at([1]), 3)) == 3
    assert len(opened.propose(at([1], left=5), 9)) == 4
    assert len(opened.propose(at([1], left=1), 9)) == 0
    assert len(session(JacobiDrafter(8, "sampled")).propose(at([1], left=1), 9)) == 0


class NumberedView:
    """A view that answers 100 + node, and next best 50, 49, ... + node."""

    noise = NoiseStream(0)

    def choices(self, nodes: list[int], k: int) -> list[list[int]]:
        return [[100 + node, *range(50 + node, 51 + node - k, -1)] for node in nodes]


def test_codes_behind_the_text_come_from_the_last_forward() -> None:
    opened = session(JacobiDrafter(4), vocab=200)
    tree = opened.propose(at([1]), 9)
    assert tree.tokens.tolist() == [1, 1, 1, 1]
    opened.observe(Step(tree, (0,), (1, 5), view=NumberedView()))  # type: ignore[arg-type]
    # Nodes 1, 2 and 3 have choices for the indices 3, 4 and 5; index 6 is fresh.
    assert opened.propose(at([1, 1, 5]), 9).tokens.tolist() == [101, 102, 103, 103]


def test_next_best_codes_stand_beside_the_chain_where_there_is_room() -> None:
    opened = session(JacobiDrafter(3, branches=1), vocab=200)
    tree = opened.propose(at([1]), 9)
    assert len(tree) == 3, "nothing is known of fresh positions"
    opened.observe(Step(tree, (), (7,), view=NumberedView()))  # type: ignore[arg-type]
    for budget, size in ((9, 6), (4, 4), (3, 3)):
        tree = opened.propose(at([1, 7]), budget)
        check(tree, 200)
        assert tree.tokens.tolist()[:3] == [100, 101, 102], "the chain as without branches"
        assert len(tree) == size and tree.kind is DraftKind.COUPLED
    tree = opened.propose(at([1, 7]), 9)
    assert tree.parents.tolist()[3:] == [-1, 0, 1]
    assert tree.tokens.tolist()[3:] == [50, 51, 52]
    before = float(tree.accept_prob[3])
    opened.observe(Step(tree, (3,), (50, 9), view=NumberedView()))  # type: ignore[arg-type]
    assert opened._seconds[0] > _SECOND
    assert before == pytest.approx((1.0 - _RATES[1]) * _SECOND)


def test_jacobi_reads_the_verdicts_of_its_codes_in_a_fused_tree() -> None:
    opened = session(JacobiDrafter(3), vocab=200)
    opened.propose(at([1]), 9)
    mixed = DraftTree.build([8, 1, 9, 1, 4], [-1, -1, 0, 1, 3], "mixed", kind=DraftKind.COUPLED)
    opened.observe(Step(mixed, (), (8,), view=NumberedView()))  # type: ignore[arg-type]
    assert opened.propose(at([1, 8]), 9).tokens.tolist() == [101, 103, 103]


def test_without_a_view_it_starts_afresh() -> None:
    opened = session(JacobiDrafter(2), vocab=200)
    opened.observe(Step(opened.propose(at([1]), 9), (), (5,)))
    assert opened.propose(at([1, 6]), 9).tokens.tolist() == [6, 6]


def test_accept_prob_rises_with_accepted_codes() -> None:
    opened = session(JacobiDrafter(3), vocab=200)
    before = opened.propose(at([1]), 9).accept_prob.tolist()
    codes = [1]
    for _ in range(10):
        opened.observe(Step(opened.propose(at(codes), 9), (0, 1, 2), (1, 1, 1, 1)))
        codes += [1, 1, 1, 1]
    after = opened.propose(at(codes), 9).accept_prob.tolist()
    assert all(late > early for early, late in zip(before, after, strict=True))
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(
    "settings",
    [
        *({"window": 0}, {"form": "greedy"}, {"width": 0}),
        *({"branches": -1}, {"form": "sampled", "branches": 1}),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        JacobiDrafter(**settings)
