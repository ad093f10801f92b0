"""Drafters that contain others: their declarations, and the walk through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.errors import InputError
from ragspec.needs import Capabilities, Needs, match
from ragspec.trees.draft_tree import DraftKind

if TYPE_CHECKING:
    from ragspec.sampling.transform import Transform


class Combined(Drafter):
    """A drafter that contains others, from which its kind and its needs follow.

    Args:
        needs: Its own needs beside theirs.

    Raises:
        InputError: A drafter is none.
    """

    looks_up = False

    def __init__(self, name: str, drafters: Sequence[Drafter], needs: Needs | None = None) -> None:
        for drafter in drafters:
            expect_drafter(drafter)
        self.name = name
        self.drafters = tuple(drafters)
        self.kind = kind_of(drafters)
        self.needs = Needs.union([needs or Needs(), *(drafter.needs for drafter in drafters)])


def kind_of(drafters: Iterable[Drafter]) -> DraftKind:
    """Return the kind of trees merged from these: deterministic if all are, else coupled."""
    plain = all(drafter.kind is DraftKind.DETERMINISTIC for drafter in drafters)
    return DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED


def within(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all drafters that it contains."""
    yield drafter
    for inner in drafter.drafters:
        yield from within(inner)


def match_drafter(drafter: Drafter, offered: Capabilities) -> None:
    """Raise an error unless a target meets the needs of a drafter, see `match`.

    The message names the innermost drafter that has the need.
    """
    lacking = [each.name for each in within(drafter) if offered.lacking(each.needs)]
    name = lacking[-1] if lacking else drafter.name
    match(f"drafter {name!r}", drafter.needs, offered, drafter.kind)


def required_transform(drafter: Drafter | None) -> Transform | None:
    """Return the transform that a drafter, or one that it contains, requires; None without any.

    Raises:
        InputError: Several drafters require one.
    """
    parts = () if drafter is None else within(drafter)
    transforms = [each.transform for each in parts if each.transform is not None]
    if len(transforms) > 1:
        names = ", ".join(repr(each.name) for each in transforms)
        raise InputError(
            f"got drafters that each bring a transform ({names}); expected one that does."
        )
    return transforms[0] if transforms else None
