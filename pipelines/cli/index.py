"""`ragspec index`: build an index of documents, and update it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer

from ragspec.errors import pluralize
from ragspec.models.checks import check_embedder
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal, progress

if TYPE_CHECKING:
    from ragspec.retrievers.search.upkeep import Change

LISTED = 8  # most names of a change to show
PathArgument = Annotated[list[Path], Argument(help="Folders and files.", parser=checks.filled_path)]
IndexArgument = Annotated[Path, Argument(help="Folder of the index.", file_okay=False)]
ReportOption = Annotated[
    bool, Option("--report", help="Show what was guessed, repaired or left out in each file.")
]

app = Typer(
    no_args_is_help=True,
    help="Documents read once, for `ragspec ask --docs INDEX`: build, add, remove, refresh, info.",
)


@app.command()
def build(
    paths: PathArgument,
    out: Annotated[Path, Option("--out", "-o", help="Where the index is written.")],
    embedder: o.EmbedderOption = None,
    dense: Annotated[
        Literal["exact", "hnsw"],
        Option(help="How meanings are searched: exact; hnsw (faiss), approximate."),
    ] = "exact",
    replace: Annotated[
        bool, Option("--replace", help="Put it in the place of the index that is there.")
    ] = False,
    report: ReportOption = False,
) -> None:
    """Read documents into a new index."""
    checks.check_paths(*paths)
    if embedder is not None:
        check_embedder(embedder)
    checks.check_new_store(out, "passages", replace=replace)
    terminal = Terminal()
    qa = o.index_documents(paths, embedder, terminal, dense)
    qa.save(out, replace=replace)
    _note_repairs(terminal, {each.name: each.notes for each in qa.documents}, report)
    terminal.note(f"wrote {pluralize(len(qa.documents), 'document')} to {out}")


@app.command()
def add(
    index: IndexArgument,
    paths: PathArgument,
    embedder: o.EmbedderOption = None,
    report: ReportOption = False,
) -> None:
    """Read more documents into an index; files that it holds are read again."""
    checks.check_paths(*paths)
    _change(index, embedder, lambda upkeep, **options: upkeep.add(index, paths, **options), report)


@app.command()
def remove(
    index: IndexArgument,
    names: Annotated[list[str], Argument(help="Documents by name, files or folders.")],
    embedder: o.EmbedderOption = None,
) -> None:
    """Take documents out of an index, also for later refreshes."""
    _change(index, embedder, lambda upkeep, **options: upkeep.remove(index, names, **options))


@app.command()
def refresh(
    index: IndexArgument, embedder: o.EmbedderOption = None, report: ReportOption = False
) -> None:
    """Add new files to an index, replace changed ones, and remove deleted ones."""
    _change(index, embedder, lambda upkeep, **options: upkeep.refresh(index, **options), report)


@app.command()
def info(index: IndexArgument, json: o.JsonOption = False, report: ReportOption = False) -> None:
    """Show the contents of an index."""
    checks.check_store(index, "passages")
    terminal = Terminal(quiet=json)
    with terminal.working("reading the index"):
        from ragspec.retrievers.search.upkeep import described

        facts = described(index)
    terminal.json(facts)
    terminal.line(
        f"{pluralize(len(facts['documents']), 'document')} in "
        f"{pluralize(facts['passages'], 'passage')} of at most about {facts['words']} words, "
        f"{facts['bytes'] / 2**20:.1f} MiB"
    )
    parts = [f"meaning ({facts['embedder']}, {facts['dense']})"] if facts["embedder"] else []
    terminal.line(f"searched by {' and '.join([*parts, *['words'] * facts['sparse']])}")
    for path in facts["paths"]:
        terminal.line(f"read from {path}")
    if facts["removed"]:
        terminal.line(f"left out of refreshes: {pluralize(len(facts['removed']), 'path')}")
    rows = [[row["name"], row["title"], str(row["passages"])] for row in facts["documents"]]
    terminal.table("Documents", ["name", "title", ">passages"], rows)
    _note_repairs(terminal, {row["name"]: row["notes"] for row in facts["documents"]}, report)


def _note_repairs(terminal: Terminal, notes: Mapping[str, Sequence[str]], report: bool) -> None:
    """Show what was guessed, repaired or left out in each document, or in how many."""
    repaired = {name: each for name, each in notes.items() if each}
    if report:
        for name, each in repaired.items():
            terminal.note(f"{name}: {'; '.join(each)}")
    elif repaired:
        count = pluralize(len(repaired), "document")
        terminal.note(f"{count} had text guessed or repaired; `index info --report` shows how")


def _change(
    index: Path, embedder: str | None, change: "Callable[..., Change]", report: bool = False
) -> None:
    """Change an index by a function of `upkeep` and show the changes."""
    checks.check_store(index, "passages")
    if embedder is not None:
        check_embedder(embedder)
    terminal = Terminal()
    with progress(terminal, "reading documents") as on_progress:
        from ragspec.retrievers.search import upkeep

        if embedder is not None:
            o.silence_transformers()
        done = change(upkeep, embedder=embedder, on_progress=on_progress)
    for skipped in done.skipped:
        terminal.note_skipped(skipped.path, skipped.reason)
    _note_repairs(terminal, done.notes, report)
    for missing in done.missing:
        terminal.note(f"its documents stay: {missing.path} {missing.reason}", "bold")
        terminal.note(f"  `ragspec index remove {index} {missing.path}` takes them out")
    for what in ("added", "changed", "removed"):
        if names := getattr(done, what):
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            terminal.note(f"{what} {len(names)}: {', '.join(names[:LISTED])}{more}")
    unchanged = f"{pluralize(done.unchanged, 'document')} unchanged"
    terminal.note(unchanged if done else "nothing has changed")
