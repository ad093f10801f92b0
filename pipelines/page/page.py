"""The HTML page of a trace."""

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from ragspec.pipelines.page.run_view import RunView
from ragspec.pipelines.page.tree_view import draft_views
from ragspec.reports.trace import DAMAGE, Trace, damaged, read_trace
from ragspec.storage.filesystem import write_output

TEMPLATES = Path(__file__).parent


def write_page(trace: Path | str, out: Path | str) -> None:
    """Write the page of a trace file; raise InputError if one of them cannot be read or written."""
    parsed = read_trace(trace)
    try:
        page = trace_page(parsed)
    except (*DAMAGE, UndefinedError) as error:
        raise damaged(trace, error) from error
    write_output(Path(out), "the page", page)


def trace_page(trace: Trace) -> str:
    """Return the page of a trace as HTML, opened at the step with the longest accepted path."""
    drafts = draft_views(trace)
    chosen = max(drafts, key=lambda view: view.accepted).number if drafts else 0
    values = {"run": RunView(trace), "drafts": drafts, "chosen": chosen}
    code = (TEMPLATES / "steps.js.j2").read_text(encoding="utf-8")
    digest = b64encode(sha256(code.encode("utf-8")).digest()).decode("ascii")
    # The hash is for the content security policy.
    script = {"text": Markup(code), "hash": f"sha256-{digest}"} if drafts else None
    return render_template("page.html.j2", **values, script=script)


def render_template(name: str, **values: object) -> str:
    """Return a template of this folder, filled; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)
