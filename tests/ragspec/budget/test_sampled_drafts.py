"""The distribution of sampled text under every budget policy, by enumeration of every draw.

A step drafts with `SampledGrowth`, cuts the draft as the loop does, judges it by a rule, and lets
the policy learn from it. Claims may reveal the sampled tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest
import torch

from ragspec.budget import goodput
from ragspec.budget.base import BudgetPolicy, BudgetSession, FixedBudget
from ragspec.budget.forward_cost import SIZES, ForwardCost
from ragspec.budget.goodput import AutoBudget, GoodputSession
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.growth import DraftState
from ragspec.drafters.model.sampled import SampledGrowth
from ragspec.rules.base import Rule, Step
from ragspec.rules.block_verification import Block
from ragspec.rules.k_seq import KSeq
from ragspec.rules.rejection import ChainRejection, MultiStep, WithoutReplacement
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees import operations
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import limit_depth
from ragspec.verification.path_rows import PathSession, PathTarget
from tests.support.distributions import Distributions, DistributionTarget, draw_by_bounds, emitted
from tests.support.enumeration import Tokens, enumerate_outcomes

EXACT, KNOWN = 1e-12, 1e-3
INDEPENDENT, DISTINCT = DraftKind.SAMPLED, DraftKind.SAMPLED_WITHOUT_REPLACEMENT
LENGTH = 128


def curve(*milliseconds: float) -> ForwardCost:
    """Return the cost of forwards of 1, 2, ... rows; further rows cost as the last."""
    return ForwardCost({n: milliseconds[min(n, len(milliseconds)) - 1] / 1000 for n in SIZES})


CURVES = {
    "dear third row": (10.0, 10.1, 30.0),
    "dear second row": (10.0, 13.0, 13.1, 13.2, 30.0),
    "dear fourth row": (10.0, 10.1, 10.2, 30.0),
    "every row alike": (10.0, 13.0, 16.0, 19.0, 22.0),
    "flat": (10.0, 10.01),
}


@dataclass
class DistributionCache:
    """The cache of a draft model that is a table of distributions."""

    distributions: Distributions
    context: Tokens
    texts: list[Tokens] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        return len(self.texts)

    def lease(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.distributions.draft(self.context).log()[None]

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> torch.Tensor:
        start = len(self.texts)
        for token, slot in zip(tokens, above, strict=True):
            self.texts.append((*(self.texts[slot] if slot >= 0 else ()), token))
        rows = [self.distributions.draft((*self.context, *text)) for text in self.texts[start:]]
        return torch.stack(rows).log()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@pytest.fixture(autouse=True)
def enumerable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragspec.drafters.model.sampled.draw_independent", draw_by_bounds)


@dataclass
class Sampled(Drafter, DraftSession):
    """A drafter that draws its whole tree, whatever the budget.

    telling: its claims are the probabilities of the tokens that it drew.
    """

    truth: Distributions
    kind: DraftKind
    widths: tuple[int, ...] = ()
    telling: bool = False
    noise: NoiseStream = field(default_factory=lambda: NoiseStream(0))
    name: str = "sampled"

    def open(self, request: DraftRequest) -> Sampled:
        return self

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        text = tuple(context.tokens[context.prompt_length :])
        distribution = TokenDistribution(
            Sampling(temperature=1.0), self.noise, context.prompt_length
        )
        growth = SampledGrowth(distribution, self.name, self.widths, self.kind)
        cache = cast(DraftCache, DistributionCache(self.truth, text))
        tree = growth.grow(DraftState(cache, context, 64, len(self.widths)))
        return with_claims(tree) if self.telling else tree


def with_claims(tree: DraftTree) -> DraftTree:
    assert tree.q is not None
    accept_prob: list[float] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        above = 1.0 if parent < 0 else accept_prob[parent]
        accept_prob.append(above * float(tree.q[parent + 1, token]))
    return replace(tree, accept_prob=np.asarray(accept_prob, dtype=np.float32))


def draft(
    session: BudgetSession, drafter: Sampled, text: Tokens, chains: bool = False
) -> DraftTree:
    """Return what the loop would verify, by a target of trees, or of chains."""
    context = DraftContext([7, *text], 1, 50, session)
    if not (allowed := session.allowance(LENGTH)):
        return DraftTree.empty(drafter.kind)
    request = DraftRequest((7,), drafter.truth.vocab)
    fused = Fuse([drafter]).open(request)
    tree = fused.propose(context, allowed)
    assert not fused.faults and len(tree), "the drafter failed, so the test shows nothing"
    tree = session.fit(limit_depth(tree, context.remaining - 1))
    if not chains:
        return tree
    target = PathTarget.__new__(PathTarget)
    target.border = None
    return PathSession(target, 1).trim_draft(tree)


def trained(policy: BudgetPolicy, drafter: Sampled, cost: ForwardCost) -> BudgetSession:
    """Return a row of the policy in which the last draw was right and the first hardly ever."""
    session = policy.open(cost)
    for seed in range(40):
        drafter = replace(drafter, noise=NoiseStream(seed))
        whole = drafter.propose(DraftContext([7], 1, 50), 64)
        tree = draft(session, drafter, ())
        node, text = -1, []
        while seed % 8 and (below := np.flatnonzero(whole.parents == node)).size:
            node = int(below[-1])
            text.append(int(whole.tokens[node]))
        if drafter.widths == (1, 1) and seed % 2:
            text = text[:1]  # a chain is right by halves
        session.observe(Step(tree, (), (*text, 99)))
    return session


def row_of(policy: str, cost: str, drafter: Sampled) -> BudgetSession:
    """Return a row that knows its past: a fixed number of nodes, or "auto"."""
    budget = FixedBudget(int(policy)) if policy.isdigit() else AutoBudget()
    return trained(budget, drafter, curve(*CURVES[cost]))


def bias(
    session: BudgetSession, rule: Rule, drafter: Sampled, steps: int = 1, chains: bool = False
) -> float:
    """Return the total variation between the text and the target's distribution."""

    def run(noise: NoiseStream) -> Tokens:
        row = copy.deepcopy(session)
        text: Tokens = ()
        for _ in range(steps):
            tree = draft(row, replace(drafter, noise=noise), text, chains)
            verdict = rule.judge(tree, DistributionTarget(drafter.truth, tree, text, noise))
            new = emitted(tree, verdict)
            row.observe(Step(tree, verdict.path, new))
            text = (*text, *new)
        return text

    outcomes = enumerate_outcomes(run)
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=EXACT)
    return drafter.truth.variation(outcomes, steps * len(drafter.widths) + 1)


