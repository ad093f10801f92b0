"""Drafting methods on a small Llama, in tokens a forward at equal nodes, and in seconds.

    python benchmarks/probe.py --data DIR --json FILE [--methods auto,rest] [--budgets 4,13,auto]

DIR holds a model, prompts.json, store.json.gz (the corpus) and history.json.gz (the model's own
answers). Alternatively it holds docqa/, whose questions the bundled pair of models answers
(--methods model). Decoding is greedy, at most 96 new tokens, float32, one thread, one prompt at a
time. A budget counts the positions of a forward after prefill, the root included: n allows n - 1
draft nodes. Tokens a forward are new tokens by all forwards of the target, prefill included. Nodes
are the mean positions of a forward after prefill. All methods run on a prompt before the next one,
plain decoding among them, in changing order.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from text import docqa, spread

from ragspec.drafters.base import SourceText
from ragspec.drafters.method import Sources, build, listed
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import UnknownNameError
from ragspec.models.load import load_model
from ragspec.registry import unknown
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter
from ragspec.retrievers.methods.sam_decoding import MatchDrafter, Select
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter

NEW_TOKENS = 96
BUDGETS = "4,13,59,auto"
PLAIN = "plain"
OPTIONAL = ("context-all", "model")  # not in the default: slow, or for a pair of models
PROMPTS = 30
Texts = tuple[SourceText, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids of the prompts, the corpus and the model's earlier answers."""

    prompts: list[list[int]]
    corpus: list[list[int]]
    history: list[list[int]]

    @classmethod
    def read(cls, folder: Path) -> Probe:
        """Read the files of a folder."""
        rows = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"]
        history = [row["prompt"] + row["answer"] for row in read_gzip(folder / "history.json.gz")]
        return cls([row["ids"] for row in rows], read_gzip(folder / "store.json.gz"), history)

    @classmethod
    def of_questions(cls, folder: Path) -> Probe:
        """Return questions with their retrieved passages, without further texts."""
        items = spread(docqa(folder, Engine.from_pretrained("starter", None), top_k=3), PROMPTS)
        return cls([list(item.prompt) for item in items], [], [])

    def texts(self, *names: str) -> Texts:
        """Return the corpus or the history as further texts of a request."""
        texts = [tuple(text) for name in names for text in getattr(self, name)]
        return tuple(SourceText(text, document) for document, text in enumerate(texts))

    def sources(self, folder: Path, vocab_size: int) -> Sources:
        """Build both stores in a folder."""
        corpus, history = (
            CorpusIndex.build(getattr(self, name), vocab_size, folder / name)
            for name in ("corpus", "history")
        )
        return Sources(corpus, history)


def read_gzip(path: Path) -> Any:
    """Return the contents of a gzipped JSON file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the table: a drafter over the sources, and further texts of each request."""

    build: Callable[[Sources], Any]
    texts: tuple[str, ...] = ()


def _named(name: str) -> Method:
    return Method(lambda sources: build(name, sources))


def _without(sources: Sources, *names: str) -> Sources:
    return Sources(**{name: getattr(sources, name) for name in ("corpus", "history", "draft_model")
                      if name not in names})  # fmt: skip


METHODS: dict[str, Method] = {
    PLAIN: Method(lambda sources: None),
    **{
        name: _named(name) for name, method in listed().items() if "draft model" not in method.needs
    },
    "lookup-4": Method(lambda sources: LookupDrafter(3, tokens=4)),
    "context-history": Method(lambda sources: ContextDrafter(), ("history",)),
    "context-all": Method(lambda sources: ContextDrafter(), ("history", "corpus")),
    "rest": Method(lambda sources: build("rest", _without(sources, "history"))),
    "match-corpus": Method(
        lambda sources: Select([MatchDrafter(), *_without(sources, "history").past()])
    ),
    "suffix-context": Method(lambda sources: SuffixDrafter()),
    "suffix-history": Method(lambda sources: build("suffix", _without(sources, "corpus"))),
    "model": Method(lambda sources: ModelDrafter(sources.draft_model)),
    "hierarchy-two": Method(lambda sources: build("hierarchy", _without(sources, "corpus"))),
}


