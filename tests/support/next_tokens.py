"""Tables of next tokens."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ragspec.retrievers.methods.next_tokens import BITS, LONGEST, MOST

Rows = Mapping[tuple[int, ...], Mapping[int, int]]


def write(path: Path, rows: Rows, size: str = "<u2") -> Path:
    """Write a table, its chances in 1/255, and return its path."""
    fields = [("key", "<u8"), ("tokens", size, (4,)), ("chances", "u1", (4,))]
    table = np.zeros(len(rows), fields)
    for row, (key, best) in zip(table, rows.items(), strict=True):
        for token in (*[MOST] * (LONGEST - len(key)), *key):
            row["key"] = int(row["key"]) << BITS | token
        row["tokens"][: len(best)], row["chances"][: len(best)] = [*best], [*best.values()]
    np.save(path, np.sort(table, order="key"))
    return path
