"""The command `bench.py retrieval`: iterative RAG with and without speculation, by index.

Both variants answer each question in changing order, over the same engine, drafts and prefix cache.
The ratio is of the wall time of whole answers. The row also has the figures of RaLMSpec's formula
for the expected speedup: time of a stride, times of searches by batch, and the share of right
speculated lookups. Other work disturbs the processor time less, but it adds up work that overlaps.
A third variant, with `--flare`, searches only after improbable tokens, so its answers may differ.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.data import read_records
from ragspec.errors import InputError
from ragspec.pipelines.console.checks import check_output
from ragspec.pipelines.console.options import silence_transformers

if TYPE_CHECKING:
    from ragspec.pipelines.answering.iterative import IterativeRag
    from ragspec.retrievers.search.documents import Document
    from ragspec.retrievers.search.passage_index import PassageIndex
    from ragspec.retrievers.search.passages import Passage

CASES = ("windows", "passages", "hnsw", "bm25", "far")
WORDS = 40  # words of a window
LATENCY = 0.2  # simulated seconds of a distant search


@dataclass(slots=True)
class Case:
    """The figures of one index and stride; seconds by variant and question."""

    name: str
    rags: dict[str, IterativeRag]
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    queries: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    equal: int = 0
    tokens: int = 0
    strides: int = 0
    passages: int = 0
    hits: int = 0
    guesses: int = 0
    gated: int = 0
    rounds: int = 0
    overlapped: int = 0

    def run(self, question: str, turn: int, tokens: int) -> None:
        """Answer a question in all variants."""
        answers = {}
        for variant in self.rags if turn % 2 else reversed(self.rags):
            began, cpu_began = time.perf_counter(), time.process_time()
            answers[variant] = self.rags[variant].ask(question, max_new_tokens=tokens, refuse=False)
            self.seconds[variant].append(time.perf_counter() - began)
            self.cpu_seconds[variant].append(time.process_time() - cpu_began)
            stats = answers[variant].report.retrieval
            assert stats is not None
            self.calls[variant] += stats.calls
            self.queries[variant] += stats.queries
        stats = answers["auto"].report.retrieval
        assert stats is not None
        self.equal += answers["off"].generation.tokens == answers["auto"].generation.tokens
        self.tokens += len(answers["auto"].generation.tokens)
        self.strides += stats.strides
        self.passages += len({hit.passage.text for hit in answers["auto"].passages})
        self.hits += stats.hits
        self.guesses += stats.hits + stats.rollbacks
        self.gated += stats.gated
        self.rounds += stats.rounds
        self.overlapped += any(event.what == "ahead" for event in stats.events)

    def row(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        pairs = zip(self.seconds["off"], self.seconds["auto"], strict=True)
        off, auto = self.rags["off"].schedule, self.rags["auto"].schedule
        return {
            "case": self.name,
            "questions": len(self.seconds["auto"]),
            "equal": self.equal,
            "tokens": self.tokens,
            "strides": self.strides,
            "passages": self.passages,
            "ratio": sum(self.seconds["off"]) / sum(self.seconds["auto"]),
            "ratio_median": median(off / auto for off, auto in pairs),
            "ratio_cpu": sum(self.cpu_seconds["off"]) / sum(self.cpu_seconds["auto"]),
            "stride_ms": off.stride_ms,
            "search_ms": auto.search.medians | {1: off.search.of(1)},
            "hit_share": self.hits / self.guesses if self.guesses else None,
            "gated_share": self.gated / self.rounds if self.rounds else None,
            "overlapped": self.overlapped,
            "seconds": {variant: sum(spent) for variant, spent in self.seconds.items()},
            "cpu_seconds": {variant: sum(spent) for variant, spent in self.cpu_seconds.items()},
            "calls": dict(self.calls),
            "queries": dict(self.queries),
        }


def retrieval(
    data: Annotated[
        Path, typer.Option(help="Folder with passages.jsonl.gz {text} and queries.jsonl.gz.")
    ],
    model: Annotated[str, typer.Option(help="Name or folder of the target model.")] = "starter",
    cases: Annotated[
        str, typer.Option(help=f"Indexes, comma-separated: {', '.join(CASES)}.")
    ] = ",".join(CASES),
    stride: Annotated[
        str, typer.Option(help="Tokens between two searches, comma-separated: 4,1.")
    ] = "4",
    windows: Annotated[int, typer.Option(min=1, help="Windows of the largest index.")] = 1_000_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each case.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")] = 64,
    overlap: Annotated[
        bool | None, typer.Option(help="Generate while a search runs; default: if it pays.")
    ] = None,
    flare: Annotated[
        float | None,
        typer.Option(help="Also run FLARE: search only after tokens below this probability."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this JSON file.")
    ] = None,
) -> None:
    """Compare iterative RAG that waits for each search with a speculative one."""
    from rich.console import Console

    from ragspec.engine.engine import Engine

    check_output(out)
    silence_transformers()
    names = [name.strip() for name in cases.split(",") if name.strip()]
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise InputError(
            f"Expected --cases of {', '.join(CASES)}, got {''.join(unknown[:1])!r}. Choose some."
        )
    texts = [record["question"] for record in read_records(data / "queries.jsonl.gz")]
    texts = texts[:: max(1, len(texts) // questions)][:questions]
    engine = Engine.from_pretrained(model)
    rows: list[dict[str, Any]] = []
    console = Console(width=140)
    with Console(stderr=True).status("reading passages") as status:
        for name in names:
            status.update(f"indexing for {name}")
            retriever, search = _build_index(name, data, windows)
            for tokens_between in map(int, stride.split(",")):
                rags = _build_rags(engine, retriever, search, tokens_between, overlap, flare)
                case = Case(f"{name}, stride {tokens_between}", rags)
                for rag in case.rags.values():  # warms up and times strides and searches
                    rag.ask(texts[-1], max_new_tokens=16, refuse=False)
                for turn, question in enumerate(texts):
                    status.update(f"{case.name}: question {turn + 1}/{len(texts)}")
                    case.run(question, turn, tokens)
                rows.append(case.row())
                console.print_json(data=rows[-1])
    if out is not None:
        _write(out, rows, {"model": model, "windows": windows, "tokens": tokens})


def _build_rags(
    engine: Any,
    retriever: Any,
    search: str | None,
    stride: int,
    overlap: bool | None,
    flare: float | None,
) -> dict[str, IterativeRag]:
    from ragspec.pipelines.answering.iterative import IterativeRag as AnyRag
    from ragspec.pipelines.answering.iterative import IterativeSearch

    settings = partial(IterativeSearch, stride=stride, search=search)
    variants = {"off": settings(speculate="off"), "auto": settings(overlap=overlap)}
    if flare is not None:
        variants["flare"] = settings(overlap=overlap, flare=flare)
    return {name: AnyRag(engine, retriever, each) for name, each in variants.items()}


def _build_index(name: str, data: Path, windows: int) -> tuple[Any, str | None]:
    """Return the retriever of a case and its kind of search."""
    from ragspec.retrievers.search.documents import Document
    from ragspec.retrievers.search.passage_index import PassageIndex

    texts = [record["text"] for record in read_records(data / "passages.jsonl.gz")]
    documents = [Document(f"{i}", "", text) for i, text in enumerate(texts)]
    if name == "windows":
        return _windowed(documents, windows), "dense"
    if name in ("bm25", "far"):
        index = PassageIndex.build(documents, words=400, embedder=None)
        return (index, "sparse") if name == "bm25" else (_with_latency(index), None)
    kind = "exact" if name == "passages" else name
    return PassageIndex.build(documents, words=400, dense=kind, sparse=False), "dense"


def _windowed(documents: Sequence[Document], count: int) -> PassageIndex:
    """Return an exact index of `count` overlapping windows of 40 words."""
    from ragspec.retrievers.search.dense import DenseIndex, load_embedder
    from ragspec.retrievers.search.passage_index import PassageIndex as AnyIndex

    words = sum(len(document.text.split()) for document in documents)
    step = max(1, words // count)
    cut = [w for i, document in enumerate(documents) for w in _windows(i, document.text, step)]
    passages = cut[:count]
    dense = DenseIndex.build([passage.text for passage in passages], load_embedder())
    dense.search("first", 1)  # builds the copy that searches scan
    return AnyIndex(documents, passages, dense=dense, sparse=None)


def _windows(number: int, text: str, step: int) -> Iterator[Passage]:
    """Yield windows of a text, one every `step` words."""
    from ragspec.retrievers.search.passages import Passage as AnyPassage

    starts, place = [], 0
    for word in text.split():
        place = text.index(word, place)
        starts.append((place, place + len(word)))
        place += len(word)
    for first in range(0, len(starts), step):
        start, end = starts[first][0], starts[min(first + WORDS, len(starts)) - 1][1]
        yield AnyPassage(number, start, end, "", text[start:end])


def _with_latency(index: PassageIndex) -> Callable[..., list[tuple[str, float, dict[str, Any]]]]:
    """Return a sparse search with a simulated latency."""

    def search(query: str, k: int) -> list[tuple[str, float, dict[str, Any]]]:
        time.sleep(LATENCY)
        hits = index.search(query, k, "sparse")
        return [(hit.passage.text, hit.score, {"name": hit.document.name}) for hit in hits]

    return search


def _write(path: Path, rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    text = json.dumps({"facts": facts, "rows": list(rows)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
