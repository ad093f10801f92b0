"""`ragspec bench retrieval`: iterative RAG with and without speculation, over several indexes.

Each question is answered in both ways, one after the other in changing order, over the same
engine, drafts and kept keys; the ratio is of the wall-clock of whole answers. Beside it stand the
times of a stride (a) and of searches by batch (b), and the share of guesses that were right, by
which the formula of RaLMSpec says what was to be expected. The process's own time is less disturbed
by other work, and adds up what overlaps. A third way, with `--flare`, looks up
only after less probable tokens; its answers may be others.
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
from ragspec.pipelines.console.options import checked_output, silence_transformers

if TYPE_CHECKING:
    from ragspec.pipelines.iterative.rag import IterativeRag
    from ragspec.retrievers.search.documents import Document
    from ragspec.retrievers.search.passage_index import PassageIndex
    from ragspec.retrievers.search.passages import Passage

CASES = ("windows", "passages", "hnsw", "ivf", "bm25", "far")
WORDS = 40  # of a window
FAR = 0.2  # seconds that a distant search is late, which is simulated


@dataclass(slots=True)
class Case:
    """One index and one setting, and what came of it; seconds by way and question."""

    name: str
    rags: dict[str, IterativeRag]
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    target_number: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
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
        """Answer a question in all ways."""
        instance = {}
        for direction in self.rags if turn % 2 else reversed(self.rags):
            began, current = time.perf_counter(), time.process_time()
            instance[direction] = self.rags[direction].ask(
                question, max_new_tokens=tokens, refuse=False
            )
            self.seconds[direction].append(time.perf_counter() - began)
            self.target_number[direction].append(time.process_time() - current)
            searched = instance[direction].report.retrieval
            assert searched is not None
            self.calls[direction] += searched.calls
            self.queries[direction] += searched.queries
        message = instance["auto"].report.retrieval
        assert message is not None
        self.equal += instance["off"].generation.tokens == instance["auto"].generation.tokens
        self.tokens += len(instance["auto"].generation.tokens)
        self.strides += message.strides
        self.passages += len({hit.passage.text for hit in instance["auto"].passages})
        self.hits += message.hits
        self.guesses += message.hits + message.rollbacks
        self.gated += message.gated
        self.rounds += message.rounds
        self.overlapped += any(event.what == "ahead" for event in message.events)

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
            "ratio_own": sum(self.target_number["off"]) / sum(self.target_number["auto"]),
            "stride_ms": off.stride_ms,
            "search_ms": auto.search.to_dict() | {1: off.search.of(1)},
            "hit_share": self.hits / self.guesses if self.guesses else None,
            "gated_share": self.gated / self.rounds if self.rounds else None,
            "overlapped": self.overlapped,
            "seconds": {direction: sum(spent) for direction, spent in self.seconds.items()},
            "own_seconds": {
                direction: sum(spent) for direction, spent in self.target_number.items()
            },
            "calls": dict(self.calls),
            "queries": dict(self.queries),
        }


def retrieval(
    data: Annotated[
        Path, typer.Option(help="A folder with passages.jsonl.gz {text} and queries.jsonl.gz.")
    ],
    model: Annotated[str, typer.Option(help="Path or name of the target.")] = "starter",
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(CASES)}.")] = ",".join(CASES),
    every: Annotated[str, typer.Option(help="Tokens between two searches; several: 4,1.")] = "4",
    windows: Annotated[int, typer.Option(min=1, help="Windows of the largest index.")] = 1_000_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each case.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    overlap: Annotated[
        bool | None, typer.Option(help="Write on while a search runs: where it pays, or as said.")
    ] = None,
    flare: Annotated[
        float | None, typer.Option(help="Also look up only after tokens less probable than this.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Compare iterative RAG that waits for each search with one that writes on guesses."""
    from rich.console import Console

    from ragspec.engine.engine import Engine

    checked_output(out)
    silence_transformers()
    names = [name.strip() for name in cases.split(",") if name.strip()]
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise InputError(f"unknown case {''.join(unknown[:1])!r}. Known: {', '.join(CASES)}.")
    requests = [record["question"] for record in read_records(data / "queries.jsonl.gz")]
    requests = requests[:: max(1, len(requests) // questions)][:questions]
    engine = Engine.from_pretrained(model)
    rows: list[dict[str, Any]] = []
    console = Console(width=140)
    with Console(stderr=True).status("reading passages") as status:
        for name in names:
            status.update(f"indexing for {name}")
            retriever, search = _built(name, data, windows)
            for count in (int(each) for each in every.split(",")):
                rags = _rags(engine, retriever, search, count, overlap, flare)
                case = Case(f"{name}, every {count}", rags)
                for direction in case.rags.values():  # warms up, and times strides and searches
                    direction.ask(requests[-1], max_new_tokens=16, refuse=False)
                for turn, question in enumerate(requests):
                    status.update(f"{case.name}: question {turn + 1}/{len(requests)}")
                    case.run(question, turn, tokens)
                rows.append(case.row())
                console.print_json(data=rows[-1])
    if out is not None:
        _write(out, rows, {"model": model, "windows": windows, "tokens": tokens})


def _rags(
    engine: Any,
    retriever: Any,
    search: str | None,
    every: int,
    overlap: bool | None,
    flare: float | None,
) -> dict[str, IterativeRag]:
    from ragspec.pipelines.iterative.rag import IterativeRag as AnyRag

    instance = partial(AnyRag, engine, retriever, stride=every, search=search)
    rags = {"off": instance(speculate="off"), "auto": instance(overlap=overlap)}
    return rags if flare is None else rags | {"flare": instance(overlap=overlap, flare=flare)}


def _built(name: str, data: Path, windows: int) -> tuple[Any, str | None]:
    """Return what a case searches, and how."""
    from ragspec.retrievers.search.documents import Document
    from ragspec.retrievers.search.passage_index import PassageIndex

    texts = [record["text"] for record in read_records(data / "passages.jsonl.gz")]
    documents = [Document(f"{i}", "", text) for i, text in enumerate(texts)]
    if name == "windows":
        return _windowed(documents, windows), "dense"
    if name in ("bm25", "far"):
        index = PassageIndex.build(documents, words=400, embedder=None)
        return (index, "sparse") if name == "bm25" else (_far(index), None)
    kind = "exact" if name == "passages" else name
    return PassageIndex.build(documents, words=400, dense=kind, sparse=False), "dense"


def _windowed(documents: Sequence[Document], count: int) -> PassageIndex:
    """Return an exact index of so many overlapping windows of 40 words."""
    from ragspec.retrievers.search.dense import DenseIndex, load_embedder
    from ragspec.retrievers.search.passage_index import PassageIndex as AnyIndex

    words = sum(len(document.text.split()) for document in documents)
    step = max(1, words // count)
    results = [w for i, document in enumerate(documents) for w in _windows(i, document.text, step)]
    passages = results[:count]
    dense = DenseIndex.build([passage.text for passage in passages], load_embedder())
    dense.search("first", 1)  # makes the copy that is scanned
    return AnyIndex(documents, passages, dense=dense, sparse=None)


def _windows(number: int, text: str, step: int) -> Iterator[Passage]:
    """Yield windows of a text, a new one every `step` words."""
    from ragspec.retrievers.search.passages import Passage as AnyPassage

    starts, place = [], 0
    for word in text.split():
        place = text.index(word, place)
        starts.append((place, place + len(word)))
        place += len(word)
    for first in range(0, len(starts), step):
        start, end = starts[first][0], starts[min(first + WORDS, len(starts)) - 1][1]
        yield AnyPassage(number, start, end, "", text[start:end])


def _far(index: PassageIndex) -> Callable[[str], list[tuple[str, float, dict[str, Any]]]]:
    """Return a search by words behind a latency that is simulated by sleeping."""

    def search(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        time.sleep(FAR)
        hits = index.search(query, 20, "sparse")
        return [(hit.passage.text, hit.score, {"name": hit.document.name}) for hit in hits]

    return search


def _write(path: Path, rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    text = json.dumps({"facts": facts, "rows": list(rows)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
