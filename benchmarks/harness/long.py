"""The command `bench.py long`: answers over long documents, each of which is prefilled once.

All variants answer the same tasks over a document or a part of it, in changing order. Each is
compared with plain decoding by the decode seconds of a token. The file is written after every task,
so an interrupt loses no measurement.
"""

from __future__ import annotations

import json as codec
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragspec.errors import InputError
from ragspec.pipelines.console.checks import check_output
from ragspec.pipelines.console.options import silence_transformers
from ragspec.pipelines.console.records import option, split, takes_records

if TYPE_CHECKING:
    from harness.long_table import LongRow, TaskRecord
    from harness.long_tasks import DocumentTasks
    from harness.long_variants import Variant
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.long_document import LongDocument

VARIANTS, KINDS = "auto,context", "questions,summaries,quotations"
WARM_UP = 8  # tokens that every variant generates before the timed tasks
ProgressCallback = Callable[[str, int, int], None]
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class LongBenchOptions:
    """The options of one `bench.py long` but its files."""

    model: str = option("smollm2", "Name or folder of the target model.")
    dtype: str = option("float32", "Precision of the weights: float32, bfloat16, float16 or auto.")
    device: str = option("auto", "Device of the model: cpu, an accelerator or auto.")
    lengths: str = option("7000", "Tokens to read of each document, comma-separated.")
    kinds: str = option(KINDS, f"Kinds of tasks, comma-separated: {KINDS}.")
    variants: str = option(
        VARIANTS,
        "Drafters to compare with plain decoding: names of `ragspec drafters` or folders of "
        "heads. A plus sign fuses drafters; :N sets trees of N nodes instead of the budget.",
    )
    draft_model: str | None = option(
        None, "Name or folder of the draft model; 'self' for the target itself."
    )
    peer: bool = option(False, "Also run generate of transformers.")
    retrieval: bool = option(False, "Also answer from retrieved passages alone.")
    eta: str = option("", "Strengths of steering by a draft model over retrieved chunks: 5,10,20.")
    documents: int = option(3, "Documents of each length.", min=1)
    items: int = option(3, "Tasks of a kind over each document.", min=1)
    questions: int = option(40, "Most questions with gold answers.", min=1)
    new_tokens: int = option(64, "Most tokens of an answer.", min=2)
    start: int = option(2000, "First token to read.", min=0)
    seed: int = option(0, "Random seed of the choice of quotations.")

    def __post_init__(self) -> None:
        self.parsed()

    def parsed(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of the comma-separated options; raise InputError for others."""
        return {
            "lengths": _numbers(self.lengths, "--lengths", int),
            "kinds": _names(self.kinds),
            "variants": _names(self.variants),
            "etas": _numbers(self.eta, "--eta", float) if self.eta else (),
        }


@dataclass(frozen=True, slots=True)
class LongCommand:
    """The options of `bench.py long`, and its files."""

    options: LongBenchOptions
    data: Path = option(
        ..., "Folder of documents; its docqa/ may hold questions with gold answers."
    )
    json: Path | None = option(None, "Write the rows to this JSON file.")
    page: Path | None = option(None, "Write curves by length to this page (HTML).")

    def __post_init__(self) -> None:
        for path in (self.json, self.page):
            check_output(path)


@takes_records
def long(command: LongCommand) -> None:
    """Compare variants of answering over long documents, each of which is read once."""
    run_long_bench(command.options, command.data, command.json, command.page)


def run_long_bench(
    options: LongBenchOptions, data: Path, json: Path | None, page: Path | None
) -> None:
    """Measure, write the file after every task, and print the tables, also if interrupted."""
    from harness.long_page import write_lengths
    from harness.long_table import COLUMNS, rows_of, tables
    from harness.long_tasks import plan_tasks
    from ragspec.pipelines.console.terminal import Terminal, progress

    silence_transformers()
    parsed = options.parsed()
    plan = plan_tasks(
        *(data, parsed["kinds"], parsed["lengths"]),
        documents=options.documents,
        items=options.items,
        questions=options.questions,
        start=options.start,
    )
    terminal = Terminal()
    with terminal.working("loading the model"):
        engine, variants = _build_variants(options)
    records: list[TaskRecord] = []
    rows: list[LongRow] = []
    try:
        with progress(terminal, "measuring") as on_progress:
            for each in measure(plan, engine, variants, options, on_progress):
                records.append(each)
                rows = rows_of(records)
                if json is not None:
                    _write(json, asdict(options) | parsed, rows, records)
    finally:
        for title, table in tables(rows):
            terminal.table(title, COLUMNS, table)
        if rows and page is not None:
            write_lengths(rows, _summarise(options, len(records)), page)
    if not records:
        raise InputError(
            f"Expected tasks over {data} at {', '.join(map(str, parsed['lengths']))} tokens, got "
            "none. Choose longer --lengths, so that parts hold evidence or sentences to quote."
        )


def _build_variants(options: LongBenchOptions) -> tuple[Engine, list[Variant]]:
    """Return the engine that reads documents, and the variants over its target."""
    from harness.long_variants import (
        SELF,
        PeerVariant,
        RetrievalVariant,
        make_variants,
        steered_variants,
    )
    from ragspec.engine.engine import Engine as AnyEngine
    from ragspec.models.load import load_model

    engine = AnyEngine.from_pretrained(
        options.model, None, device=options.device, dtype=options.dtype
    )
    draft = engine.model if options.draft_model == SELF else None
    if options.draft_model is not None and draft is None:
        draft = load_model(options.draft_model, options.device, options.dtype)[0]
    parsed = options.parsed()
    variants = make_variants(parsed["variants"], engine, draft)
    variants += steered_variants(parsed["etas"], engine, draft)
    variants += [PeerVariant(engine)] if options.peer else []
    variants += [RetrievalVariant(engine)] if options.retrieval else []
    return engine, variants


def measure(
    plan: Sequence[DocumentTasks],
    engine: Engine,
    variants: Sequence[Variant],
    options: LongBenchOptions,
    on_progress: ProgressCallback = lambda label, done, total: None,
) -> Iterator[TaskRecord]:
    """Yield the record of every task; each document is read once.

    Args:
        plan: Documents and their tasks.
        engine: Engine that reads the documents.
        variants: Variants, plain decoding first.
        options: Options of the benchmark.
        on_progress: Called with a label, the answers so far and all answers; reading counts as one.
    """
    from harness.long_table import TaskRecord as AnyRecord

    sizes = [1 + len(variants) * (len(r.tasks) + len(r.kinds) * r.items) for r in plan]
    turn, done = 0, 0
    for number, job in enumerate(plan):
        document = _open_document(job, engine)
        first = document.hit.passage.start
        tasks = job.build_tasks(document.text, first, options.seed + number)
        for variant in variants if tasks else ():
            variant.read(document)
            variant.answer(tasks[0], WARM_UP)
        for task in tasks:
            shift = turn % len(variants)
            answers = {}
            for variant in (*variants[shift:], *variants[:shift]):
                done += 1
                on_progress("measuring", done, sum(sizes))
                answers[variant.name] = variant.answer(task, options.new_tokens)
            turn += 1
            ordered = {variant.name: answers[variant.name] for variant in variants}
            yield AnyRecord(job.document.name, job.length, document.tokens, task, ordered)
        done = sum(sizes[: number + 1])  # questions with evidence outside the part are left out


def _open_document(job: DocumentTasks, engine: Engine) -> LongDocument:
    """Read a document or the part that the plan names."""
    from harness.tasks import plain_ids
    from ragspec.pipelines.answering.long_document import LongDocument as AnyDocument

    tokens = len(plain_ids(engine.tokenizer, job.document.text))
    return AnyDocument.open(job.document, engine, token_range=job.part(tokens))


def _write(
    path: Path, facts: dict[str, Any], rows: Sequence[LongRow], records: Sequence[TaskRecord]
) -> None:
    """Replace the file by all rows and records so far."""
    contents = {"facts": facts, "rows": [asdict(row) for row in rows]}
    text = codec.dumps(contents | {"tasks": [each.to_dict() for each in records]}, indent=1)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _summarise(options: LongBenchOptions, tasks: int) -> str:
    return (
        f"{options.model} in {options.dtype}, greedy, {tasks} tasks, at most "
        f"{options.new_tokens} tokens "
        "each. Every document is read once, and the variants take turns over its KV cache."
    )


def _numbers(text: str, option: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Return the positive numbers of a comma-separated text; raises InputError."""
    try:
        numbers = tuple(dict.fromkeys(kind(each) for each in _names(text)))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise InputError(f"Expected {option} with numbers above 0, got {text!r}. Write 10,20.")
    return numbers


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split(text)))
