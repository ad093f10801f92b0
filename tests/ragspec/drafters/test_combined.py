from __future__ import annotations

from typing import Any

import pytest

from ragspec.drafters.base import Drafter
from ragspec.drafters.combined import Combined, kind_of
from ragspec.errors import StoreError
from ragspec.trees.draft_tree import DraftKind
from tests.support.mixing import MixingDrafter


class Stored(MixingDrafter):
    """A drafter over a store of the model "a" that learns from the target's best tokens."""

    top_logits = 4

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        if model != "a":
            raise StoreError("made with another model")


class Pair(Combined):
    def __init__(self, *held: Drafter) -> None:
        self._held = held

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self._held


def test_what_is_held_is_declared() -> None:
    pair = Pair(MixingDrafter({}), Stored({}))
    assert pair.kind is DraftKind.DETERMINISTIC
    assert pair.top_logits == 4 and pair.reads_prompt
    assert Pair(MixingDrafter({})).top_logits == 0 and not Pair(MixingDrafter({})).reads_prompt


def test_every_store_is_requested_whether_it_fits() -> None:
    pair = Pair(MixingDrafter({}), Pair(Stored({})))  # type: ignore[arg-type]
    pair.fits("a")
    with pytest.raises(StoreError, match="another model"):
        pair.fits("b")


def test_one_coupled_drafter_makes_all_coupled() -> None:
    plain, coupled = MixingDrafter({}), MixingDrafter({}, kind=DraftKind.COUPLED)
    assert kind_of([plain, plain]) is DraftKind.DETERMINISTIC
    assert kind_of([plain, coupled]) is DraftKind.COUPLED
