"""Rejection rules keep the distribution, by enumeration of every draw; then each rule alone."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped, unused-ignore]

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.errors import RuleError
from ragspec.rules.base import Rule
from ragspec.rules.block_verification import Block
from ragspec.rules.k_seq import KSeq
from ragspec.rules.rejection import ChainRejection, MultiStep, WithoutReplacement
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import select
from tests.support import tiny
from tests.support.codes import sampled as independent
from tests.support.distributions import Distributions, Grow, draw_distinct, grow
from tests.support.enumeration import Tokens

EXACT = 1e-12
PROMPT = [1, 2]
TEXTS = torch.tensor(list(itertools.product(range(5), repeat=3)))


def distinct(*widths: int) -> Grow:
    kind = DraftKind.SAMPLED_WITHOUT_REPLACEMENT
    return partial(grow, widths=widths, draw=draw_distinct, kind=kind)


def unfinished(nodes: int, *widths: int) -> Grow:
    """Return trees of the first nodes alone, as a budget leaves them: leaves have no q."""

    def cut(
        distributions: Distributions, noise: NoiseStream, text: Tokens, widths: Sequence[int]
    ) -> DraftTree:
        tree = select(grow(distributions, noise, text, widths), range(nodes))
        leaves = sorted({*range(nodes)} - {*tree.parents.tolist()})
        assert tree.q is not None
        return replace(tree, q=tree.q.index_fill(0, torch.tensor(leaves) + 1, 0.0))

    return partial(cut, widths=widths)


SHAPES: list[tuple[Rule, dict[int, Sequence[Grow]]]] = [  # by the size of the vocabulary
    (ChainRejection(), {5: [independent(1)], 3: [independent(1, 1), independent(1, 1, 1)]}),
    (MultiStep(), {5: [independent(2), independent(3)]}),
    (MultiStep(), {3: [independent(2, 1), independent(1, 2), unfinished(3, 2, 2)]}),
    (WithoutReplacement(), {5: [distinct(2), distinct(3)]}),
    (WithoutReplacement(), {3: [distinct(2, 1), distinct(2, 2), distinct(1, 1, 1)]}),
    (KSeq(), {5: [independent(2)], 4: [independent(3)], 2: [unfinished(5, 2, 2)]}),
    (KSeq(), {3: [independent(*widths) for widths in ((2, 1), (1, 2), (1, 1))]}),
    (KSeq(), {3: [unfinished(3, 2, 1)]}),
    (Block(), {5: [independent(1)], 4: [independent(1, 1)], 3: [independent(1, 1, 1)]}),
    (Block(), {2: [independent(1, 1, 1, 1, 1)]}),
]
CASES = [(r, tree, v) for r, sizes in SHAPES for v, trees in sizes.items() for tree in trees]
RULES: list[Rule] = [ChainRejection(), MultiStep(), WithoutReplacement(), KSeq(), Block()]


def each(*trees: Grow) -> pytest.MarkDecorator:
    """Run a test for every rule with its tree, in the order of RULES."""
    pairs = list(zip(RULES, trees, strict=True))
    return pytest.mark.parametrize(("rule", "tree"), pairs, ids=names)


def names(value: object) -> str:
    if isinstance(value, partial):
        return "x".join(str(width) for width in value.keywords["widths"])
    return getattr(value, "name", str(value))


def depth(tree: Grow) -> int:
    assert isinstance(tree, partial)
    return len(tree.keywords["widths"])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rule", "tree", "vocab"), CASES, ids=names)
def test_output_follows_the_target(rule: Rule, tree: Grow, vocab: int, zeros: bool) -> None:
    for seed in range(3):
        distributions = Distributions(vocab, seed, alike=0.4 * seed, zeros=zeros and vocab > 2)
        assert distributions.deviation(rule, tree, depth(tree) + 1) <= EXACT


@each(independent(1, 1), independent(2), distinct(2), independent(2), independent(1, 1))
def test_steps_are_independent(rule: Rule, tree: Grow) -> None:
    assert Distributions(2, 1).deviation(rule, tree, length=4, steps=2) <= EXACT


@each(independent(1, 1), independent(3), distinct(2, 1), independent(3), independent(1, 1, 1))
def test_greedy_target_gives_greedy_text(rule: Rule, tree: Grow) -> None:
    distributions = Distributions(5, 4, greedy=True)
    best: tuple[int, ...] = ()
    while len(best) < 16:
        best = (*best, int(distributions.target(best).argmax()))
    for seed in range(20):
        text = distributions.generate(rule, NoiseStream(seed), tree, steps=4)
        assert text == best[: len(text)]


def after_texts(model: Any) -> torch.Tensor:
    """Return the model's distributions before each token of each text: f64 [125, 3, 5]."""
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([PROMPT]).expand(125, 2), TEXTS], 1)).logits
    return torch.softmax(logits[:, 1:4].double(), -1)