DISTRIBUTIONS = Distributions(3, 25, alike=0.0)
RULES: list[tuple[Rule, DraftKind, tuple[int, ...]]] = [
    *((rule, INDEPENDENT, (1, 1)) for rule in (ChainRejection(), Block())),
    *((rule, INDEPENDENT, widths) for rule in (MultiStep(), KSeq()) for widths in ((2,), (2, 1))),
    *((WithoutReplacement(), DISTINCT, widths) for widths in ((2,), (2, 1))),
]
AUTO = ("dear third row", "dear second row", "every row alike", "dear fourth row")
POLICIES = [*((number, "flat") for number in "0123"), *(("auto", costs) for costs in AUTO)]


def name_of(value: object) -> str:
    """Return the name of a rule or kind in a test's own."""
    return str(value) if isinstance(value, DraftKind) else str(getattr(value, "name", value))


each_rule = pytest.mark.parametrize(("rule", "kind", "widths"), RULES, ids=name_of)


@pytest.mark.parametrize(
    ("rule", "kind", "widths", "policy", "cost"),
    [
        (*case, *policy)
        for case in RULES
        for policy in POLICIES
        if case[2] != (2, 1) or policy in [("3", "flat"), ("auto", "every row alike")]  # long ones
    ],
    ids=name_of,
)
def test_no_policy_changes_the_distribution(
    rule: Rule, kind: DraftKind, widths: tuple[int, ...], policy: str, cost: str
) -> None:
    for telling in (False, True) if kind is DISTINCT else (True,):
        drafter = Sampled(DISTRIBUTIONS, kind, widths, telling)
        assert bias(row_of(policy, cost, drafter), rule, drafter) <= EXACT


