"""`ragspec datastore`: datastores of kNN language models, for `ragspec generate --datastore`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typer import Argument, Typer

from ragspec.errors import pluralize
from ragspec.pipelines.cli.store import PREFIX, StoreBuildOptions, counting
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import add_command, option, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import read_texts

app = Typer(
    no_args_is_help=True,
    help="Datastores of a kNN language model: hidden states of texts, and the next tokens.",
)

DatastoreArgument = Annotated[Path, Argument(metavar="DATASTORE", help="One on disk.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatastoreBuildOptions(StoreBuildOptions):
    """The text of a datastore."""

    kind: ClassVar[str] = "datastore"
    place: o.PlaceOptions
    max_tokens: int = option(10**6, "Keep so many tokens at most.", min=1)


@takes_records
def build(options: DatastoreBuildOptions) -> None:
    """Read texts with a model and keep its state before every token."""
    terminal, place = Terminal(quiet=options.json), options.place
    rows = read_texts(options.sources, options.columns, terminal.note_skipped)

    from ragspec.retrievers.knn.datastore import Datastore

    plain = o.EngineOptions(place.device, place.dtype, model=options.model, drafter="none")
    with terminal.working("loading the model"):
        engine = plain.load_engine()
    began = time.perf_counter()
    with counting(terminal, "reading") as on_progress:
        limit = options.max_tokens
        store = Datastore.build(rows, engine, options.out, max_tokens=limit, progress=on_progress)
    _show(store.info() | {"skipped": terminal.skipped}, terminal)
    terminal.note(f"built in {time.perf_counter() - began:.0f} s")


@app.command()
def info(path: DatastoreArgument, json: o.JsonOption = False) -> None:
    """Show the contents of a datastore."""
    checks.check_store(path, "datastore")
    terminal = Terminal(quiet=json)
    terminal.note("reading the datastore ...")

    from ragspec.retrievers.knn.datastore import Datastore

    _show(Datastore.open(path, verify="size").info(), terminal)


def _show(info: dict[str, Any], terminal: Terminal) -> None:
    terminal.json(info)
    terminal.line(
        f"{info['path']}: {pluralize(info['keys'], 'key', ',')} of {info['width']} numbers out of "
        f"{pluralize(info['documents'], 'document', ',')}, {info['bytes']:,} bytes"
    )
    tokenizer = (info["tokenizer"] or "none")[:PREFIX]
    terminal.line(f"model {info['model'][:PREFIX]}, tokenizer {tokenizer}")


add_command(app, build)
