"""One drafter in the row of another: what it tells, and what becomes of its faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.delegate import Source
from ragspec.drafters.fuse import Fuse
from ragspec.errors import InputError
from ragspec.retrievers.methods.cascade import Cascade
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.sam_decoding import Select
from tests.support.fixed import BrokenDrafter, FixedDrafter, fake_clock

REQUEST = DraftRequest((1, 2), 20)
PLACE = DraftContext([1, 2], 2, 50)


def test_a_source_that_stalls_is_used_until_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = fake_clock(monkeypatch)
    slow = FixedDrafter([9], "slow", matched=7, seconds=0.02, clock=clock)
    session = Select([slow], patience=0.01).open(REQUEST)
    with pytest.warns(RuntimeWarning, match="'slow' is switched off"):
        for _ in range(4):  # the first draft may take longer
            assert session.propose(PLACE, 5).tokens.tolist() == [9]
            assert session.matched == 7
    assert session.faults["slow"] == 3
    assert session.propose(PLACE, 5).tokens.tolist() == []


HOLDERS: dict[str, Callable[[Drafter, Drafter], Drafter]] = {
    "select": lambda one, other: Select([one, other], by="accept_prob"),
    "cascade": lambda one, other: Cascade([one, other]),
    "hierarchy": lambda one, other: HierarchyDrafter(one, other, lookahead=False),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_one_source_that_stalls_does_not_take_its_holder_along(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FixedDrafter([9], "slow", [0.9], seconds=1.0, clock=fake_clock(monkeypatch))
    session = Fuse([HOLDERS[holder](slow, FixedDrafter([4], accept_prob=[0.5]))]).open(REQUEST)
    with pytest.warns(RuntimeWarning, match="is switched off"):
        for _ in range(4):
            assert 9 in session.propose(PLACE, 5).tokens
    assert session.propose(PLACE, 5).tokens.tolist() == [4]
    assert list(session.faults.values()) == [3]


def test_the_faults_within_a_source_are_reported() -> None:
    source = Source(Fuse([BrokenDrafter(), FixedDrafter([4])]), REQUEST)
    assert source.propose(PLACE, 5).tokens.tolist() == [4]
    assert source.faults == {"broken": 1}


def test_a_patience_that_nothing_could_prepare_is_refused() -> None:
    with pytest.raises(InputError, match=r"a patience of 0 s; expected more"):
        Source(FixedDrafter([4]), REQUEST, 0)
