"""Turns a trace into one self-contained page: no script, no network, everything escaped.

The page shows the answer coloured by the source of each token, the tokens of every step, where
the time went, and the figures of the report. All text from models and documents reaches the
template as plain strings and is escaped there; the page's own policy forbids scripts altogether.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragspec.errors import InputError
from ragspec.pipelines.runview import RunView, run_view
from ragspec.tracefile import read_trace


def write_page(trace: Path | str, out: Path | str) -> None:
    """Make the page of a trace file.

    Raises InputError where the trace cannot be read or the page cannot be written.
    """
    save(render(run_view(read_trace(trace))), out)


def save(page: str, out: Path | str) -> None:
    """Write a page. Raises InputError where the file cannot be written."""
    try:
        Path(out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write the page to {str(out)!r} ({error.strerror}): expected a file in an "
            "existing, writable folder. Choose another path with -o."
        ) from error


def render(run: RunView) -> str:
    """Return the page of one run as HTML."""
    return render_template("page.html.j2", run=run)


def render_template(name: str, **values: Any) -> str:
    """Return one of the room's templates, filled; every value is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)
