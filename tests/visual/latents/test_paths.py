"""The paths of committed latents under the target's law: 1 for lossless rules, not for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from ragspec.visual.drafting import JacobiDrafter
from ragspec.visual.latents import Horizon, Near, Schedule
from ragspec.visual.latents.judged import Watched, steps_of
from ragspec.visual.latents.paths import PathMoments, PathTarget
from ragspec.visual.latents.rules import Aligned, Path
from ragspec.visual.models.target import ConditionTable
from tests.support import tiny_latents as models

PICTURES = 200
STEPS = 5
DOUBTFUL = 4.0  # standard errors, over six figures


def moments(rule: Any, drafter: Any, strength: float = 0.4) -> tuple[PathMoments, PathTarget]:
    """Return the figures of tiny pictures of a rule, and the target that drew them."""
    made = models.model(strength=strength)
    rows = torch.arange(PICTURES) % models.CLASSES
    table = ConditionTable.of_rows(
        made.trunk.condition(rows).detach(), made.trunk.unconditional(1)[0].detach()
    )
    target = PathTarget(made, table, 2.0, Schedule(STEPS, 0.1))
    engine = Engine(target, None, drafter, budget=6, rule=Watched(rule), batch_size=50)
    drawn = engine.generate(
        [target.prompt(row) for row in range(PICTURES)],
        Sampling(temperature=1.0, seed=list(range(PICTURES))),
        max_new_tokens=models.SIDE**2,
        ignore_eos=True,
    )
    found = PathMoments(models.WIDTH)
    for each in drawn:
        found.add(target.squares(each.tokens, steps_of(rule, STEPS)))
    return found, target


def jacobi() -> JacobiDrafter:
    return JacobiDrafter(6, width=models.SIDE)


def test_plain_steps_are_the_noise() -> None:
    found, target = moments(Near(0.0), None)
    assert found.latents == PICTURES * models.SIDE**2 and len(found.by_step) == STEPS
    assert found.worst < DOUBTFUL and found.total_error < found.error < 0.02
    assert {target.outcome(number, Near(0.0)) for number in target.judged} == {0}


@pytest.mark.parametrize("s", [1, 3, 99])
def test_the_steps_of_lossless_rules_are_as_large_as_the_targets(s: int) -> None:
    rule = Aligned() if s == 1 else Horizon(s)
    found, target = moments(rule, jacobi())
    assert found.worst < DOUBTFUL
    outcomes = [target.outcome(number, rule) for number in target.judged]
    assert outcomes.count(1) > 100  # kept
    assert outcomes.count(2 if s == 1 else 3) > 50  # made after a rejection
    if s > 1:
        assert len(target.redrawn) == outcomes.count(3)
        assert all(len(path) == min(s, STEPS) + 1 for path in target.redrawn.values())


@pytest.mark.parametrize("s", [None, STEPS])
def test_drafts_that_are_always_kept_are_found(s: int | None) -> None:
    rule: Any = Near(1e9)
    if s is not None:  # whole paths of drafts are judged
        rule = Path()
        rule.log_ratio = lambda view, drafted, own: 0.0
    found, _ = moments(rule, jacobi())
    assert found.worst > 2 * DOUBTFUL
    assert found.by_step[0] > 1.0


@pytest.mark.parametrize("s", [1, 3, STEPS])
def test_drafts_are_kept_as_often_as_their_ratios_say(s: int) -> None:
    _, target = moments(Horizon(s), jacobi())
    numbers = [number for number, each in target.judged.items() if each.drafted is not None]
    ratios = target.ratios(numbers, s)
    assert not ratios[:, :s].isnan().any() and ratios[:, s:].isnan().all()
    chances = ratios[:, :s].sum(1).exp().clamp(max=1.0)
    kept = torch.tensor([target.judged[number].kept for number in numbers]).double()
    error = float((chances * (1.0 - chances)).sum().sqrt()) / len(numbers)
    assert abs(float((kept - chances).mean())) < DOUBTFUL * error < 0.1
    undrafted = [number for number in target.judged if number not in set(numbers)]
    assert undrafted and target.ratios(undrafted, s).isnan().all()