@each_rule
def test_drafts_that_are_pruned_freely_change_the_distribution(
    rule: Rule, kind: DraftKind, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prune_freely(monkeypatch)
    assert known(rule, kind, widths, POLICIES)


def known(
    rule: Rule, kind: DraftKind, widths: tuple[int, ...], policies: Sequence[tuple[str, str]]
) -> bool:
    """Return whether some policy biases the text if claims reveal the sampled tokens."""
    drafter = Sampled(DISTRIBUTIONS, kind, widths, telling=True)
    return any(bias(row_of(*policy, drafter), rule, drafter) > KNOWN for policy in policies)


def prune_freely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sampled drafts like all others: the mutant of all tests here."""
    for module in (operations, goodput):
        monkeypatch.setattr(module, "SAMPLED_KINDS", frozenset())


@pytest.mark.parametrize(
    ("rule", "kind", "widths"),
    [case for case in RULES if case[1] is INDEPENDENT and case[2] != (2,)],
)
def test_a_size_chosen_after_the_draw_changes_the_distribution(
    rule: Rule, kind: DraftKind, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GoodputSession, "_before_draw", lambda self, size, last: size)
    assert known(rule, kind, widths, [each for each in POLICIES if not each[0].isdigit()])


def test_sizes_do_not_follow_the_width_of_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without replacement a distribution of one token has one child: the shape reveals tokens."""
    distributions = Distributions(3, 5).fix("target", {(): (0.45, 0.45, 0.1)})
    drafts = {(): (0.1, 0.3, 0.6), (0,): (1, 0, 0), (1,): (0.2, 0.3, 0.5)}
    distributions.fix("draft", drafts)
    drafter = Sampled(distributions, DISTINCT, (2, 2), telling=False)

    def opened() -> BudgetSession:
        """Return a row for which one node pays, or all six where there are so many."""
        return AutoBudget().open(curve(10.0, 10.1, 20.0))

    row, sizes = opened(), set()
    for seed in range(8):
        tree = draft(row, replace(drafter, noise=NoiseStream(seed)), ())
        sizes.add(len(tree))
        row.observe(Step(tree, (), (99,)))
    assert sizes >= {1, 6}, "the policy never had the choice"
    for each in (opened(), row):
        assert bias(each, WithoutReplacement(), drafter) <= EXACT
    monkeypatch.setattr(GoodputSession, "_before_draw", lambda self, size, last: size)
    assert bias(opened(), WithoutReplacement(), drafter) > KNOWN


@pytest.mark.parametrize("rule", [MultiStep(), WithoutReplacement()], ids=lambda rule: rule.name)
def test_a_step_may_learn_the_size_of_the_next_draft(rule: Rule) -> None:
    drafter = Sampled(DISTRIBUTIONS, next(iter(rule.accepts)), (2,), telling=True)
    assert bias(row_of("auto", "every row alike", drafter), rule, drafter, steps=2) <= EXACT


def test_a_target_of_chains_keeps_those_sampled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Sampled(DISTRIBUTIONS, DISTINCT, (3,), telling=False)
    row = row_of("auto", "dear third row", drafter)
    assert bias(row, WithoutReplacement(), drafter, chains=True) <= EXACT
    prune_freely(monkeypatch)
    row = row_of("auto", "dear third row", drafter)
    assert bias(row, WithoutReplacement(), drafter, chains=True) > KNOWN
