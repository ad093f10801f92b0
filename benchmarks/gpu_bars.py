"""What a step on an accelerator is to cost, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

STATIC = ("graph", "compile")
NOT_MEASURED = "not measured"
Row = dict[str, Any]
Value = tuple[float, str]  # what was measured, and in which mode


class Rows:
    """The measured rows, found by what they are about."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = [row for row in rows if "ms" in row]

    def one(self, mode: str, **selection: Any) -> Row | None:
        """Return the row of a mode with these values, None where there is none."""
        selection = {
            "part": "single",
            "batch": 1,
            "distribution": "greedy",
            "mode": mode,
            **selection,
        }
        same = (r for r in self._rows if all(r.get(k) == v for k, v in selection.items()))
        return next(same, None)

    def plain(self, mode: str, length: int) -> float | None:
        """Return plain steps over the time in which their bytes are read."""
        row = self.one(mode, length=length, rows=1)
        return row and row["over_floor"]

    def wide(self, mode: str, length: int) -> float | None:
        """Return steps of 32 rows over plain ones."""
        plain = self.one(mode, length=length, rows=1)
        wide = self.one(mode, length=length, rows=32)
        return wide["ms"] / plain["ms"] if plain and wide else None

    def batch(self, mode: str, length: int) -> float | None:
        """Return steps of 16 texts, 16 rows each with top-p, over their forwards."""
        row = self.one(mode, part="batch", batch=16, length=length, rows=16, distribution="top-p")
        return row and row["ms"] / row["forward_ms"]

    def faster(self, mode: str, length: int, rows: int) -> float | None:
        """Return today's step over the static one."""
        now = self.one(mode, length=length, rows=rows)
        before = self.one("off", length=length, rows=rows)
        return before["ms"] / now["ms"] if now and before else None

    def host(self, mode: str, length: int) -> float | None:
        """Return milliseconds of a step of drafter `context` in which the device has nothing."""
        row = self.one(mode, part="context", length=length, rows=None)
        return row and row.get("host_idle_ms")


def bars(rows: Sequence[Row], measured: bool) -> list[dict[str, Any]]:
    """Return every bar as name, bar, measured, mode and met; of the best mode that was measured.

    measured: whether the rows are of the models and the device that the bars are about; else
    nothing was measured.
    """
    result = Rows(rows if measured else ())
    message = []
    for length in (512, 4096):
        for word, bar in (("", 1.25), (" (stretch)", 1.10)):
            of = _of(result.plain, length)
            message.append(_bar(f"plain at {length} over its bytes{word}", bar, of, STATIC))
    for length, bar in ((512, 1.15), (4096, 1.15), (32_768, 1.3)):
        message.append(
            _bar(f"32 rows over plain at {length}", bar, _of(result.wide, length), STATIC)
        )
    for length in (512, 4096, 32_768):
        name = f"16 texts of 16 rows, top-p, at {length}: step over forward"
        message.append(_bar(name, 1.15, _of(result.batch, length), STATIC))
    for length in (512, 4096, 32_768):
        for n in (1, 16, 32):
            name = f"graph against today's step, {n} rows at {length}"
            message.append(_bar(name, 1.5, _of(result.faster, length, n), ("graph",), least=True))
    for length in (512, 4096):
        name = f"host ms of a step not hidden, context at {length}"
        message.append(_bar(name, 0.3, _of(result.host, length), STATIC))
    return message


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
    """Return a bar with the best that was found; least: it is to be reached, not to be kept to."""
    values: list[Value] = [(v, mode) for mode in modes if (v := find(mode)) is not None]
    record = {"name": name, "bar": f">= {bar}" if least else f"<= {bar}"}
    if not values:
        return {**record, "measured": NOT_MEASURED, "mode": None, "met": None}
    value, mode = (max if least else min)(values)
    met = value >= bar if least else value <= bar
    return {**record, "measured": round(value, 4), "mode": mode, "met": met}
