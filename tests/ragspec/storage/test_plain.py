from __future__ import annotations

import json
from dataclasses import dataclass, field

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
