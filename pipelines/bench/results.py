"""The results of a benchmark: a table for people, and a JSON file for programs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ragspec.pipelines.bench.measure import BenchRow
from ragspec.pipelines.console import checks
from ragspec.pipelines.console.records import option
from ragspec.pipelines.console.terminal import Terminal


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Where the rows of a measurement go."""

    json: Path | None = option(None, "Write the rows to this JSON file.", "--json")

    def __post_init__(self) -> None:
        checks.check_output(self.json, checks.JSON)


NO_VALUE = "-"


def cells(row: BenchRow) -> dict[str, str]:
    """Return a row for people, by column."""
    return {
        "category": row.category,
        "variant": row.variant,
        "items": f"{row.timed}/{row.items}",
        "tokens/forward": f"{row.tokens_per_forward:.2f}",
        "ratio": _number(row.ratio),
        "95 %": f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if row.timed else NO_VALUE,
        "end to end": _number(row.ratio_end_to_end),
        "to plain": _number(row.ratio_to_plain),
        "loops": f"{row.loop_share:.2f}",
        "equal": NO_VALUE if math.isnan(row.equal_to_plain) else f"{row.equal_to_plain:.0%}",
        "label": row.label or NO_VALUE,
        **{name: _number(value, 4) for name, value in row.figures.items()},
    }


def show_results(
    rows: Sequence[BenchRow], baseline: str, facts: dict[str, object], files: RowOptions
) -> None:
    """Print the table, and write the JSON file if one is named."""
    title = f"decode seconds against {baseline}, medians of paired ratios"
    table = [cells(row) for row in rows]
    Terminal().table(title, list(table[0]), [list(each.values()) for each in table])
    facts = {"date": datetime.now(UTC).date().isoformat(), "baseline": baseline} | facts
    if files.json is not None:
        document = {**facts, "rows": [row.to_dict() for row in rows]}
        files.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _number(value: float, digits: int = 2) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:.{digits}f}"
