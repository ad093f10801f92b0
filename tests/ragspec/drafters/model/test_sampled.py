"""Drafts drawn from the draft model's distribution, and the texts of rejection rules over them."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.sampled import draw_distinct, draw_independent
from ragspec.rules.base import Rule
from ragspec.rules.block_verification import Block
from ragspec.rules.k_seq import KSeq
from ragspec.rules.rejection import ChainRejection, MultiStep, WithoutReplacement
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree
from tests.support import tiny
from tests.support.distributions import texts
from tests.support.enumeration import enumerate_outcomes
from tests.support.loops import draft_request

V, SAMPLES = 5, 300
PROMPT = [1, 0, 3, 2]
HOT = Sampling(temperature=0.9)
WITHOUT = "sampled-without-replacement"


def model(seed: int) -> torch.nn.Module:
    instance: torch.nn.Module = tiny.model(seed=seed, dtype=torch.float64, vocab_size=V)
    return instance


def distribution_of(seed: int, text: list[int]) -> torch.Tensor:
    """Return the model's distribution after the text at temperature 0.9: [V]."""
    return (tiny.logits(model(seed), text)[-1] / HOT.temperature).softmax(-1)


def propose(drafter: ModelDrafter, budget: int, seed: int = 0, left: int = 50) -> DraftTree:
    session = drafter.open(draft_request(PROMPT, HOT, seed, V))
    return session.propose(DraftContext(list(PROMPT), len(PROMPT), left), budget)


def test_independent_draws_follow_q() -> None:
    q = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    draws = [draw_independent(NoiseStream(s), 3, q, range(2)) for s in range(4000)]
    for rank in range(2):
        check_counts(Counter(draw[rank] for draw in draws), q)
    pairs = Counter((draw[0] == 0) * 2 + (draw[1] == 0) for draw in draws)
    check_counts(pairs, torch.full((4,), 0.25))


def test_distinct_draws_follow_q_without_the_earlier_draws() -> None:
    q = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    draws = [tuple(draw_distinct(NoiseStream(s), 3, q, -1, 4)) for s in range(4000)]
    assert all(len(set(draw)) == 3 for draw in draws), "a token of no probability was drawn"
    orders = [(a, b) for a in range(4) for b in range(4) if a != b]
    expected = torch.stack([q[a] * q[b] / (1 - q[a]) for a, b in orders])
    check_counts(Counter(orders.index((draw[0], draw[1])) for draw in draws), expected)


def test_every_node_draws_with_separate_noise() -> None:
    """The enumeration raises an error if two draws use the same noise."""
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)

    def distinct(noise: NoiseStream) -> tuple[int, ...]:
        sample = [draw_distinct(noise, 3, q, parent, 1) for parent in (-1, 0, 1)]
        return tuple(itertools.chain.from_iterable(sample))

    for tokens, weight in enumerate_outcomes(distinct).items():
        assert weight == pytest.approx(float(q[list(tokens)].prod()), abs=1e-12)
    for seed in range(20):  # the independent ones, by number: siblings and nodes below them
        noise = NoiseStream(seed)
        numbers = [noise.uniform(3, NoiseUse.DRAFT, node) for node in range(6)]
        one_by_one = [draw_independent(noise, 3, q, [node])[0] for node in range(6)]
        assert one_by_one == [int(n > 0.5) + int(n > 0.7) for n in numbers]
        assert one_by_one == draw_independent(noise, 3, q, range(6))


