"""`ragspec store`: build and maintain stores to draft from."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Argument, Typer

from ragspec.errors import DocumentError, PromptTooLongError, StoreError, pluralize
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import add_command, argument, option, setting, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, read_ahead, read_prompts, read_texts
from ragspec.storage.store import POINTER, checked_scope, open_store, read_current
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.generation import Generation
    from ragspec.retrievers.corpus.catalogue import ProgressCallback
    from ragspec.retrievers.corpus.index import CorpusIndex
    from ragspec.retrievers.indexes.suffix_array import TokenRow

app = Typer(no_args_is_help=True, help="Corpora to draft from: build, fill, look after.")

StoreArgument = Annotated[Path, Argument(metavar="STORE", help="A corpus on disk.")]
SOURCES = "Folders, files (documents, jsonl, parquet), or Hugging Face data sets, hf:NAME."
COLUMNS = ("name", "scope", "source")  # of the table of segments
PREFIX = 12  # characters of a fingerprint to show
FLUSH_SECONDS = 60.0  # between two writes of answers to disk


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Prompts that a model answers into a corpus."""

    engine: o.EngineOptions
    prompts: Path = argument(..., "A jsonl or parquet file of prompts.")
    out: Path = option(..., "Where the corpus is written.", "--out", "-o")
    max_new_tokens: int = option(256, "Most tokens of an answer.", min=1)
    json: o.JsonOption = False
    batch: int = setting(16, "Prompts answered side by side.", least=1)
    field: str | None = setting(None, "Column of the rows; the usual names are tried without it.")
    tenant: str = setting("global", "Who may see the answers: global, or the name of a tenant.")

    def __post_init__(self) -> None:
        checks.check_new_store(self.out, "corpus")
        self.engine.check_needs()
        checked_scope(self.tenant)


def load_tokenizer(name: str) -> Tokenizer:
    """Return a model's tokenizer, without its weights; raise ModelError if there is none."""
    from ragspec.models.checks import check_tokenizer
    from ragspec.models.load import LOCAL, read_tokenizer
    from ragspec.models.resolve import resolve_model

    o.silence_transformers()
    source = resolve_model(name)
    files = LOCAL if source.file is None else {**LOCAL, "gguf_file": source.file}
    check_tokenizer(source)
    return read_tokenizer(f"{name} was found", source.folder, files)


@dataclass(frozen=True, slots=True)
class StoreBuildOptions:
    """The text of a corpus."""

    kind: ClassVar[str] = "corpus"
    columns: TextColumns
    sources: list[str] = argument(..., SOURCES)
    out: Path = option(..., "Where it is written.", "--out", "-o")
    model: o.ModelOption = "starter"
    max_tokens: int | None = option(None, "Read so many tokens at most.", min=1)
    replace: bool = option(False, "Put it in the place of the one that is there.", "--replace")
    json: o.JsonOption = False

    def __post_init__(self) -> None:
        checks.check_model(self.model)
        checks.check_new_store(self.out, self.kind, replace=self.replace)


@takes_records
def build(options: StoreBuildOptions) -> None:
    """Tokenize text with a model's tokenizer and index every phrase of it."""
    terminal = Terminal(quiet=options.json)
    texts = read_texts(options.sources, options.columns, terminal.note_skipped)

    from ragspec.retrievers.corpus.catalogue import tokenized
    from ragspec.retrievers.corpus.index import CorpusIndex

    tokenizer = load_tokenizer(options.model)
    with counting(terminal, "reading") as on_progress:
        rows = at_most(tokenized(texts, tokenizer, on_progress), options.max_tokens)
        with CorpusIndex.build(_some(rows, options.sources), tokenizer, options.out) as corpus:
            info = corpus.info()
    _show(info | {"skipped": terminal.skipped}, terminal)


@takes_records
def from_answers(options: AnswerOptions) -> None:
    """Answer prompts greedily with a model and store the answers, to draft from for this model.

    Up to 16 tokens that end a prompt are stored in front of its answer.
    An interrupt keeps all complete answers, a kill those of a minute before.
    """
    terminal = Terminal(quiet=options.json)
    prompts = read_ahead(read_prompts(options.prompts, options.field))
    with terminal.working("loading the model"):
        engine = options.engine.load_engine()
    answers = tokens = 0
    with (
        _open_for(engine, options.out) as store,
        counting(terminal, "answering", "answers") as on_progress,
    ):
        store.record(engine, scope=options.tenant)
        began = time.monotonic()
        for batch in iter(lambda: list(islice(prompts, options.batch)), []):
            for generation in _answer(engine, batch, options.max_new_tokens, terminal):
                answers, tokens = answers + 1, tokens + len(generation.tokens)
            on_progress(answers, tokens)
            if time.monotonic() - began >= FLUSH_SECONDS:
                store.flush()
                began = time.monotonic()
        store.flush()
        info = store.info()
    _show(info, terminal)


