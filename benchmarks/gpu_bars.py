"""Goals for the cost of a step on an accelerator, and the measured figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

STATIC = ("graph", "compile")
NOT_MEASURED = "not measured"
Row = dict[str, Any]
Value = tuple[float, str]  # figure and mode


class Rows:
    """The measured rows with access by their fields."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = [row for row in rows if "ms" in row]

    def one(self, mode: str, **fields: Any) -> Row | None:
        """Return the row of a mode with these fields, None without one."""
        fields = {"part": "single", "batch": 1, "distribution": "greedy", "mode": mode, **fields}
        same = (r for r in self._rows if all(r.get(k) == v for k, v in fields.items()))
        return next(same, None)

    def plain(self, mode: str, length: int) -> float | None:
        """Return the time of plain steps by that of reading their bytes."""
        row = self.one(mode, length=length, rows=1)
        return row["over_floor"] if row else None

    def wide(self, mode: str, length: int) -> float | None:
        """Return the time of steps of 32 rows by that of plain steps."""
        plain = self.one(mode, length=length, rows=1)
        wide = self.one(mode, length=length, rows=32)
        return wide["ms"] / plain["ms"] if plain and wide else None

    def batch(self, mode: str, length: int) -> float | None:
        """Return the time of steps of 16 sequences of 16 rows by that of their forwards."""
        row = self.one(mode, part="batch", batch=16, length=length, rows=16, distribution="top-p")
        return row["ms"] / row["forward_ms"] if row else None

    def faster(self, mode: str, length: int, rows: int) -> float | None:
        """Return the time of today's step by that of the static one."""
        now = self.one(mode, length=length, rows=rows)
        before = self.one("off", length=length, rows=rows)
        return before["ms"] / now["ms"] if now and before else None

    def host(self, mode: str, length: int) -> float | None:
        """Return milliseconds of a step of drafter `context` in which the device is idle."""
        row = self.one(mode, part="context", length=length, rows=None)
        return row.get("host_idle_ms") if row else None


def bars(rows: Sequence[Row], measured: bool) -> list[dict[str, Any]]:
    """Return every bar as name, bar, measured, mode and met, of the best measured mode.

    Args:
        rows: Rows of the probe.
        measured: Whether the rows are of the models and the device of the bars. If not, no figure
            counts as measured.
    """
    table = Rows(rows if measured else ())
    every = []
    for length in (512, 4096):
        for word, bar in (("", 1.25), (" (stretch)", 1.10)):
            of = _of(table.plain, length)
            every.append(_bar(f"plain at {length} over its bytes{word}", bar, of, STATIC))
    for length, bar in ((512, 1.15), (4096, 1.15), (32_768, 1.3)):
        every.append(_bar(f"32 rows over plain at {length}", bar, _of(table.wide, length), STATIC))
    for length in (512, 4096, 32_768):
        name = f"16 texts of 16 rows, top-p, at {length}: step over forward"
        every.append(_bar(name, 1.15, _of(table.batch, length), STATIC))
    for length in (512, 4096, 32_768):
        for n in (1, 16, 32):
            name = f"graph against today's step, {n} rows at {length}"
            every.append(_bar(name, 1.5, _of(table.faster, length, n), ("graph",), least=True))
    for length in (512, 4096):
        name = f"host ms of a step not hidden, context at {length}"
        every.append(_bar(name, 0.3, _of(table.host, length), STATIC))
    return every


def _of(find: Callable[..., float | None], *inputs: int) -> Callable[[str], float | None]:
    return lambda mode: find(mode, *inputs)


def _bar(
    name: str,
    bar: float,
    find: Callable[[str], float | None],
    modes: Sequence[str],
    *,
    least: bool = False,
) -> dict[str, Any]:
    """Return a bar with the best figure; `least` marks a lower bound."""
    values: list[Value] = [(v, mode) for mode in modes if (v := find(mode)) is not None]
    goal = {"name": name, "bar": f">= {bar}" if least else f"<= {bar}"}
    if not values:
        return {**goal, "measured": NOT_MEASURED, "mode": None, "met": None}
    value, mode = (max if least else min)(values)
    met = value >= bar if least else value <= bar
    return {**goal, "measured": round(value, 4), "mode": mode, "met": met}
