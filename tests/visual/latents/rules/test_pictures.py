"""The rules over latents: laws by Kolmogorov and Smirnov, pictures by equality."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, RuleError
from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.drafting import JacobiDrafter
from ragspec.visual.latents import Horizon, LatentTarget, Near
from ragspec.visual.latents.target import LatentView
from tests.support import tiny
from tests.support import tiny_latents as models

SAMPLES = 2000
CODES = models.SIDE**2


class FreshDraw(Horizon):
    """A mutant: after a rejection the target's own latent, whose noise the draft shares."""

    def _reflected(self, view: LatentView, drafted: int, own: int) -> torch.Tensor:
        return view.target.table.latents[own]

    def _residual(self, view: LatentView, index: int, drafted: int, own: int) -> torch.Tensor:
        return view.target.table.latents[own]


class Lenient(Horizon):
    """A mutant: keeps all that is nearly as likely."""

    @torch.no_grad()
    def _log_ratio(self, view: LatentView, drafted: int, own: int) -> float:
        return super()._log_ratio(view, drafted, own) + 2.0


class Linear(torch.nn.Module):
    """A head whose chain is linear and Gaussian."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(5)
        self.state = torch.nn.Linear(hidden, models.WIDTH, bias=False).double()
        self.state.weight.data = 0.15 * torch.randn(width, hidden, generator=drawn).double()
        self.write = torch.nn.Linear(1, width).double()

    def denoise(self, noisy: Any, times: Any, told: Any) -> torch.Tensor:
        out: torch.Tensor = 0.4 * noisy * times[:, None] + told
        return out


def view_of(target: LatentTarget, state: torch.Tensor, tree: DraftTree, seed: int) -> LatentView:
    """Return the view of a root in that state [C * H], with the tree below an empty text."""
    law = TokenLaw(Sampling(temperature=1.0), NoiseStream(seed), 1)
    states = state.expand(len(tree) + 1, -1)
    return target.open_view(states, tree, law, StopRule(frozenset(), CODES).open(None), [7])


@torch.no_grad()
def emitted(rule: Horizon, target: LatentTarget, p: Any, q: Any, count: int) -> torch.Tensor:
    """Return what a rule puts first where the draft was drawn in another state: f64 [count, D]."""
    befores = [view_of(target, q, DraftTree.empty(), seed) for seed in range(count)]
    target.draw(befores)
    drafted = [view.token(-1) for view in befores]
    trees = [DraftTree.chain([each], "jacobi", kind=DraftKind.COUPLED) for each in drafted]
    views = [view_of(target, p, tree, seed) for seed, tree in enumerate(trees)]
    target.draw(views)
    verdicts = [rule.judge(tree, view) for tree, view in zip(trees, views, strict=True)]
    first = [
        each if verdict.path else verdict.token
        for each, verdict in zip(drafted, verdicts, strict=True)
    ]
    return target.table.latents[torch.tensor(first)]


@torch.no_grad()
def expected(target: LatentTarget, p: Any, count: int) -> torch.Tensor:
    """Return latents of the law itself, by other seeds: f64 [count, D]."""
    told = target.sampler.told(p.reshape(1, target.copies, -1)).expand(count, -1, -1)
    noise = torch.cat([target.noise(NoiseStream(10**6 + seed), [0]) for seed in range(count)])
    return target.sampler.draw(told, noise).latents


def differs(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the least p-value of two samples [n, D], over numbers and a few projections."""
    drawn = torch.Generator().manual_seed(3)
    ways = torch.cat([torch.eye(first.shape[1]), torch.randn(4, first.shape[1], generator=drawn)])
    values = []
    for way in ways.double():
        a, b = (first @ way).sort().values, (second @ way).sort().values
        both = torch.cat([a, b])
        gap = torch.searchsorted(a, both, right=True) / len(a) - torch.searchsorted(
            b, both, right=True
        ) / len(b)
        size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
        values.append(2.0 * math.exp(-2.0 * (size * float(gap.abs().max())) ** 2))
    return min(values)


