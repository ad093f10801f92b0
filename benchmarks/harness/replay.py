"""Simulated decoding of fixed texts: the steps that a drafter would save, without a model.

A fixed text replaces the target: a greedy walk accepts exactly the drafted nodes that agree with
it. The counts equal those of a real run of the same text, except for drafters that learn from the
target's logits, since there are none. Label the figures as simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.goodput import make_budget
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, SourceText
from ragspec.drafters.fuse import Fuse
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import limit_depth

Span = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ReplayText:
    """A prompt and the text that follows it, as token ids.

    Attributes:
        spans, texts: See `DraftRequest`.
        max_new_tokens: Limit of the run, which limits the depth of drafts; None for the length of
            the text.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    texts: tuple[SourceText, ...] = ()
    max_new_tokens: int | None = None


@dataclass(slots=True)
class ReplayCounts:
    """Counts over texts: tokens, steps after prefill, and positions of these steps."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    positions: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step; the prefill yields one more token, which does not count."""
        return (self.tokens - self.texts) / self.steps if self.steps else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by all forwards, prefill included."""
        forwards = self.texts + self.steps
        return self.tokens / forwards if forwards else 0.0

    @property
    def nodes(self) -> float:
        """Mean positions of a step, the root included."""
        return self.positions / self.steps if self.steps else 0.0


class Replay:
    """A replay of texts with one drafter, or several fused ones, and one budget.

    Drafter and budget policy keep what they learn from text to text.

    Args:
        drafters: Drafter, several to fuse, or None.
        budget: Draft nodes or a policy.
        vocab_size: Size of the vocabulary.

    Raises:
        InputError: The policy goes by the clock, and there is none.
    """

    def __init__(
        self,
        drafters: Drafter | Sequence[Drafter] | None,
        budget: int | BudgetPolicy,
        vocab_size: int,
    ) -> None:
        self.policy = make_budget(budget)
        if self.policy.needs_cost:
            raise InputError(
                f"Expected a budget without costs, got {self.policy.name!r}. Pass a number "
                "of nodes."
            )
        sources = [] if drafters is None else drafters
        several = list(sources) if isinstance(sources, Sequence) else [sources]
        self.drafter: Drafter | None = None
        if several:
            is_fused = len(several) == 1 and isinstance(several[0], Fuse)
            self.drafter = several[0] if is_fused else Fuse(several)
        self.vocab_size = vocab_size
        self.counts = ReplayCounts()

    def play(self, text: ReplayText) -> int:
        """Replay one text and return its number of steps; raises InputError if it is empty."""
        if not text.text:
            raise InputError("Expected a text of at least one token, got none. Leave the text out.")
        counts, before = self.counts, self.counts.steps
        counts.texts += 1
        counts.tokens += len(text.text)
        limit = max(text.max_new_tokens or 0, len(text.text))
        context = DraftContext([*text.prompt, text.text[0]], len(text.prompt), limit - 1)
        session = self._open(text)
        budget = self.policy.open()
        context.adviser = budget
        while context.generated < len(text.text):
            self._step(text, context, session, budget)
        for name, number in getattr(session, "faults", {}).items():
            counts.faults[name] = counts.faults.get(name, 0) + number
        return counts.steps - before

    def _step(
        self,
        text: ReplayText,
        context: DraftContext,
        session: DraftSession | None,
        budget: BudgetSession,
    ) -> None:
        """Draft, judge, commit and learn, as the loop of the engine does."""
        length = len(context.tokens)
        tree = DraftTree.empty()
        if session is not None and (allowed := budget.allowance(length)) > 0:
            tree = limit_depth(session.propose(context, allowed), context.remaining - 1)
            tree = budget.fit(tree)
        step = _verdict(tree, text.text[context.generated :])
        context.tokens.extend(step.tokens)
        context.remaining -= len(step.tokens)
        self._count(step)
        if session is not None and context.generated < len(text.text):
            session.observe(step)
            budget.observe(step)

    def _open(self, text: ReplayText) -> Any:
        if self.drafter is None:
            return None
        return self.drafter.open(DraftRequest(text.prompt, self.vocab_size, text.spans, text.texts))

    def _count(self, step: Step) -> None:
        counts = self.counts
        counts.steps += 1
        counts.positions += len(step.tree) + 1
        for node in step.path:
            name = step.tree.sources[int(step.tree.source[node])]
            counts.accepted[name] = counts.accepted.get(name, 0) + 1


def _verdict(tree: DraftTree, text: Sequence[int]) -> Step:
    """Return the step of a walk along the text over the tree."""
    below = {
        pair: node
        for node, pair in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    path: list[int] = []
    node: int | None = ROOT
    for token in text:
        node = below.get((ROOT if node is None else node, token))
        if node is None:
            break
        path.append(node)
    return Step(tree, tuple(path), tuple(text[: len(path) + 1]))
