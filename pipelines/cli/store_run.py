"""Run the commands of `ragspec store`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import DocumentError, InputError, ModelError, PromptTooLongError, StoreError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import Setting
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, read_prompts, read_texts

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.generation import Generation
    from ragspec.retrievers.corpus.catalogue import CorpusInfo, ProgressCallback
    from ragspec.retrievers.corpus.index import CorpusIndex

SUFFIX = ".answered"
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where the corpus is written.")]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Prompts that a model answers into a corpus."""

    prompts: Annotated[Path, typer.Argument(help="A jsonl or parquet file of prompts.")]
    out: OutOption
    engine: o.EngineOptions
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256
    json: o.JsonOption = False
    batch: Annotated[int, Setting("Prompts answered side by side.", least=1)] = 16
    field: Annotated[
        str | None, Setting("Column of the rows; the usual names are tried without it.")
    ] = None
    tenant: Annotated[str, Setting("Who may see the answers: global, or the name of a tenant.")] = (
        "global"
    )


class Answered:
    """The hashes of prompts whose answers are in a store, in a file beside it.

    A hash is written after its answer. So after a kill some prompts may be answered again, but no
    answer is missing.

    Args:
        about: Everything besides the prompt that an answer depends on, as JSON types.
        new: Whether to delete an old file.
    """

    def __init__(self, store: Path, about: dict[str, Any], *, new: bool) -> None:
        self.path = store.with_name(store.name + SUFFIX)
        self.skipped = 0
        self._about = json.dumps(about, sort_keys=True)
        if new:
            self.path.unlink(missing_ok=True)
        self._marks = set(self.path.read_text().split()) if self.path.is_file() else set[str]()
        self._open: list[str] = []

    def left(self, prompts: Iterable[Any]) -> Iterator[Any]:
        """Yield the prompts without an answer, each once."""
        for prompt in prompts:
            mark = self._mark(prompt)
            if mark in self._marks:
                self.skipped += 1
                continue
            self._marks.add(mark)
            self._open.append(mark)
            yield prompt

    def saved(self, count: int) -> None:
        """Write the hashes of the first `count` open prompts, whose answers are in the store."""
        done, self._open = self._open[:count], self._open[count:]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{mark}\n" for mark in done)

    def _mark(self, prompt: Any) -> str:
        text = self._about + json.dumps(prompt, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


PREFIX = 12  # characters of a fingerprint to show
FLUSH_SECONDS = 60.0  # between two writes of answers to disk


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model by path or name, without its weights.

    Raises:
        ModelNotFoundError: There is no such model.
        ModelError: It has no tokenizer that loads.
    """
    from transformers import AutoTokenizer

    from ragspec.models.resolve import resolve_model
    from ragspec.pipelines.console.options import silence_transformers

    silence_transformers()
    folder = resolve_model(name).folder
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged tokenizer.json raises the bare class
        raise ModelError(
            f"{name} holds no tokenizer that loads ({error}); expected tokenizer.json. Save it "
            "there with tokenizer.save_pretrained(folder)."
        ) from error


def build_store(
    sources: Iterable[str],
    model: str,
    out: Path,
    columns: TextColumns,
    terminal: Terminal,
    limit: int | None = None,
) -> CorpusInfo:
    """Build a corpus from a stream of text; an older corpus stays if that fails.

    Args:
        limit: About the most tokens to read.

    Raises:
        DocumentError: The sources hold no text.
        StoreError: `out` has a corpus that holds more than documents.
    """
    from ragspec.retrievers.corpus.catalogue import tokenized
    from ragspec.retrievers.corpus.index import CorpusIndex

    sources = list(sources)
    _check_replaceable(out)
    tokenizer = load_tokenizer(model)
    texts = read_texts(sources, columns, terminal.note_skipped)
    with counting(terminal, "reading") as on_progress:
        rows: Iterator[Any] = tokenized(texts, tokenizer, on_progress)
        if limit is not None:
            rows = at_most(rows, limit)
        with CorpusIndex.build(_some(rows, sources), tokenizer, out) as store:
            return store.info()


def _check_replaceable(out: Path) -> None:
    """Raise StoreError if a corpus holds text that a build would lose."""
    from ragspec.drafters.method import GLOBAL
    from ragspec.retrievers.corpus.catalogue import KIND, SegmentSource, read_catalogue
    from ragspec.storage.store import OpenStore, read_current

    try:
        path, manifest = read_current(out)
        if manifest.kind != KIND:
            return  # the build refuses it
        catalogue = read_catalogue(OpenStore(path, manifest))
    except StoreError:
        return  # there is none, or a damaged one, which may be built again
    appended = any(record.source is SegmentSource.APPENDED for record in catalogue.segments)
    scopes = sorted({record.scope for record in catalogue.segments})
    model = catalogue.model
    held = [f"outputs of model {model[:PREFIX]}"] if model is not None else []
    held += ["text that was appended while in use"] if appended else []
    held += [f"text of scope {', '.join(scopes)}"] if set(scopes) - {GLOBAL} else []
    if held:
        raise StoreError(
            f"{out} holds {' and '.join(held)} ({catalogue.tokens:,} tokens), which a new corpus "
            "would replace; expected a new folder or a corpus of documents. Name another folder "
            "with --out, or remove this one first."
        )


def store_answers(options: AnswerOptions, terminal: Terminal) -> CorpusInfo:
    """Answer prompts greedily and add the answers to a new corpus or one of this model.

    Prompts that have an answer in it are skipped. An interrupt keeps all complete answers, a kill
    those of a minute before.

    Raises:
        InputError: There is no prompt; also the errors of the engine and the store.
    """
    from ragspec.storage.store import POINTER

    out, most, scope = options.out, options.max_new_tokens, options.tenant
    about = {"model": options.engine.model, "tokens": most, "scope": scope}
    answered = Answered(out, about, new=not (out / POINTER).exists())
    rest = answered.left(read_prompts(options.prompts, options.field))
    first = list(islice(rest, options.batch))  # before the model is loaded: the file may be wrong
    if not first and not answered.skipped:
        raise InputError(f"{options.prompts} holds no prompt; expected one row for each.")
    with terminal.working("loading the model"):
        engine = options.engine.load_engine()
    answers = tokens = 0
    with _open_for(engine, out) as store, counting(terminal, "answering", "answers") as on_progress:
        store.record(engine, scope=scope)
        began, done = time.monotonic(), 0
        while first:
            for generation in _answer(engine, first, most, terminal):
                answers, tokens = answers + 1, tokens + len(generation.tokens)
            on_progress(answers, tokens)
            done += len(first)
            if time.monotonic() - began >= FLUSH_SECONDS:
                store.flush()
                answered.saved(done)
                began, done = time.monotonic(), 0
            first = list(islice(rest, options.batch))
        store.flush()
        answered.saved(done)
        if answered.skipped:
            terminal.note(f"{answered.skipped} prompts were answered before and left out")
        return store.info()


def _answer(
    engine: Engine, prompts: list[Any], max_new_tokens: int, terminal: Terminal
) -> list[Generation]:
    """Return the greedy answers; note and leave out prompts that are too long."""
    try:
        answers: list[Generation] = engine.generate(prompts, max_new_tokens=max_new_tokens)
    except PromptTooLongError as error:
        if len(prompts) == 1:
            terminal.note(f"left out: {error}")
            return []
        results = [_answer(engine, [prompt], max_new_tokens, terminal) for prompt in prompts]
        return [answer for answers in results for answer in answers]
    return answers


def _open_for(engine: Engine, out: Path) -> CorpusIndex:
    """Open the corpus of this model's answers, or create it; raise StoreError for documents."""
    from ragspec.retrievers.corpus.index import CorpusIndex
    from ragspec.storage.store import POINTER

    if (out / POINTER).exists():
        store = CorpusIndex.open(out, tokenizer=engine.tokenizer, model=engine)
        info = store.info()
        if info.tokens and info.model is None:  # would count as outputs of this model
            store.close()
            raise StoreError(
                f"{out} holds documents ({info.tokens:,} tokens), no model's answers; name a new "
                "folder for the answers with --out."
            )
        return store
    return CorpusIndex.build([], engine.tokenizer, out, model=engine)


def verify_store(path: Path) -> dict[str, Any]:
    """Hash every file of a store, a datastore or an index, and return the figures.

    Raises:
        StoreError: A file is missing or was changed.
    """
    from ragspec.storage.store import open_store, read_current

    began = time.perf_counter()
    store = open_store(path, read_current(path)[1].kind, verify="full")
    seconds = time.perf_counter() - began
    size = sum(record.size for record in store.manifest.files.values())
    return {
        "path": str(path),
        "kind": store.manifest.kind,
        "sound": True,
        "files": len(store.manifest.files),
        "bytes": size,
        "mb_per_second": round(size / 1e6 / seconds, 1),
    }


def show_info(info: CorpusInfo, terminal: Terminal) -> None:
    """Print what a corpus holds."""
    terminal.line(f"{info.path} ({info.generation})")
    each = f"{info.bytes / info.tokens:.2f} bytes a token" if info.tokens else "empty"
    terminal.line(
        f"{info.tokens:,} tokens in {info.documents:,} documents, {len(info.segments)} segments, "
        f"{info.bytes:,} bytes ({each})"
    )
    terminal.line(f"vocabulary {info.vocab_size:,}, sorted to {info.depth} tokens")
    model = info.model[:PREFIX] if info.model else "none (documents)"
    tokenizer = info.tokenizer[:PREFIX] if info.tokenizer else "unknown"
    terminal.line(f"tokenizer {tokenizer}, outputs of model {model}")
    if info.segments:
        terminal.table(
            "segments, oldest text first",
            ["name", "scope", "source", ">tokens", ">documents"],
            [
                [r.name, r.scope, r.source.value, f"{r.tokens:,}", f"{r.documents:,}"]
                for r in info.segments
            ],
        )


@contextmanager
def counting(terminal: Terminal, what: str, unit: str = "documents") -> Iterator[ProgressCallback]:
    """Yield a callback (documents, tokens) that shows them on a terminal."""
    with terminal.working(what) as show:
        yield lambda documents, tokens: show(f"{what}: {documents:,} {unit}, {tokens:,} tokens")


def _some(rows: Iterable[Any], sources: Iterable[str]) -> Iterator[Any]:
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


def at_most(rows: Iterable[Any], limit: int) -> Iterator[Any]:
    """Yield the first `limit` tokens of the rows."""
    for row in rows:
        yield row[:limit]
        limit -= len(row)
        if limit <= 0:
            return
