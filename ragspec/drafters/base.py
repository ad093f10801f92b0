"""What a drafter is: it opens a session for each row, which proposes trees and learns from steps.

A drafter that sets `top_logits` to k > 0 is lent `Step.best` with every step, one that sets
`needs_hidden` is lent `Step.hidden`. The sessions of both are also told once what the target knew
of the prompt, a `Prefill` (but not of best tokens where `reads_prompt` is False); other sessions
hear of steps alone. Nothing is computed or kept where no drafter asks, and nothing is copied to
the host unless somebody reads it there.
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

    tokens: the ids of the text. document: an index that comes back in `origin` and citations;
    below 0 where it is no document and nothing may be cited from it, as PREDICTION and LAYOUT.
    offset: the token offset of `tokens[0]` in the document (0 where the text is the document).
    """

    tokens: tuple[int, ...]
    document: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KnownStates:
    """What the target's output head read over a part of a prompt, by an earlier forward.

    start: the prompt's token that the first state is of. states: [copies, n, H], see `Step.hidden`.
    """

    start: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is told once, when a row starts: the prompt and what it was made from.

    prompt: of a text that goes on (`resume_from`) with what was written before this call.
    spans: parts of the prompt that were copied from documents, as (start, end, document, offset)
    in tokens: prompt[start:end] is document text from token `offset` on; these give `origin`.
    texts: further texts that are not part of the prompt.
    distribution: the row's token distribution (processors and noise), for drafters that draw.
    draft_prompt: what a drafter with a context of its own reads in place of the prompt.
    known_states: parts of the prompt, in its order, of which a drafter that needs hidden states may
    hear besides what the prefill tells it of.
    static: how the target takes steps of fixed shape, see `Engine`.
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
    """What a drafter may look at before each step. It must not change it.

    tokens: prompt and generated tokens, the root last [T]; from step to step more are appended and
    none is taken back. prompt_length: tokens of the prompt. remaining: tokens that may still be
    generated; no use to draft deeper. adviser: knows how far claims are to be believed and which
    sources pay; None where there is nobody to ask.
    """

    tokens: list[int]
    prompt_length: int
    remaining: int
    adviser: Adviser | None = None

    @property
    def generated(self) -> int:
        """Index of the next generated token (0 = the first after the prompt)."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What the target knew of the prompt once it had read it, lent for the time of `observe`.

    tokens: the prompt's last tokens, i64 [T]. best: the target's best tokens after each of them,
    where the target made them; None where the drafter did not ask. hidden: the target's last hidden
    states there, [copies, T, H], see `Step.hidden`; None where the drafter did not ask.
    """

    tokens: Ints
    best: TopTokens | None = None
    hidden: Tensor | None = None


Feedback = Step | Prefill
"""What a session may learn from."""


class DraftSession(Protocol):
    """The state of one drafter for one row of text.

    A session that can tell at next to no cost how likely its best draft of the next token would be
    accepted may also have `expected_acceptance(context)`: that probability. Where it is poor,
    nobody drafts.
    """

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes below the last token of `context`; state may advance."""

    def observe(self, step: Step) -> None:
        """Learn what came of the last proposal, nothing by default; `step.tokens` are committed."""
        return None


class LearningSession(DraftSession, Protocol):
    """A session that is told of the prompt too, as its drafter asked; see `reads_prompts`."""

    def observe(self, feedback: Feedback) -> None:
        """Learn from the prompt, once and before the first step, and from every step."""
        return None


@runtime_checkable
class Drafter(Protocol):
    """Something cheap that proposes tokens. It holds no row state; `open` makes it."""

    @property
    def name(self) -> str:
        """The name under which its nodes are reported."""

    @property
    def kind(self) -> DraftKind:
        """The kind of tree that its sessions propose."""

    def open(self, request: DraftRequest) -> DraftSession:
        """Return a fresh session for one row. Sessions share nothing that a step changes."""


def expect_drafter(drafter: object) -> None:
    """Raise InputError for anything else than a drafter, a class of drafters included."""
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        got = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        what = f"the class {got}" if isinstance(drafter, type) else got
        raise InputError(
            f"got {what} as a drafter; expected a name, an object with name, kind and "
            "open(request), such as ContextDrafter() or store.drafter(), or a list of these."
        )


def check_pairing(rule: Rule, drafter: Drafter) -> None:
    """Refuse a rule that cannot judge the drafter's trees.

    Raises RuleError with the kinds that were got and expected.
    """
    if drafter.kind not in rule.accepts:
        expected = ", ".join(sorted(rule.accepts))
        raise RuleError(
            f"rule {rule.name!r} cannot judge {drafter.kind.value!r} drafts (drafter "
            f"{drafter.name!r}): it accepts {expected}. Use rule='walk', which judges every "
            "draft, or a drafter of one of those kinds."
        )


def top_logits_needed(drafters: Iterable[Drafter | None]) -> int:
    """Return the largest k that any of the drafters declares as `top_logits`; 0 for none."""
    return max((int(getattr(drafter, "top_logits", 0)) for drafter in drafters), default=0)


def reads_prompts(drafters: Iterable[Drafter | None]) -> bool:
    """Tell whether a drafter wants the best tokens of the prompt too, which the prefill must pay.

    A drafter that declares `top_logits` does, unless its `reads_prompt` is False.
    """
    asking = (each for each in drafters if getattr(each, "top_logits", 0))
    return any(getattr(each, "reads_prompt", True) for each in asking)


def wants_draft_prompt(drafter: Any) -> bool:
    """Tell whether a drafter, or one that it holds, reads `DraftRequest.draft_prompt`."""
    inner = [*getattr(drafter, "drafters", ()), getattr(drafter, "drafter", None)]
    wanting = bool(getattr(drafter, "wants_draft_prompt", False))
    return wanting or any(wants_draft_prompt(each) for each in inner if each is not None)


def needs_hidden(drafters: Iterable[Drafter | None]) -> bool:
    """Tell whether any of the drafters declares `needs_hidden`."""
    return any(getattr(drafter, "needs_hidden", False) for drafter in drafters)


def notify_prefill(session: DraftSession, prefill: Prefill, best: bool, hidden: bool) -> None:
    """Tell a session of the prompt what its drafter asked for; nothing where nothing is there.

    best, hidden: whether it reads the best tokens of prompts (`reads_prompts`) and hidden states.
    """
    message = replace(
        prefill, best=prefill.best if best else None, hidden=prefill.hidden if hidden else None
    )
    if message.best is not None or message.hidden is not None:
        cast(LearningSession, session).observe(message)