def check_counts(counts: Counter[int], p: torch.Tensor) -> None:
    """Compare counts with a distribution by chi-square, at six sigma."""
    n = sum(counts.values())
    cells = [(counts[i], n * float(x)) for i, x in enumerate(p.tolist()) if x > 0]
    assert sum(known for known, _ in cells) == n
    statistic = sum((known - selection) ** 2 / selection for known, selection in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize(
    ("width", "mode", "parents"),
    [
        (None, "sampled", [-1, 0, 1, 2, 3, 4, 5]),
        (3, "sampled", [-1, -1, -1, 0, 1, 2, 3]),
        ((2, 2), "sampled", [-1, -1, 0, 0, 1, 1, 2]),
        ((2, 2), WITHOUT, [-1, -1, 0, 0, 1, 1, 2]),
    ],
)
def test_the_shape_is_known_before_anything_is_sampled(
    width: int | tuple[int, ...] | None, mode: str, parents: list[int]
) -> None:
    drafter = ModelDrafter(model(1), width=width, mode=mode)
    trees = [propose(drafter, 7, seed) for seed in range(12)]
    assert all(tree.parents.tolist() == parents for tree in trees)
    assert len({tuple(tree.tokens.tolist()) for tree in trees}) > 6
    assert all((tree.accept_prob == trees[0].accept_prob).all() for tree in trees)
    assert {tree.kind for tree in trees} == {drafter.kind} == {DraftKind(mode)}


@pytest.mark.parametrize("mode", ["sampled", WITHOUT])
def test_q_is_the_distribution_of_the_draft_model_after_every_node(mode: str) -> None:
    for seed in range(6):  # with equal siblings in some of them
        tree = propose(ModelDrafter(model(1), width=(3, 2), mode=mode), 20, seed)
        assert tree.q is not None and tree.q.shape == (21, V)
        for parent in set(tree.parents.tolist()):
            expected = distribution_of(1, [*PROMPT, *texts(tree)[parent]])
            torch.testing.assert_close(tree.q[parent + 1], expected, rtol=0, atol=1e-9)


def test_a_draft_has_new_numbers_at_every_root() -> None:
    drafter = ModelDrafter(model(1), mode="sampled", depth=1)
    session = drafter.open(draft_request(PROMPT, HOT, 5, V))
    sample: list[int] = []
    text = list(PROMPT)
    for _ in range(12):  # the same text every time, but for the count of generated tokens
        context = DraftContext(text, len(PROMPT) - len(sample), 50)
        sample.append(int(session.propose(context, 1).tokens[0]))
    assert len(set(sample)) > 1


RULES: list[tuple[Rule, str, int | tuple[int, ...]]] = [
    (ChainRejection(), "sampled", 1),
    (Block(), "sampled", 1),
    (MultiStep(), "sampled", (2, 2)),
    (KSeq(), "sampled", 3),
    (WithoutReplacement(), WITHOUT, (2, 2)),
]


@pytest.mark.parametrize(("rule", "mode", "width"), RULES, ids=lambda v: getattr(v, "name", str(v)))
def test_the_text_follows_the_distribution_of_the_target(
    rule: Rule, mode: str, width: int | tuple[int, ...]
) -> None:
    drafter = ModelDrafter(model(1), width=width, mode=mode)
    engine = Engine(model(0), drafter=drafter, rule=rule, budget=4, max_batch_size=64)
    sampling = replace(HOT, n=SAMPLES, seed=0)
    results = engine.generate(PROMPT, sampling, max_new_tokens=3, ignore_eos=True)
    counts = Counter(each.tokens[1] * V + each.tokens[2] for each in results)
    assert sum(each.report.accepted for each in results) > SAMPLES / 4
    expected = distribution_of_pairs()
    rare = expected * SAMPLES < 3  # counted together
    merged = Counter({i: counts[i] for i in range(V * V) if not rare[i]})
    merged[V * V] = sum(counts[i] for i in range(V * V) if rare[i])
    distribution = torch.where(rare, 0.0, expected)
    check_counts(merged, torch.cat([distribution, expected[rare].sum()[None]]))


def distribution_of_pairs() -> torch.Tensor:
    """Return the target's distribution of the second and third token: [V * V]."""
    pairs = torch.zeros(V, V, dtype=torch.float64)
    for first, p in enumerate(distribution_of(0, PROMPT).tolist()):
        for second, then in enumerate(distribution_of(0, [*PROMPT, first]).tolist()):
            pairs[second] += p * then * distribution_of(0, [*PROMPT, first, second])
    return pairs.flatten()
