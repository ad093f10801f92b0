"""A target and a draft model of random distributions, and the output of rules over them.

They are small, so that the exact distribution of all outputs is known. Tests compare it with
enumeration or with many samples.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from ragspec.rules.base import Rule, Verdict
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from tests.support.enumeration import Outcomes, Tokens, enumerate_outcomes

Grow = Callable[["Distributions", NoiseStream, Tokens], DraftTree]


@dataclass(frozen=True)
class Distributions:
    """A tiny target and draft model: random distributions that depend on all tokens so far.

    alike: 1 makes draft and target agree, 0 leaves them unrelated. zeros: each distribution lacks
    about one token of V, as after top-k. greedy: the target's is its mode alone. end: the token
    that ends a text; after it both models know of nothing else.
    """

    vocab: int
    seed: int
    alike: float = 0.3
    zeros: bool = False
    greedy: bool = False
    end: int | None = None
    cache: dict[tuple[str, Tokens], torch.Tensor] = field(default_factory=dict, compare=False)

    def fix(self, model: str, table: Mapping[Tokens, Sequence[float]]) -> Self:
        """Set the distributions of "target" or "draft" after some contexts."""
        for context, chances in table.items():
            self.cache[model, context] = torch.tensor(chances, dtype=torch.float64)
        return self

    def target(self, context: Tokens) -> torch.Tensor:
        """Return p after the context, f64 [V]."""
        p = self._distribution("target", context)
        if self.end in context:
            return p
        return torch.nn.functional.one_hot(p.argmax(), self.vocab).double() if self.greedy else p

    def draft(self, context: Tokens) -> torch.Tensor:
        """Return q after the context, f64 [V]."""
        return self._distribution("draft", context)

    def _distribution(self, model: str, context: Tokens) -> torch.Tensor:
        if (model, context) not in self.cache:
            rng = np.random.default_rng([self.seed, len(model), *context])
            if self.end is not None and self.end in context:
                return torch.eye(self.vocab, dtype=torch.float64)[self.end]
            weights = rng.dirichlet(np.ones(self.vocab))
            if model == "draft":
                mix = self.alike * self._distribution("target", context).numpy()
                weights = mix + (1 - self.alike) * weights
            if self.zeros:
                weights[rng.integers(self.vocab)] = 0.0
            self.cache[model, context] = torch.from_numpy(weights / weights.sum())
        return self.cache[model, context]

    def judge(self, rule: Rule, tree: DraftTree, noise: NoiseStream) -> Verdict:
        """Return the rule's verdict on a tree below an empty context."""
        return rule.judge(tree, DistributionTarget(self, tree, (), noise))

    def generate(self, rule: Rule, noise: NoiseStream, grow: Grow, steps: int = 1) -> Tokens:
        """Return the tokens that some steps of draft and verdict emit."""
        context: Tokens = ()
        for _ in range(steps):
            if self.end in context:
                break
            tree = grow(self, noise, context)
            verdict = rule.judge(tree, DistributionTarget(self, tree, context, noise))
            context = (*context, *emitted(tree, verdict))
        return context

    def outcomes(self, rule: Rule, grow: Grow, steps: int = 1, reuse: bool = False) -> Outcomes:
        """Return the probability of everything that `generate` can return."""
        return enumerate_outcomes(lambda noise: self.generate(rule, noise, grow, steps), reuse)

    def mean_length(self, rule: Rule, grow: Grow) -> float:
        """Return the expected number of tokens that one step emits."""
        outcomes = self.outcomes(rule, grow)
        return sum(weight * len(outcome) for outcome, weight in outcomes.items())

    def deviation(
        self, rule: Rule, grow: Grow, length: int, steps: int = 1, reuse: bool = False
    ) -> float:
        """Return the total variation between the exact distributions of output and target."""
        outcomes = self.outcomes(rule, grow, steps, reuse)
        assert abs(sum(outcomes.values()) - 1.0) < 1e-12
        return self.variation(outcomes, length)

    def sampled_deviation(
        self, rule: Rule, grow: Grow, length: int, samples: int
    ) -> tuple[float, float]:
        """Return (total variation over real noise, bound that chance exceeds once in 10^6).

        The bound is the mean plus McDiarmid's deviation. Each seed is one sample.
        """
        outcomes: defaultdict[Tokens, float] = defaultdict(float)
        for seed in range(samples):
            text = self.generate(rule, NoiseStream(seed), grow, steps=length)
            outcomes[text[:length]] += 1 / samples
        cells = self.vocab**length
        bound = 0.5 * ((cells - 1) / samples) ** 0.5 + (np.log(1e6) / (2 * samples)) ** 0.5
        return self.variation(dict(outcomes), length), float(bound)

    def variation(self, outcomes: Outcomes, length: int) -> float:
        """Return the total variation of the first `length` tokens from the target's.

        Shorter outcomes continue by the target's distribution. Also asserts that no run, even of
        probability 0, emitted a token that the target forbids.
        """
        result = np.zeros((self.vocab,) * length)
        expected = np.zeros_like(result)
        for text in itertools.product(range(self.vocab), repeat=length):
            expected[text] = self._likelihood((), text)
        for outcome, weight in outcomes.items():
            assert self._likelihood((), outcome) > 0.0, f"{outcome} has no probability"
            start = outcome[:length]
            for rest in itertools.product(range(self.vocab), repeat=length - len(start)):
                result[start + rest] += weight * self._likelihood(start, rest)
        return float(np.abs(result - expected).sum() / 2)

    def _likelihood(self, start: Tokens, rest: Tokens) -> float:
        """Return the target's probability of `rest` after `start`."""
        likelihood = 1.0
        for place, token in enumerate(rest):
            likelihood *= float(self.target(start + rest[:place])[token])
        return likelihood


