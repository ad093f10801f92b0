"""The published acceptance, by enumeration: its law is the one that was worked out, and not p."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, RuleError
from ragspec.retrievers import ContextDrafter, Rapid
from ragspec.retrievers.rapid.steering import Published
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from tests.support import tiny
from tests.support.distributions import (
    Distributions,
    Grow,
    distribution_deviation,
    generate,
    grow,
    judged,
)
from tests.support.enumeration import enumerate_outcomes

CHAIN: Grow = partial(grow, widths=(1, 1))


def expected(p: torch.Tensor, q: torch.Tensor, eta: float) -> tuple[torch.Tensor, float]:
    """Return what comes out after one drafted token [V], and by how much it differs from p.

    By the formula: m + (1 - sum m) N[(p - m)+] with m = min(q, p_hat).
    """
    counts = (q >= 0.1 * q.max()).double()
    between = torch.softmax(p.log() + eta * counts * (q - p), -1)
    selected = torch.minimum(q, between)
    rest = (p - selected).clamp(min=0.0)
    rest = rest / rest.sum() if float(rest.sum()) > 0 else p
    return selected + (1.0 - selected.sum()) * rest, float((selected - p).clamp(min=0.0).sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eta", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("zeros", [False, True])
def test_its_distribution_is_the_formulas_and_its_drift_the_distance(
    seed: int, eta: float, zeros: bool
) -> None:
    distributions, rule = Distributions(5, seed, zeros=zeros), Published(eta)
    outcomes = enumerate_outcomes(lambda noise: generate(rule, distributions, noise, CHAIN))
    first = torch.zeros(5, dtype=torch.float64)
    for text, weight in outcomes.items():
        first[text[0]] += weight
    p, q = distributions.target(()), distributions.draft(())
    distribution, drift = expected(p, q, eta)
    assert torch.allclose(first, distribution, atol=1e-12)
    assert 0.5 * float((distribution - p).abs().sum()) == pytest.approx(drift, abs=1e-12)
    verdict = judged(
        rule, CHAIN(distributions, NoiseStream(seed), ()), distributions, NoiseStream(seed)
    )
    assert verdict.excess[0] == pytest.approx(drift, abs=1e-12)
    assert len(verdict.excess) == len(verdict.path) + 1


def test_without_eta_it_is_rejection_sampling_and_with_it_another_distribution() -> None:
    record = {
        eta: distribution_deviation(Published(eta), Distributions(4, 3, alike=0.3), CHAIN, 3)
        for eta in (0.0, 10.0)
    }
    assert record[0.0] < 1e-12 and record[10.0] > 0.01


def test_where_target_and_draft_agree_nothing_is_left_and_p_serves() -> None:
    distributions = Distributions(5, 2, alike=1.0)
    assert distribution_deviation(Published(10.0), distributions, CHAIN, 3) < 1e-12


def test_the_engine_takes_the_rule_of_its_drafter() -> None:
    target, prompt = tiny.model(dtype=torch.float64), tiny.prompt(20)
    sampling = Sampling(temperature=1.0, seed=3)
    drafter = Rapid(tiny.model(seed=1, dtype=torch.float64), mode="paper", eta=5.0)
    engine = Engine(target, tiny.tokenizer(), drafter, budget=4)
    result = engine.generate(prompt, sampling, max_new_tokens=30, draft_prompt=prompt[:8])
    assert engine.rule.name == "rapid-paper" and result.label == "approximate"
    assert result.report.accepted > 0 and (result.report.tv_excess or 0.0) > 0.0
    exact = Engine(target, tiny.tokenizer(), drafter, budget=4, rule="walk")
    plain = Engine(target, tiny.tokenizer(), None).generate(prompt, sampling, max_new_tokens=30)
    assert exact.generate(prompt, sampling, max_new_tokens=30).tokens == plain.tokens


def test_trees_and_coupled_drafts_are_refused() -> None:
    distributions = Distributions(4, 0)
    tree = grow(distributions, NoiseStream(0), (), (2,))
    with pytest.raises(RuleError, match="expected a chain"):
        judged(Published(), tree, distributions, NoiseStream(0))
    with pytest.raises(InputError, match="expected sampled chains"):
        Rapid(ContextDrafter(), mode="paper")
    both: list[Any] = [ContextDrafter(), Rapid(tiny.model(seed=1), mode="paper")]
    with pytest.raises(RuleError, match="'rapid-paper' cannot judge"):
        Engine(tiny.model(), tiny.tokenizer(), both)
