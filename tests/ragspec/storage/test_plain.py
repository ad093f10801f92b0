from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from ragspec.storage.plain import from_plain, to_plain


@dataclass
class Leaf:
    share: float
    count: int = 0
    worked_out: float = field(default=0.0, init=False)


@dataclass
class Whole:
    name: str
    leaves: list[Leaf]
    by_key: dict[int, list[float]]
    right: bool = True


WHOLE = Whole("a", [Leaf(0.5, 3), Leaf(1.0)], {3: [1.0, 2.5], 9: []}, False)


def test_what_was_written_is_read_and_what_is_worked_out_is_left() -> None:
    written = json.loads(json.dumps(to_plain(WHOLE)))
    assert written["by_key"] == {"3": [1.0, 2.5], "9": []}
    assert written["leaves"][0] == {"share": 0.5, "count": 3}
    assert from_plain(Whole, written) == WHOLE


def test_a_whole_number_stands_for_a_share_but_no_share_for_a_count() -> None:
    assert from_plain(Leaf, {"share": 1, "count": 2}) == Leaf(1.0, 2)
    assert type(from_plain(Leaf, {"share": 1, "count": 2}).share) is float
    with pytest.raises(ValueError, match="expected <class 'int'>"):
        from_plain(Leaf, {"share": 1.0, "count": 2.0})


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3}, {"leaves": {}}, {"leaves": [3]}, {"leaves": [{"share": 0.5}]},
        {"by_key": {"x": []}}, {"by_key": {"3": [math.nan]}}, {"by_key": [1]}, {"right": 1},
        {"right": None}, {"more": 1},
    ],
)  # fmt: skip
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        from_plain(Whole, {**to_plain(WHOLE), **change})