@dataclass
class DistributionTarget:
    """A target of distributions alone; implements TargetView for one tree."""

    distributions: Distributions
    tree: DraftTree
    context: Tokens
    noise: NoiseStream

    def __post_init__(self) -> None:
        self._texts = texts(self.tree)

    def index(self, node: int) -> int:
        return len(self.context) + len(self._texts[node])

    def token(self, node: int) -> int:
        scores = self.probabilities(node).log()
        if not self.distributions.greedy:
            scores = scores + self.noise.gumbel(
                [self.index(node)], torch.arange(self.distributions.vocab)
            )
        return int(torch.argmax(scores))

    def probabilities(self, node: int) -> torch.Tensor:
        return self.distributions.target((*self.context, *self._texts[node]))

    def ends(self, node: int) -> bool:
        return int(self.tree.tokens[node]) == self.distributions.end


def texts(tree: DraftTree) -> dict[int, Tokens]:
    """Return the tokens from the root down to each node, none for the root."""
    record: dict[int, Tokens] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        record[node] = (*record[int(parent)], int(token))
    return record


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a draw of children: the first index of the step, theirs, and their parent."""

    root: int
    index: int
    parent: int


Draw = Callable[[NoiseStream, Place, torch.Tensor, int], list[int]]
"""Noise, place, distribution q [V], number of children -> their tokens in drawing order."""


def draw_independent(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Draw k tokens from q. No two draws use the same noise."""
    first = (place.parent + 1) * 64
    return draw_by_bounds(noise, place.root, q, range(first, first + k))


def draw_by_bounds(
    noise: NoiseStream, root: int, q: torch.Tensor, lanes: Sequence[int]
) -> list[int]:
    """Draw a token from q for each lane, by comparisons with cumulative sums."""
    bounds, last = q.cumsum(0).tolist(), int(q.nonzero()[-1])
    tokens = []
    for lane in lanes:
        number = noise.uniform(root, NoiseUse.DRAFT, lane)
        tokens.append(next((x for x in range(last) if number < bounds[x]), last))
    return tokens


def draw_distinct(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Draw up to k tokens from q without replacement, as the k best of log q + Gumbel noise."""
    lanes = torch.arange(len(q)) + (place.parent + 1) * len(q)
    scores = q.log() + noise.gumbel([place.root], lanes, NoiseUse.DRAFT)
    best: list[int] = torch.topk(scores, min(k, int((q > 0).sum())))[1].tolist()
    return best


def grow(
    distributions: Distributions,
    noise: NoiseStream,
    context: Tokens,
    widths: Sequence[int],
    draw: Draw = draw_independent,
    kind: DraftKind = DraftKind.SAMPLED,
) -> DraftTree:
    """Return a tree below the context in which each node of depth d has widths[d] children."""
    tokens: list[int] = []
    parents: list[int] = []
    level: list[tuple[int, Tokens]] = [(ROOT, context)]
    rows = [distributions.draft(context)]
    for width in widths:
        following: list[tuple[int, Tokens]] = []
        for parent, text in level:
            place = Place(len(context), len(text), parent)
            for token in draw(noise, place, distributions.draft(text), width):
                following.append((len(tokens), (*text, token)))
                tokens.append(token)
                parents.append(parent)
                rows.append(distributions.draft((*text, token)))
        level = following
    return DraftTree.build(tokens, parents, "sampled", kind=kind, q=torch.stack(rows))


def emitted(tree: DraftTree, verdict: Verdict) -> Tokens:
    """Return the tokens of a verdict, after a check that its path starts below the root."""
    parents = [int(tree.parents[node]) for node in verdict.path]
    assert parents == [ROOT, *verdict.path][: len(parents)], f"broken path {verdict.path}"
    last = () if verdict.token is None else (verdict.token,)
    return (*(int(tree.tokens[node]) for node in verdict.path), *last)
