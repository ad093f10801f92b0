"""Drafts against a text that is known beforehand: what a drafter would save, with no model run.

The known text plays the target, which writes it token for token: a greedy walk accepts exactly the
drafted nodes that agree with it. The counts are those of a real run of the same text, save for
drafters that learn from the target's logits, which there are none of. Results are simulated and
must be called so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from harness.clock import Machine
from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.policy import make_budget
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, SourceText
from ragspec.drafters.fuse import Fuse
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import limit_depth

Span = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and the text that follows it, as token ids.

    spans, texts: see `DraftRequest`. room: how many tokens the run would have been allowed, which
    limits the depth of drafts; None for as many as the text has.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    texts: tuple[SourceText, ...] = ()
    room: int | None = None


@dataclass(slots=True)
class Replayed:
    """What texts took: tokens, steps after the prompts' forwards, and positions of these steps."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    positions: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step after the prompt's forward, which itself yields one more token."""
        return (self.tokens - self.texts) / self.steps if self.steps else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by all forwards, the prompts' included."""
        forwards = self.texts + self.steps
        return self.tokens / forwards if forwards else 0.0

    @property
    def nodes(self) -> float:
        """Mean positions of a step, the root included."""
        return self.positions / self.steps if self.steps else 0.0


class Replay:
    """Plays known texts to one drafter, or to several fused, at one budget; both go on learning.

    budget: draft nodes, or a policy. machine: takes the time of every step; None for no times, and
    no policy that wants costs: raises InputError for one.
    """

    def __init__(
        self,
        drafters: Drafter | Sequence[Drafter] | None,
        budget: int | BudgetPolicy,
        vocab_size: int,
        machine: Machine | None = None,
    ) -> None:
        self.policy = make_budget(budget)
        self.machine = machine
        if self.policy.needs_cost and machine is None:
            raise InputError(
                f"the budget {self.policy.name!r} weighs costs, and nothing runs here; expected a "
                "number of nodes."
            )
        held = [] if drafters is None else drafters
        several = list(held) if isinstance(held, Sequence) else [held]
        self.drafter: Drafter | None = None
        if several:
            alone = len(several) == 1 and isinstance(several[0], Fuse)
            self.drafter = several[0] if alone else Fuse(several)
        self.vocab_size = vocab_size
        self.result = Replayed()

    def play(self, known: Known) -> int:
        """Play one text and return the steps that it took; raises InputError where it is empty."""
        if not known.text:
            raise InputError("the text to replay is empty; expected at least one token.")
        result, before = self.result, self.result.steps
        result.texts += 1
        result.tokens += len(known.text)
        room = max(known.room or 0, len(known.text))
        context = DraftContext([*known.prompt, known.text[0]], len(known.prompt), room - 1)
        session = self._open(known)
        budget = self.policy.open(self.machine.belief if self.machine else None)
        context.adviser = budget.adviser
        with self.machine.clock() if self.machine else nullcontext():
            while context.generated < len(known.text):
                self._step(known, context, session, budget)
        for name, number in getattr(session, "faults", {}).items():
            result.faults[name] = result.faults.get(name, 0) + number
        return result.steps - before

    def _step(
        self,
        known: Known,
        context: DraftContext,
        session: DraftSession | None,
        budget: BudgetSession,
    ) -> None:
        """Draft, judge, commit and learn, as the loop does."""
        machine, length = self.machine, len(context.tokens)
        began = machine.now if machine else 0.0
        tree = DraftTree.empty()
        if session is not None and (allowed := budget.allowance(length)) > 0:
            tree = limit_depth(session.propose(context, allowed), context.remaining - 1)
            tree = budget.fit(tree, length)
        step = _verdict(tree, known.text[context.generated :])
        if machine:
            step.milliseconds["draft"] = 1000.0 * (machine.now - began)
            step.milliseconds["verify"] = 1000.0 * machine.forward(len(tree) + 1, length)
            step.milliseconds["commit"] = 0.0
        context.tokens.extend(step.tokens)
        context.remaining -= len(step.tokens)
        self._count(step)
        began = machine.now if machine else 0.0
        if session is not None and context.generated < len(known.text):
            session.observe(step)
            budget.observe(step, len(context.tokens))
        if machine:
            machine.spend(machine.host)
            step.milliseconds["host"] = 1000.0 * (machine.now - began)

    def _open(self, known: Known) -> Any:
        if self.drafter is None:
            return None
        return self.drafter.open(
            DraftRequest(known.prompt, self.vocab_size, known.spans, known.texts)
        )

    def _count(self, step: Step) -> None:
        result = self.result
        result.steps += 1
        result.positions += len(step.tree) + 1
        for node in step.path:
            name = step.tree.sources[int(step.tree.source[node])]
            result.accepted[name] = result.accepted.get(name, 0) + 1


def _verdict(tree: DraftTree, text: Sequence[int]) -> Step:
    """Return the step that a walk along the text makes of the tree."""
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
