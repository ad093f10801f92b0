"""`ragspec store`: the options of its commands, which build and maintain stores to draft from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.cli.store_run import (
    AnswerOptions,
    OutOption,
    build_store,
    show_info,
    store_answers,
    verify_store,
)
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.checks import check_model
from ragspec.pipelines.console.records import add_command, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, check_sources

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

app = typer.Typer(no_args_is_help=True, help="Corpora to draft from: build, fill, look after.")

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A corpus on disk.")]


@app.callback()
def store() -> None:
    """Corpora to draft from: build, fill, look after."""


@dataclass(frozen=True, slots=True)
class StoreBuildOptions:
    """The text of a corpus."""

    sources: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files (documents, jsonl, parquet), or Hugging Face data sets, hf:NAME."
        ),
    ]
    out: OutOption
    columns: TextColumns
    model: o.ModelOption = "starter"
    max_tokens: Annotated[
        str | None, typer.Option(help="Read about so many tokens at most: 500k, 10M.")
    ] = None
    json: o.JsonOption = False

    def __post_init__(self) -> None:
        check_sources(self.sources)
        check_model(self.model)


@takes_records
def build(options: StoreBuildOptions) -> None:
    """Tokenize text with a model's tokenizer and index every phrase of it."""
    terminal = Terminal(quiet=options.json)
    limit = limit_of(options.max_tokens)
    sources, model, out = options.sources, options.model, options.out
    info = build_store(sources, model, out, options.columns, terminal, limit)
    _show(info, terminal, options.json)


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


def limit_of(text: str | None) -> int | None:
    """Return the tokens of --max-tokens, such as 250000, 500k, 10M or 1.5G; None for all.

    Raises:
        InputError: The text is no number of this kind, or 0.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+(?=[kmg]))?)([kmg]?)", text.strip().replace("_", "").lower())
    if match is None:
        raise InputError(
            f"--max-tokens is {text!r}; expected a number such as 250000, 500k or 10M."
        )
    if not (limit := int(float(match[1]) * UNITS[match[2]])):
        raise InputError("--max-tokens is 0; expected at least 1.")
    return limit


def _show(info: Any, terminal: Terminal, json: bool) -> None:
    if json:
        terminal.json(info.as_dict())
    else:
        show_info(info, terminal)


add_command(app, build)
add_command(app, from_answers, "from-answers")
