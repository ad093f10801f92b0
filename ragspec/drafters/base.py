"""The protocols of drafters: a drafter opens a session per row, which proposes trees.

A drafter that sets `top_logits` to k > 0 gets `Step.best` with every step; one that sets
`needs_hidden` gets `Step.hidden`. The sessions of both also observe one `Prefill` of the prompt,
without best tokens if `reads_prompt` is False. Other sessions observe steps only. The target
computes and keeps only what a drafter declares, and copies it to the host only when it is read
there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ragspec.errors import InputError, RuleError
from ragspec.rules.base import Rule, Step
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftKind, DraftTree, Ints

if TYPE_CHECKING:
    from ragspec.budget.base import Adviser
    from ragspec.sampling.distribution import TokenDistribution


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text that a drafter may copy from: a retrieved passage, a prediction, a document.

    Attributes:
        document: Index that `origin` and citations repeat; below 0, as PREDICTION and LAYOUT, for
            a text that cannot be cited.
        offset: Token offset of `tokens[0]` in the document.
    """

    tokens: tuple[int, ...]
    document: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KnownStates:
    """The target's last hidden states over a part of a prompt, from an earlier forward.

    Attributes:
        start: Index in the prompt of the first state's token.
        states: Hidden states [copies, n, H], see `Step.hidden`.
    """

    start: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The prompt of a new row and its sources, which `Drafter.open` gets once.

    Attributes:
        prompt: Token ids of the prompt, with the earlier output of a resumed text (`resume_from`).
        spans: Parts of the prompt copied from documents, as (start, end, document, offset) in
            tokens: prompt[start:end] is document text from token `offset` on. They give `origin`.
        texts: Further texts that are not part of the prompt.
        distribution: Token distribution of the row (processors and noise).
        draft_prompt: Replaces the prompt for a drafter that declares `wants_draft_prompt`.
        known_states: States of parts of the prompt, in its order, beside those of the `Prefill`,
            for drafters that need hidden states.
        static: How the target runs steps of fixed shape, see `Engine`.
    """

    prompt: tuple[int, ...]
    vocab_size: int
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: tuple[SourceText, ...] = ()
    distribution: TokenDistribution | None = None
    draft_prompt: tuple[int, ...] | None = None
    known_states: tuple[KnownStates, ...] = ()
    static: str = "off"


@dataclass(slots=True)
class DraftContext:
    """The state of a row before a step, which a drafter must not change.

    Attributes:
        tokens: Prompt and generated tokens, the root last [T]. Steps only append to it.
        prompt_length: Number of prompt tokens.
        remaining: Number of tokens that may still be generated; a deeper draft is useless.
        adviser: Corrects claims of acceptance and tells which sources pay; None without a budget
            that advises.
    """

    tokens: list[int]
    prompt_length: int
    remaining: int
    adviser: Adviser | None = None

    @property
    def generated(self) -> int:
        """Index of the next generated token; 0 is the first after the prompt."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The target's output over the prompt, valid only during `observe`.

    Attributes:
        tokens: The last tokens of the prompt, i64 [T].
        best: The target's best tokens after each of them, if computed and the drafter reads them.
        hidden: The target's last hidden states there [copies, T, H], see `Step.hidden`; None
            unless the drafter needs them.
    """

    tokens: Ints
    best: TopTokens | None = None
    hidden: Tensor | None = None


Feedback = Step | Prefill
"""The messages that a session observes."""


class DraftSession(Protocol):
    """The state of one drafter for one row of text.

    A session may also have a cheap method `expected_acceptance(context)`: the probability that its
    best draft of the next token is accepted. If the best value of all sources is too low, the step
    has no draft.
    """

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes below the last token of `context`; may change state."""

    def observe(self, step: Step) -> None:
        """Learn from the step after the last proposal; `step.tokens` are already committed."""
        return None


class LearningSession(DraftSession, Protocol):
    """A session that also observes the `Prefill` of the prompt, see `notify_prefill`."""

    def observe(self, feedback: Feedback) -> None:
        """Learn from the prompt, once before the first step, and from every step."""
        return None


@runtime_checkable
class Drafter(Protocol):
    """A cheap source of draft tokens. Its sessions hold all state of a row."""

    @property
    def name(self) -> str:
        """The source name of its nodes in reports."""

    @property
    def kind(self) -> DraftKind:
        """The kind of tree that its sessions propose."""

    def open(self, request: DraftRequest) -> DraftSession:
        """Return a fresh session for one row; a step of one session changes no other."""


def expect_drafter(drafter: object) -> None:
    """Raise InputError unless the object is a drafter; a drafter class is none."""
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        got = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        what = f"the class {got}" if isinstance(drafter, type) else got
        raise InputError(
            f"got {what} as a drafter; expected a name, an object with name, kind and "
            "open(request), such as ContextDrafter() or store.drafter(), or a list of these."
        )


def check_pairing(rule: Rule, drafter: Drafter) -> None:
    """Raise RuleError unless the rule can judge the drafter's trees."""
    if drafter.kind not in rule.accepts:
        expected = ", ".join(sorted(rule.accepts))
        raise RuleError(
            f"rule {rule.name!r} cannot judge {drafter.kind.value!r} drafts (drafter "
            f"{drafter.name!r}): it accepts {expected}. Use rule='walk', which judges every "
            "draft, or a drafter of one of those kinds."
        )


def top_logits_needed(drafters: Iterable[Drafter | None]) -> int:
    """Return the largest `top_logits` that any drafter declares; 0 for none."""
    return max((int(getattr(drafter, "top_logits", 0)) for drafter in drafters), default=0)


def reads_prompts(drafters: Iterable[Drafter | None]) -> bool:
    """Return whether any drafter reads best tokens of the prompt, which cost prefill time.

    A drafter that declares `top_logits` does, unless its `reads_prompt` is False.
    """
    readers = (each for each in drafters if getattr(each, "top_logits", 0))
    return any(getattr(each, "reads_prompt", True) for each in readers)


def wants_draft_prompt(drafter: Any) -> bool:
    """Return whether a drafter, or one that it contains, reads `DraftRequest.draft_prompt`."""
    inner = [*getattr(drafter, "drafters", ()), getattr(drafter, "drafter", None)]
    wanting = bool(getattr(drafter, "wants_draft_prompt", False))
    return wanting or any(wants_draft_prompt(each) for each in inner if each is not None)


def needs_hidden(drafters: Iterable[Drafter | None]) -> bool:
    """Return whether any of the drafters declares `needs_hidden`."""
    return any(getattr(drafter, "needs_hidden", False) for drafter in drafters)


def notify_prefill(session: DraftSession, prefill: Prefill, best: bool, hidden: bool) -> None:
    """Let a session observe the parts of a prefill that its drafter reads, if there are any.

    Args:
        best: Whether the drafter reads the best tokens of prompts, see `reads_prompts`.
        hidden: Whether the drafter reads hidden states.
    """
    message = replace(
        prefill, best=prefill.best if best else None, hidden=prefill.hidden if hidden else None
    )
    if message.best is not None or message.hidden is not None:
        cast(LearningSession, session).observe(message)
