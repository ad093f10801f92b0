"""Who gave a token, and its colour: one colour a source, the same on every page.

The eight colours of the pages are told apart also with red-, green- or blue-blind eyes, and by
lightness alone for the most part; a source that the table does not know takes a free one.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.page.run_view import RunView, run_view
from ragspec.pipelines.page.tree_view import DraftView, draft_views
from ragspec.reports.trace import DAMAGE, Trace, damaged, read_trace

if TYPE_CHECKING:
    pass

# Names of sources that are no methods: texts, and levels of methods.


TEMPLATES = Path(__file__).parent
SCRIPT = "steps.js.j2"


@dataclass(frozen=True, slots=True)
class Script:
    """The one script that a page may run, and the hash by which its policy knows it."""

    text: Any
    hash: str


def write_page(trace: Path | str, out: Path | str) -> None:
    """Make the page of a trace file.

    Raises InputError where the trace cannot be read or shown, or the page cannot be written.
    """
    from jinja2 import UndefinedError

    parsed = read_trace(trace)
    try:
        page = trace_page(parsed)
    except (*DAMAGE, UndefinedError) as error:
        raise damaged(trace, error) from error
    save(page, out)


def trace_page(trace: Trace) -> str:
    """Return the page of a trace as HTML."""
    return render(run_view(trace), draft_views(trace))


def save(page: str, out: Path | str) -> None:
    """Write a page. Raises InputError where the file cannot be written."""
    try:
        Path(out).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(
            f"cannot write the page to {str(out)!r} ({error.strerror}): expected a file in an "
            "existing, writable folder. Choose another path with -o."
        ) from error


def render(run: RunView, drafts: Sequence[DraftView] = ()) -> str:
    """Return the page of one run as HTML; without `drafts` it needs no script and has none.

    The step that is shown first is that of the longest accepted path.
    """
    chosen = max(drafts, key=lambda view: view.accepted).number if drafts else 0
    values = {"run": run, "drafts": drafts, "chosen": chosen}
    return render_template("page.html.j2", **values, script=_script() if drafts else None)


def _script() -> Script:
    from markupsafe import Markup

    text = (TEMPLATES / SCRIPT).read_text(encoding="utf-8")
    digest = b64encode(sha256(text.encode("utf-8")).digest()).decode("ascii")
    return Script(Markup(text), f"sha256-{digest}")


def render_template(name: str, **values: Any) -> str:
    """Return one of the room's templates, filled; every value is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)
