"""`ragspec store`: the options of its commands, which build and maintain stores to draft from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.pipelines.cli.store_run import (
    AnswerOptions,
    StoreBuildOptions,
    build_store,
    show_info,
    store_answers,
    verify_store,
)
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import add_command, takes_records
from ragspec.pipelines.console.terminal import Terminal

app = typer.Typer(no_args_is_help=True, help="Corpora to draft from: build, fill, look after.")

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A corpus on disk.")]


@app.callback()
def store() -> None:
    """Corpora to draft from: build, fill, look after."""


@takes_records
def build(options: StoreBuildOptions) -> None:
    """Tokenize text with a model's tokenizer and index every phrase of it."""
    terminal = Terminal(quiet=options.json)
    _show(build_store(options, terminal), terminal, options.json)


@takes_records
def from_answers(options: AnswerOptions) -> None:
    """Answer prompts greedily with a model and store the answers, to draft from for this model."""
    terminal = Terminal(quiet=options.json)
    _show(store_answers(options, terminal), terminal, options.json)


@app.command()
def info(path: StoreArgument, json: o.JsonOption = False) -> None:
    """Show the contents of a corpus."""
    from ragspec.retrievers.corpus.index import CorpusIndex

    with CorpusIndex.open(path, verify="size") as corpus:
        _show(corpus.info(), Terminal(quiet=json), json)


@app.command()
def verify(path: StoreArgument, json: o.JsonOption = False) -> None:
    """Hash every file of a corpus, datastore or index; exit with code 8 if one was changed."""
    terminal = Terminal(quiet=json)
    with terminal.working("hashing"):
        facts = verify_store(path)
    if json:
        terminal.json(facts)
    else:
        terminal.line(
            f"{path} is sound: {facts['files']} files, {facts['bytes']:,} bytes, "
            f"{facts['mb_per_second']:,} MB/s"
        )


def _show(info: Any, terminal: Terminal, json: bool) -> None:
    if json:
        terminal.json(info.as_dict())
    else:
        show_info(info, terminal)


add_command(app, build)
add_command(app, from_answers, "from-answers")
