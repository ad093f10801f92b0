"""Drafters made of drafters: what they declare on behalf of those they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ragspec.drafters.base import Drafter, needs_hidden, reads_prompts, top_logits_needed
from ragspec.errors import InputError
from ragspec.trees.draft_tree import DraftKind


class Combined:
    """The declarations of a drafter that holds others; `drafters` are all that may draft."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """All drafters that may draft."""
        raise NotImplementedError

    @property
    def kind(self) -> DraftKind:
        """Deterministic where all drafters are, else coupled."""
        return kind_of(self.drafters)

    @property
    def top_logits(self) -> int:
        """How many of the target's best tokens its drafters want to see, see `base`."""
        return top_logits_needed(self.drafters)

    @property
    def reads_prompt(self) -> bool:
        """Whether its drafters want to see those of the prompt too."""
        return reads_prompts(self.drafters)

    @property
    def needs_hidden(self) -> bool:
        """Whether any of them goes on from the target's hidden states, see `base`."""
        return needs_hidden(self.drafters)

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Let every drafter over a store raise StoreError where that is of another model."""
        check_fits(self.drafters, model, tokenizer)


def check_fits(parts: Iterable[object], model: Any = None, tokenizer: Any = None) -> None:
    """Let every part that knows a model or tokenizer of its own refuse other ones.

    These are the parts with a method `fits(model, tokenizer)`, which raises StoreError.
    """
    for part in parts:
        fits = getattr(part, "fits", None)
        if fits is not None:
            fits(model, tokenizer)


def kind_of(drafters: Iterable[Drafter]) -> DraftKind:
    """Return the kind of trees made from these: deterministic where all are, else coupled."""
    plain = all(drafter.kind is DraftKind.DETERMINISTIC for drafter in drafters)
    return DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED


def within(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all that it holds."""
    yield drafter
    for held in getattr(drafter, "drafters", ()):
        yield from within(held)


def required_transform(drafter: Drafter | None) -> Any:
    """Return the transform that a drafter, or one that it holds, brings along; None without any.

    Raises:
        InputError: Several bring one.
    """
    held = () if drafter is None else within(drafter)
    results = [one for each in held if (one := getattr(each, "transform", None)) is not None]
    if len(results) > 1:
        names = ", ".join(repr(one.name) for one in results)
        raise InputError(
            f"got drafters that each bring a transform ({names}); expected one that does."
        )
    return results[0] if results else None