def _answer(
    engine: Engine, prompts: list[object], max_new_tokens: int, terminal: Terminal
) -> list[Generation]:
    """Return the greedy answers; note and leave out prompts that are too long."""
    try:
        return list(engine.generate(prompts, max_new_tokens=max_new_tokens))
    except PromptTooLongError as error:
        if len(prompts) == 1:
            terminal.note(f"left out: {error}")
            return []
        return [a for each in prompts for a in _answer(engine, [each], max_new_tokens, terminal)]


def _open_for(engine: Engine, out: Path) -> CorpusIndex:
    """Open the corpus of this model's answers, or create it; raise StoreError for documents."""
    from ragspec.retrievers.corpus.index import CorpusIndex

    if (out / POINTER).exists():
        store = CorpusIndex.open(out, tokenizer=engine.tokenizer, model=engine)
        info = store.info()
        if info["tokens"] and info["model"] is None:  # would count as outputs of this model
            store.close()
            raise StoreError(
                f"{out} holds documents ({info['tokens']:,} tokens), no model's answers; name a "
                "new folder for the answers with --out."
            )
        return store
    return CorpusIndex.build([], engine.tokenizer, out, model=engine)


@app.command()
def verify(path: StoreArgument, json: o.JsonOption = False) -> None:
    """Hash every file of a corpus, datastore or index; exit with code 8 if one was changed."""
    terminal, began = Terminal(quiet=json), time.perf_counter()
    with terminal.working("hashing"):
        store = open_store(path, read_current(path)[1].kind, verify="full")
    seconds = time.perf_counter() - began
    files, size = store.manifest.files, sum(each.size for each in store.manifest.files.values())
    speed = round(size / 1e6 / seconds, 1)
    facts = {"path": str(path), "kind": store.manifest.kind, "sound": True}
    terminal.json(facts | {"files": len(files), "bytes": size, "mb_per_second": speed})
    terminal.line(f"{path} is sound: {len(files)} files, {size:,} bytes, {speed:,} MB/s")


@app.command()
def info(path: StoreArgument, json: o.JsonOption = False) -> None:
    """Show the contents of a corpus."""
    checks.check_store(path, "corpus")
    terminal = Terminal(quiet=json)
    terminal.note("reading the store ...")

    from ragspec.retrievers.corpus.index import CorpusIndex

    with CorpusIndex.open(path, verify="size") as corpus:
        _show(corpus.info(), terminal)


def _show(info: dict[str, Any], terminal: Terminal) -> None:
    terminal.json(info)
    tokens, size, segments = info["tokens"], info["bytes"], info["segments"]
    terminal.line(f"{info['path']} ({info['generation']})")
    each = f"{size / tokens:.2f} bytes a token" if tokens else "empty"
    terminal.line(
        f"{pluralize(tokens, 'token', ',')} in {pluralize(info['documents'], 'document', ',')}, "
        f"{pluralize(len(segments), 'segment')}, {size:,} bytes ({each})"
    )
    depth = pluralize(info["depth"], "token")
    terminal.line(f"vocabulary {info['vocab_size']:,}, sorted to {depth}")
    model = info["model"][:PREFIX] if info["model"] else "none (documents)"
    tokenizer = info["tokenizer"][:PREFIX] if info["tokenizer"] else "unknown"
    terminal.line(f"tokenizer {tokenizer}, outputs of model {model}")
    if segments:
        rows = [[*map(r.get, COLUMNS), f"{r['tokens']:,}", f"{r['documents']:,}"] for r in segments]
        terminal.table("segments, oldest text first", [*COLUMNS, ">tokens", ">documents"], rows)


@contextmanager
def counting(terminal: Terminal, what: str, unit: str = "documents") -> Iterator[ProgressCallback]:
    """Yield a callback (documents, tokens) that shows them on a terminal."""
    with terminal.working(what) as show:
        yield lambda documents, tokens: show(f"{what}: {documents:,} {unit}, {tokens:,} tokens")


def _some(rows: Iterable[TokenRow], sources: Iterable[str]) -> Iterator[TokenRow]:
    """Yield the rows; raise DocumentError at their end if none had a token."""
    tokens = 0
    for row in rows:
        yield row
        tokens += len(row)
    if not tokens:
        raise DocumentError(
            f"{', '.join(sources)} holds no usable text; no store was written. Name documents, "
            "files of rows or a data set hf:NAME with text."
        )


def at_most(rows: Iterable[TokenRow], limit: int | None) -> Iterator[TokenRow]:
    """Yield the first `limit` tokens of the rows, all for None."""
    limit = sys.maxsize if limit is None else limit
    for row in rows:
        yield row[:limit]
        limit -= len(row)
        if limit <= 0:
            return


for command in (build, from_answers):
    add_command(app, command)
