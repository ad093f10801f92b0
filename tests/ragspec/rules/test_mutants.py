"""Mutants: every broken rule, drafter or noise is caught by checks that the sound one passes.

A broken rule is the rule's own source with one place changed, loaded beside the original.
"""

from functools import partial
from types import ModuleType

import pytest
import torch

from ragspec.rules import block_verification as block
from ragspec.rules import k_seq as kseq
from ragspec.rules import rejection
from ragspec.rules import walk as rules
from ragspec.rules.base import Rule
from ragspec.rules.k_seq import KSeq
from ragspec.rules.rejection import ChainRejection, MultiStep, WithoutReplacement
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind
from tests.support.codes import broken, likeliest
from tests.support.distributions import (
    Distributions,
    Draw,
    Place,
    draw_distinct,
    draw_independent,
    grow,
)
from tests.support.enumeration import NoiseUsedTwiceError, Tokens

EXACT = 1e-12
KNOWN = 1e-3
DISTINCT = DraftKind.SAMPLED_WITHOUT_REPLACEMENT


def worst(rule: Rule, widths: Tokens, draw: Draw | None = None, zeros: bool = False) -> float:
    """Return the largest deviation of a rule over a few random target and draft models.

    draw: None for draws of the kind that the rule accepts.
    """
    (kind,) = rule.accepts
    draw = draw or (draw_distinct if kind is DISTINCT else draw_independent)
    tree = partial(grow, widths=widths, draw=draw, kind=kind)
    return max(
        distributions.deviation(rule, tree, len(widths) + 1)
        for distributions in [Distributions(3, seed, alike=0.0, zeros=zeros) for seed in range(3)]
    )


RATIO = "ratio(p, q, int(tree.tokens[depth]))"
ACCEPTING = "uniform(target.index(depth), NoiseUse.ACCEPT)"
BROKEN_RULES: list[tuple[ModuleType, str, Tokens, str, str]] = [
    # module, class, widths of the draft, the source, what it is broken into
    (rejection, "ChainRejection", (1,), "p = normalised(p - q, p)", "pass"),
    (rejection, "ChainRejection", (1, 1), "tree.q[node + 1]", "tree.q[node]"),
    (rejection, "ChainRejection", (1,), "float(p[token]) / chance", "float(p[token])"),
    (rejection, "MultiStep", (2,), "weights / total if", "weights if"),
    (rejection, "MultiStep", (2,), "weights.clamp(min=0.0)", "weights.abs()"),
    (rejection, "WithoutReplacement", (2,), "q = q / q.sum()", "pass"),
    (rejection, "WithoutReplacement", (2,), "q = q.index_fill", "q.index_fill"),
    (kseq, "KSeq", (2,), "rho = division_factor(p, q, k)", "rho = 1.0"),
    (kseq, "KSeq", (2,), "p - overlap * _tries(float(overlap.sum()), k)", "p - q"),
    (block, "Block", (1, 1), "left = weight * p - q", "left = p - q"),
    (block, "Block", (1, 1), "< _chance(left, weight)", "< weight"),
    (block, "Block", (1, 1), "spare + 1.0 - weight", "1.0"),
    (block, "Block", (1, 1), "min(1.0, weight * ratio(", "min(1.0, ratio("),
    (block, "Block", (1, 1), f"min(1.0, weight * {RATIO})", f"weight * {RATIO}"),
]


@pytest.mark.parametrize(("module", "name", "widths", "old", "new"), BROKEN_RULES)
def test_broken_rules_change_the_distribution(
    module: ModuleType, name: str, widths: Tokens, old: str, new: str
) -> None:
    assert worst(getattr(module, name)(), widths) <= EXACT
    assert worst(getattr(broken(module, old, new), name)(), widths) > KNOWN


@pytest.mark.parametrize(
    ("module", "name", "old"),
    [
        (rejection, "ChainRejection", "uniform(rank) < "),
        (rejection, "WithoutReplacement", "uniform(rank) < "),
        (kseq, "KSeq", "uniform(rank) < "),
        (block, "Block", "uniform(nodes) < "),
    ],
)
def test_lax_comparisons_are_detected(module: ModuleType, name: str, old: str) -> None:
    assert worst(getattr(module, name)(), (1,), zeros=True) <= EXACT
    lax = getattr(broken(module, old, old.replace("<", "<=")), name)()
    with pytest.raises(AssertionError, match="has no probability"):
        worst(lax, (1,), zeros=True)


