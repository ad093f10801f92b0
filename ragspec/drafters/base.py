"""The base classes of drafters: a drafter opens a session per row, which proposes trees.

A drafter declares its `Needs`. The target computes and keeps only what is declared, and copies it
to the host only when it is read there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragspec.errors import InputError
from ragspec.needs import HiddenStates, Needs
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree, Ints
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from ragspec.budget.base import BudgetSession
    from ragspec.sampling.distribution import TokenDistribution
    from ragspec.sampling.top_tokens import TopTokens
    from ragspec.sampling.transform import Transform


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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The prompt of a new row and its sources, which `Drafter.open` gets once.

    Attributes:
        prompt: Token ids of the prompt, with the earlier output of a resumed text (`resume_from`).
        spans: Parts of the prompt copied from documents, as (start, end, document, offset) in
            tokens: prompt[start:end] is document text from token `offset` on. They give `origin`.
        texts: Further texts that are not part of the prompt.
        distribution: Token distribution of the row (processors and noise).
        draft_prompt: Replaces the prompt for a drafter that needs a draft prompt.
        static: How the target runs steps of fixed shape, see `Engine`.
        owner: Whose text it is: what a drafter learns from one text it may use for others of the
            same owner. None if drafts may change the text, which must not depend on others then.
        chains: The target verifies the likeliest path of a draft alone.
    """

    prompt: tuple[int, ...]
    vocab_size: int
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: tuple[SourceText, ...] = ()
    distribution: "TokenDistribution | None" = None
    draft_prompt: tuple[int, ...] | None = None
    static: str = "off"
    owner: str | None = None
    chains: bool = False


@dataclass(slots=True)
class DraftContext:
    """The state of a row before a step, which a drafter must not change.

    Attributes:
        tokens: Prompt and generated tokens, the root last [T]. Steps only append to it.
        prompt_length: Number of prompt tokens.
        remaining: Number of tokens that may still be generated; a deeper draft is useless.
        adviser: Corrects claims of acceptance and tells which sources pay; None without one.
    """

    tokens: list[int]
    prompt_length: int
    remaining: int
    adviser: "BudgetSession | None" = None

    @property
    def generated(self) -> int:
        """Index of the next generated token; 0 is the first after the prompt."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The target's output over the prompt, valid only during `observe_prefill`.

    Attributes:
        tokens: The last tokens of the prompt, i64 [T].
        best: The target's best tokens after each of them, if computed and the drafter reads them.
        hidden: The target's hidden states there, see `Step.hidden`; None unless needed.
    """

    tokens: Ints
    best: "TopTokens | None" = None
    hidden: HiddenStates | None = None

    def restricted(self, needs: Needs) -> "Prefill | None":
        """Return the part that a drafter needs, None if that is empty."""
        best = self.best if needs.prompt_top_tokens else None
        hidden = self.hidden if needs.hidden_states else None
        return None if best is None and hidden is None else replace(self, best=best, hidden=hidden)


NodeChances = tuple[int, list[int], list[float]]
"""(node, tokens [k], chances [k]) after a node, the most preferred token first; -1 is the root.
A chance is the estimated probability that the target chooses that token."""


class DraftSession(ABC):
    """The state of one drafter for one row of text.

    Attributes:
        matched: Length of the suffix that the last proposal continues; None if it matches nothing.
    """

    matched: int | None = None

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes below the last token of `context`; may change state."""

    def observe(self, step: Step) -> None:
        """Learn from the step after the last proposal; `step.tokens` are already committed."""
        return None

    def observe_prefill(self, prefill: Prefill) -> None:
        """Learn from the prompt, before the first step, if the drafter needs a part of it."""
        return None

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the probability that the best draft of the next token is accepted, if known.

        It must be cheap. If the largest value of all sources is too low, the step has no draft.
        """
        return None

    def distributions(self) -> Iterable[NodeChances] | None:
        """Return a draft model's distributions at the last proposal; None without a model.

        They are those at the root and at the nodes that were expanded.
        """
        return None

    @property
    def faults(self) -> dict[str, int]:
        """The fault count of each contained source that failed."""
        return {}


class Drafter(ABC):
    """A cheap source of draft tokens. Its sessions hold all state of a row.

    Attributes:
        name: The source name of its nodes in reports.
        kind: The kind of tree that its sessions propose.
        needs: The data that its sessions use, those of contained drafters included.
        drafters: The drafters that it contains.
        looks_up: Whether it only looks up text, so that a slow draft is a fault (see `fuse`).
        transform: The change of the target's distribution that it requires.
    """

    name: str
    kind: DraftKind = DraftKind.DETERMINISTIC
    needs: Needs = Needs()
    drafters: "tuple[Drafter, ...]" = ()
    looks_up: bool = True
    transform: "Transform | None" = None

    @abstractmethod
    def open(self, request: DraftRequest) -> DraftSession:
        """Return a fresh session for one row; a step of one session changes no other."""

    def fits(self, model: object = None, tokenizer: "Tokenizer | None" = None) -> None:
        """Check that its stores and weights, and those of contained drafters, fit the engine.

        Args:
            model: The engine's target, or its model.

        Raises:
            StoreError: A store belongs to another model or tokenizer.
            UnsupportedModelError: A head belongs to another model.
        """
        for drafter in self.drafters:
            drafter.fits(model, tokenizer)


def expect_drafter(drafter: object) -> Drafter:
    """Return a drafter; raise InputError for another object, a drafter class included."""
    if not isinstance(drafter, Drafter):
        got = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        what = f"the class {got}" if isinstance(drafter, type) else got
        raise InputError(
            f"got {what} as a drafter; expected a name, a Drafter such as ContextDrafter() or "
            "store.drafter(), or a list of these."
        )
    return drafter


@dataclass(slots=True)
class Ratio:
    """Decaying counts of claimed acceptance and of accepted tokens, to correct later claims."""

    accepted: float = 0.0
    claimed: float = 0.0

    def learn(self, claim: float, hit: bool, decay: float) -> None:
        """Add one claim, an acceptance probability, and its outcome.

        Args:
            decay: Factor on the earlier counts.
        """
        self.accepted = self.accepted * decay + hit
        self.claimed = self.claimed * decay + claim

    def share(self, prior: float, start: float = 1.0) -> float:
        """Return the factor that corrects a claim; it may exceed 1.

        Args:
            prior: Sum of claims assumed before the first observation.
            start: The share of `prior` that is assumed accepted.
        """
        return (prior * start + self.accepted) / (prior + self.claimed)
