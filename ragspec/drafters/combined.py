"""Combined drafters: the declarations of a drafter that contains others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ragspec.drafters.base import Drafter, needs_hidden, reads_prompts, top_logits_needed
from ragspec.errors import InputError
from ragspec.trees.draft_tree import DraftKind


class Combined:
    """Derives the declarations of a drafter from the drafters that it contains."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """All drafters that may propose nodes."""
        raise NotImplementedError

    @property
    def kind(self) -> DraftKind:
        """Deterministic if all drafters are, else coupled."""
        return kind_of(self.drafters)

    @property
    def top_logits(self) -> int:
        """The number of the target's best tokens that its drafters read, see `base`."""
        return top_logits_needed(self.drafters)

    @property
    def reads_prompt(self) -> bool:
        """Whether any of its drafters reads the best tokens of the prompt."""
        return reads_prompts(self.drafters)

    @property
    def needs_hidden(self) -> bool:
        """Whether any of its drafters reads the target's hidden states, see `base`."""
        return needs_hidden(self.drafters)

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Call `check_fits` on its drafters."""
        check_fits(self.drafters, model, tokenizer)


def check_fits(parts: Iterable[object], model: Any = None, tokenizer: Any = None) -> None:
    """Call `fits(model, tokenizer)` of every part that has this method.

    Raises:
        StoreError: A store belongs to another model or tokenizer.
        UnsupportedModelError: A head belongs to another model.
    """
    for part in parts:
        fits = getattr(part, "fits", None)
        if fits is not None:
            fits(model, tokenizer)


def kind_of(drafters: Iterable[Drafter]) -> DraftKind:
    """Return the kind of trees merged from these: deterministic if all are, else coupled."""
    plain = all(drafter.kind is DraftKind.DETERMINISTIC for drafter in drafters)
    return DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED


def within(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all drafters that it contains."""
    yield drafter
    for inner in getattr(drafter, "drafters", ()):
        yield from within(inner)


def required_transform(drafter: Drafter | None) -> Any:
    """Return the transform that a drafter, or one that it contains, requires; None without any.

    Raises:
        InputError: Several drafters require one.
    """
    parts = () if drafter is None else within(drafter)
    transforms = [one for each in parts if (one := getattr(each, "transform", None)) is not None]
    if len(transforms) > 1:
        names = ", ".join(repr(one.name) for one in transforms)
        raise InputError(
            f"got drafters that each bring a transform ({names}); expected one that does."
        )
    return transforms[0] if transforms else None