@dataclass(slots=True)
class Tally:
    """Counts of one method and budget; seconds by prompt are the best of all repeats."""

    tokens: int = 0
    forwards: int = 0
    positions: int = 0
    equal: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    decode: dict[int, float] = field(default_factory=dict)

    def count(self, generation: Any, plain: list[int]) -> None:
        """Add the counts of one prompt."""
        report = generation.report
        self.tokens += report.tokens
        self.forwards += report.forward_passes
        self.positions += report.forwards + report.drafted
        self.equal += generation.tokens == plain
        for total, counts in (
            (self.by_source, report.accepted_by_source),
            (self.faults, report.faults),
        ):
            for name, number in counts.items():
                total[name] = total.get(name, 0) + number

    def time(self, prompt: int, seconds: float, decode: float) -> None:
        """Record the seconds of a prompt if they are its best."""
        self.seconds[prompt] = min(seconds, self.seconds.get(prompt, seconds))
        self.decode[prompt] = min(decode, self.decode.get(prompt, decode))


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one budget.

    Attributes:
        nodes: Mean positions of a forward after prefill, the root included.
        ratio_plain: Seconds of plain decoding by those of the method, over all prompts.
        ratio_decode: As `ratio_plain`, without prefill.
        ratio_median: Median of the ratios of the prompts.
    """

    method: str
    budget: int | str
    nodes: float
    tokens: int
    forwards: int
    tokens_per_forward: float
    ratio_plain: float
    ratio_decode: float
    ratio_median: float
    seconds: float
    prompts: int
    equal: int
    accepted_by_source: dict[str, int]
    faults: dict[str, int]


def run(
    probe: Probe, model: Any, sources: Sources, methods: Sequence[str], budgets: Sequence[str],
    repeats: int = 1, progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:  # fmt: skip
    """Return one row for each method and budget, plain decoding first."""
    keys = [(PLAIN, "0")] + [(m, b) for m in methods if m != PLAIN for b in budgets]
    tallies = {key: Tally() for key in keys}
    texts = {method: probe.texts(*METHODS[method].texts) for method, _ in keys}
    for repeat in range(repeats):
        _warm_up(probe, model, sources, keys)
        engines = {key: engine(model, sources, *key) for key in keys}
        for number, prompt in enumerate(probe.prompts):
            progress(f"repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(probe.prompts)}")
            shift = (number + repeat) % len(keys)
            generations = {}
            for key in keys[shift:] + keys[:shift]:
                began = time.perf_counter()
                generation = engines[key].generate(
                    list(prompt), max_new_tokens=NEW_TOKENS, texts=texts[key[0]]
                )
                seconds = time.perf_counter() - began
                tallies[key].time(number, seconds, generation.report.decode_seconds)
                generations[key] = generation
            if repeat == 0:
                for key, generation in generations.items():
                    tallies[key].count(generation, generations[keys[0]].tokens)
    plain = tallies[keys[0]]
    return [_row(*key, tally, plain) for key, tally in tallies.items()]


def engine(model: Any, sources: Sources, method: str, budget: str) -> Engine:
    """Return a fresh engine, whose drafters have learned nothing."""
    nodes = budget if budget == "auto" else max(0, int(budget) - 1)
    return Engine(model, None, METHODS[method].build(sources), None, copy.deepcopy(nodes))


def _warm_up(probe: Probe, model: Any, sources: Sources, keys: Iterable[tuple[str, str]]) -> None:
    """Compile and load everything with engines that are then discarded."""
    for key in keys:
        engine(model, sources, *key).generate(list(probe.prompts[0][:32]), max_new_tokens=8)


def _row(method: str, budget: str, tally: Tally, plain: Tally) -> Row:
    later = tally.forwards - len(tally.seconds)
    return Row(
        method=method,
        budget=budget if budget == "auto" else int(budget),
        nodes=round(tally.positions / max(1, later), 2),
        tokens=tally.tokens,
        forwards=tally.forwards,
        tokens_per_forward=round(tally.tokens / tally.forwards, 3),
        ratio_plain=round(sum(plain.seconds.values()) / sum(tally.seconds.values()), 3),
        ratio_decode=round(sum(plain.decode.values()) / sum(tally.decode.values()), 3),
        ratio_median=round(
            median(plain.seconds[i] / spent for i, spent in tally.seconds.items()), 3
        ),
        seconds=round(sum(tally.seconds.values()), 3),
        prompts=len(tally.seconds),
        equal=tally.equal,
        accepted_by_source=tally.by_source,
        faults=tally.faults,
    )


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| method | budget | nodes | tokens a forward | to plain | decode | equal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r.method} | {r.budget} | {r.nodes:.1f} | {r.tokens_per_forward:.2f} | "
        f"{r.ratio_plain:.2f} | {r.ratio_decode:.2f} | {r.equal}/{r.prompts} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the methods, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--methods", default=",".join(m for m in METHODS if m not in OPTIONAL))
    parser.add_argument(
        "--budgets", default=BUDGETS, help="positions of a forward, or auto, comma-separated"
    )
    parser.add_argument("--limit", type=int, help="first prompts to run; default: all")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each prompt; the best time counts"
    )
    options = parser.parse_args()
    methods = [name for name in options.methods.split(",") if name]
    for name in methods:
        if name not in METHODS:
            raise UnknownNameError(unknown("method", name, METHODS))
    torch.set_num_threads(1)
    pair = not (options.data / "prompts.json").exists()
    probe = Probe.of_questions(options.data) if pair else Probe.read(options.data)
    probe.prompts[:] = probe.prompts[: options.limit]
    model, _ = load_model("starter" if pair else options.data, "cpu", "float32")
    with tempfile.TemporaryDirectory() as folder:
        if pair:
            sources = Sources(draft_model=load_model("starter-draft", "cpu", "float32")[0])
        else:
            sources = probe.sources(Path(folder), int(model.config.vocab_size))
        rows = run(
            probe, model, sources, methods, options.budgets.split(","), options.repeats,
            lambda line: print(line, flush=True),
        )  # fmt: skip
    print(table(rows))
    if options.json:
        facts = {"dtype": "float32", "threads": 1, "new_tokens": NEW_TOKENS}
        document = {**facts, "repeats": options.repeats, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