def states(target: LatentTarget, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(11)
    hidden = 32 * target.copies
    p = torch.randn(hidden, generator=drawn, dtype=torch.float64)
    return p, p + apart * torch.randn(hidden, generator=drawn, dtype=torch.float64)


def chain(kind: str, scale: float = 1.0) -> LatentTarget:
    made = models.target(models.model(), scale=scale)
    if kind == "linear":
        made.sampler.head = Linear(models.WIDTH, 32)  # type: ignore[assignment]
        made.table.told = made.table.told.new_zeros(1024, made.copies, models.WIDTH)
    return made


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
@pytest.mark.parametrize("s", [1, 2, 5])
def test_what_comes_out_follows_the_targets_law(kind: str, s: int) -> None:
    target = chain(kind)
    p, q = states(target, 0.15)
    rule, plain = Horizon(s), expected(target, p, SAMPLES)
    assert differs(emitted(rule, target, p, q, SAMPLES), plain) > 1e-4
    assert differs(expected(target, q, SAMPLES), plain) < 1e-6  # the draft's law is another


@pytest.mark.parametrize("mutant", [FreshDraw(1), FreshDraw(5), Lenient(2)])
def test_a_rule_that_breaks_the_coupling_is_found(mutant: Horizon) -> None:
    target = chain("linear")
    p, q = states(target, 0.15)
    found = emitted(mutant, target, p, q, SAMPLES)
    assert differs(found, expected(target, p, SAMPLES)) < 1e-4


def test_guided_laws_hold_too() -> None:
    target = chain("nonlinear", scale=2.0)
    assert target.copies == 2
    p, q = states(target, 0.1)
    assert differs(emitted(Horizon(2), target, p, q, 1500), expected(target, p, 1500)) > 1e-4


def generate(rule: Any, drafter: Any, rows: int = 3, seed: int = 4, **given: Any) -> Any:
    target = models.target(models.model(strength=0.2), rows, scale=2.0)
    engine = Engine(target, None, drafter, budget=6, rule=rule, **given)
    found = engine.generate(
        [target.prompt(row) for row in range(rows)],
        Sampling(temperature=1.0, seed=list(range(seed, seed + rows))),
        max_new_tokens=CODES,
        ignore_eos=True,
    )
    latents = torch.stack([target.table.latents[torch.tensor(each.tokens)] for each in found])
    return latents, found


def test_plain_latents_are_those_of_whole_forwards() -> None:
    latents, found = generate("walk", None)
    made = models.model(strength=0.2)
    target = models.target(made, 3, scale=2.0)
    given = made.trunk.condition(torch.arange(3))
    none = made.trunk.unconditional(3)
    with torch.no_grad():
        both = [made.states(latents, condition) for condition in (given, none)]
        for row in range(3):
            told = target.sampler.told(torch.stack([states[row] for states in both], 1))
            noise = target.noise(NoiseStream(4 + row), range(CODES))
            again = target.sampler.draw(told, noise).latents
            assert torch.allclose(again, latents[row], atol=1e-9)
    assert found[0].label == "exact" and found[0].report.forward_passes == CODES


def test_near_0_is_the_plain_picture_and_some_way_off_is_near() -> None:
    plain, _ = generate("walk", None)
    same, found = generate(Near(0.0), JacobiDrafter(6, width=models.SIDE))
    assert torch.allclose(same, plain, atol=1e-9) and found[0].label == "exact"
    close, found = generate(Near(1e-6), JacobiDrafter(6, width=models.SIDE))
    assert torch.allclose(close, plain, atol=1e-4) and found[0].label == "approximate"
    rough, quick = generate(Near(1.0), JacobiDrafter(6, width=models.SIDE))
    assert sum(each.report.accepted for each in quick) > 0
    assert not torch.allclose(rough, plain, atol=1e-3)


@pytest.mark.parametrize("rule", [Near(0.3), Horizon(1), Horizon(3), Horizon(99)])
def test_a_seed_fixes_the_latents_whatever_else_is_drawn(rule: Any) -> None:
    drafter = JacobiDrafter(6, width=models.SIDE)
    first, found = generate(rule, drafter)
    again, _ = generate(rule, drafter)
    one_by_one, _ = generate(rule, drafter, batch_size=1)
    assert torch.equal(first, again) and torch.allclose(first, one_by_one, atol=1e-9)
    alone, _ = generate(rule, drafter, rows=1)
    assert torch.allclose(first[:1], alone, atol=1e-9)
    assert sum(each.report.accepted for each in found) > 0
    assert found[0].label == rule.label


def test_what_no_forward_drew_for_its_index_is_no_draft() -> None:
    target = models.target(models.model())
    p, _ = states(target, 0.0)
    before = view_of(target, p, DraftTree.empty(), 1)
    number = before.token(-1)
    target.table.indices[number] = 5  # drawn for another place
    tree = DraftTree.chain([number], "jacobi", kind=DraftKind.COUPLED)
    for rule in (Near(10.0), Horizon(1)):
        assert not rule.judge(tree, view_of(target, p, tree, 1)).path


@pytest.mark.parametrize("make", [lambda: Near(-1.0), lambda: Near(math.nan), lambda: Horizon(0)])
def test_bad_settings_are_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def test_rules_of_the_other_kind_are_refused() -> None:
    small = (tiny.model(seed=1), tiny.tokenizer())
    text = Engine(tiny.model(), tiny.tokenizer(), None, small, rule=Near(0.1))
    with pytest.raises(RuleError, match="expected one of continuous latents"):
        text.generate(tiny.prompt() * 2, max_new_tokens=9, ignore_eos=True)
    with pytest.raises(RuleError, match="over tables of probabilities"):
        generate("rejection", JacobiDrafter(4, "sampled", width=3))
