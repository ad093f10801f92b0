"""Ways of decoding measured side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.bench.records import Measured as Measured
    from ragspec.pipelines.bench.table import make_table as make_table
    from ragspec.pipelines.bench.text import run_benchmark as run_benchmark
    from ragspec.pipelines.bench.text import write_json as write_json

_WHERE = {
    "Measured": "ragspec.pipelines.bench.records",
    "make_table": "ragspec.pipelines.bench.table",
    "run_benchmark": "ragspec.pipelines.bench.text",
    "write_json": "ragspec.pipelines.bench.text",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