def p_value(engine: Engine, distributions: torch.Tensor) -> float:
    """Return how well 20,000 texts of three tokens, of several steps each, follow distributions.

    Those before each token of each text [125, 3, 5]; the result is the p-value of the chi-square.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(5):
        sampling = Sampling(1.0, n=4000, seed=seed)
        texts = engine.generate(PROMPT, sampling, max_new_tokens=3, ignore_eos=True)
        counts.update(tuple(text.tokens) for text in texts)
    chances = distributions.gather(-1, TEXTS[..., None]).prod(1)[:, 0].numpy()
    result = [counts[tuple(text)] for text in TEXTS.tolist()]
    return float(chisquare(result, 20_000 * chances).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["rejection", "multi-step", "without-replacement", "k-seq", "block", "walk"]
)
def test_twenty_thousand_texts_follow_the_target(rule: str) -> None:
    model, draft = (tiny.model("llama", vocab_size=5, seed=seed) for seed in (1, 2))
    mode = "sampled-without-replacement" if rule.startswith("without") else "sampled"
    drafter = ModelDrafter(draft, 2, (1,) if rule in ("rejection", "block") else (2, 2), mode=mode)
    engine = Engine(model, drafter=drafter, rule=rule, budget="auto", max_batch_size=64)
    assert p_value(engine, after_texts(model)) > 1e-4


def test_chain_accepts_with_one_minus_total_variation() -> None:
    distributions = Distributions(5, 3)
    variation = float((distributions.target(()) - distributions.draft(())).abs().sum() / 2)
    accepted = distributions.mean_length(ChainRejection(), independent(1)) - 1
    assert accepted == pytest.approx(1 - variation, abs=EXACT)


def test_distinct_candidates_beat_independent_ones() -> None:
    worlds = [Distributions(4, seed) for seed in range(4)]
    one, repeated, struck = (
        np.mean([distributions.mean_length(rule, tree) for distributions in worlds])
        for rule, tree in zip(RULES[:3], (independent(1), independent(3), distinct(3)), strict=True)
    )
    assert one + 0.05 < repeated < struck - 0.01


def test_all_tokens_as_candidates_are_always_accepted() -> None:
    length = Distributions(3, 2).mean_length(WithoutReplacement(), distinct(3))
    assert length == pytest.approx(2, abs=EXACT)


@pytest.mark.parametrize("rule", [ChainRejection(), Block()], ids=names)
def test_a_draft_like_the_target_is_always_accepted(rule: Rule) -> None:
    distributions = Distributions(3, 0, alike=1.0)
    assert distributions.mean_length(rule, independent(1, 1, 1)) == pytest.approx(4, abs=EXACT)


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_an_empty_draft_is_plain_decoding(rule: Rule) -> None:
    empty = DraftTree.empty()
    assert Distributions(5, 6).deviation(rule, lambda *_: empty, length=1) <= EXACT


CHAIN, PAIR = independent(1, 1, 1), independent(2, 1)


@each(CHAIN, PAIR, distinct(2, 1), PAIR, CHAIN)
def test_a_text_that_ends_in_the_draft(rule: Rule, tree: Grow) -> None:
    for distributions in (Distributions(3, seed, end=1) for seed in range(2)):
        assert distributions.deviation(rule, tree, depth(tree) + 1) <= EXACT


def judge(rule: Rule, tree: DraftTree) -> None:
    Distributions(4, 0).judge(rule, tree, NoiseStream(0))


def test_errors_name_the_remedy() -> None:
    q = torch.full((3, 4), 0.25, dtype=torch.float64)
    sampled = DraftKind.SAMPLED
    cases = [
        (DraftTree.chain([1, 2], "retrieved"), r"'deterministic' draft.*accepts sampled"),
        (DraftTree.chain([1, 2], "sampled", kind=sampled), "with no q"),
        (DraftTree.chain([1, 2], "sampled", kind=sampled, q=q[:2]), "q of 2 rows"),
        (DraftTree.chain([1, 2], "sampled", kind=sampled, q=q[:, :3]), "q over 3 tokens"),
        (DraftTree.build([1, 2], [-1, -1], "sampled", kind=sampled, q=q), "expected a chain"),
    ]
    with pytest.raises(RuleError, match="expected a chain"):
        judge(Block(), cases[-1][0])
    for tree, message in cases:
        with pytest.raises(RuleError, match=message) as caught:
            judge(ChainRejection(), tree)
        assert "'walk'" in str(caught.value)


def test_a_token_that_q_excludes_is_refused() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    with pytest.raises(RuleError, match=r"token 2 has probability 0\.0"):
        judge(ChainRejection(), DraftTree.chain([2], "sampled", kind=DraftKind.SAMPLED, q=q))


def test_twins_without_replacement_are_refused() -> None:
    q = torch.full((3, 4), 0.25, dtype=torch.float64)
    kind = DraftKind.SAMPLED_WITHOUT_REPLACEMENT
    tree = DraftTree.build([3, 3], [-1, -1], "sampled", kind=kind, q=q)
    distributions = Distributions(4, 0).fix("target", {(): (0.5, 0.5, 0, 0)})
    with pytest.raises(RuleError, match="distinct siblings"):
        distributions.judge(WithoutReplacement(), tree, NoiseStream(0))


@pytest.mark.parametrize("rule", [MultiStep(), Walk()])
def test_children_of_twins_are_tried_together(rule: Rule) -> None:
    q = torch.full((5, 4), 0.25, dtype=torch.float64)
    tree = DraftTree.build([1, 1, 2, 3], [-1, -1, 0, 1], "sampled", kind=DraftKind.SAMPLED, q=q)
    table = {(): (0, 1, 0, 0), (1,): (0, 0, 0, 1), (1, 3): (1, 0, 0, 0)}
    verdict = Distributions(4, 0).fix("target", table).judge(rule, tree, NoiseStream(0))
    assert (verdict.path, verdict.token) == ((1, 3), 0)