BROKEN_NOISE: list[tuple[ModuleType, str, Tokens, str, str]] = [
    (rejection, "MultiStep", (2,), "uniform(rank)", "uniform(0)"),
    (rejection, "ChainRejection", (1,), "index, NoiseUse.ACCEPT", "index, NoiseUse.DRAFT"),
    (kseq, "KSeq", (2,), "uniform(rank)", "uniform(0)"),
    (block, "Block", (1, 1), "uniform(depth) <", "uniform(nodes) <"),
    (block, "Block", (1, 1, 1), "uniform(depth) <", f"target.noise.{ACCEPTING} <"),
    (rules, "Walk", (1, 1), "target.token(node)", "target.token(-1)"),
]


@pytest.mark.parametrize(("module", "name", "widths", "old", "new"), BROKEN_NOISE)
def test_rules_that_use_noise_twice_are_detected(
    module: ModuleType, name: str, widths: Tokens, old: str, new: str
) -> None:
    def deviation(rule: Rule) -> float:
        tree = partial(grow, widths=widths)
        return Distributions(2, 1).deviation(rule, tree, length=4, steps=2)

    assert deviation(getattr(module, name)()) <= EXACT
    with pytest.raises(NoiseUsedTwiceError):
        deviation(getattr(broken(module, old, new), name)())


def resorted(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Draws without replacement, put into another order."""
    return sorted(draw_distinct(noise, place, q, k), key=lambda token: -float(q[token]))


def pruned(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Draws of which the improbable ones are dropped."""
    return [token for token in draw_independent(noise, place, q, k) if float(q[token]) > 0.3]


def without_twins(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Independent draws of which the second of two equal ones is dropped."""
    return list(dict.fromkeys(draw_independent(noise, place, q, k)))


@pytest.mark.parametrize(
    ("rule", "draw", "width"),
    [
        *((rule, likeliest, 2) for rule in (MultiStep(), KSeq(), WithoutReplacement())),
        *((ChainRejection(), draw, 1) for draw in (likeliest, pruned)),
        (WithoutReplacement(), resorted, 2),
        *((rule, without_twins, 2) for rule in (MultiStep(), KSeq())),
        (MultiStep(), draw_distinct, 2),
    ],
)
def test_misdeclared_drafts_change_the_distribution(rule: Rule, draw: Draw, width: int) -> None:
    assert worst(rule, (width,)) <= EXACT
    assert worst(rule, (width,), draw) > KNOWN


def target_choice(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """One draw with the noise from which the target draws its own token."""
    return [int(torch.argmax(q.log() + noise.gumbel([place.index], torch.arange(len(q)))))]


def test_draft_and_residual_must_not_share_a_stream() -> None:
    distributions = Distributions(3, 2).fix("target", {(): (0, 0.75, 0.25)})
    distributions.fix("draft", {(): (0.5, 0.5, 0)})
    tree = partial(grow, widths=(1,), draw=target_choice)
    sharing = broken(rejection, "NoiseUse.RESIDUAL", "NoiseUse.TARGET").ChainRejection()
    result, bound = distributions.sampled_deviation(ChainRejection(), tree, length=1, samples=3000)
    assert result <= bound
    result, bound = distributions.sampled_deviation(sharing, tree, length=1, samples=3000)
    assert result > bound
    assert distributions.deviation(ChainRejection(), tree, length=2) <= EXACT
    with pytest.raises(NoiseUsedTwiceError):
        distributions.deviation(sharing, tree, length=2)


def test_a_walk_that_emits_the_draft_is_detected() -> None:
    lax = broken(rules, "tokens[each] == token)", "tokens[each] == min(token, 1))").Walk()
    tree = partial(grow, widths=(2,), draw=likeliest, kind=DraftKind.DETERMINISTIC)
    distributions = Distributions(3, 0)
    assert distributions.deviation(rules.Walk(), tree, length=2) <= EXACT
    assert distributions.deviation(lax, tree, length=2) > KNOWN
