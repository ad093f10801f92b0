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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console.checks import check_output
from ragspec.pipelines.console.options import silence_transformers

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
    """The options of one `bench.py long` but its files, see the command's help."""

    model: str
    dtype: str
    device: str
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    variants: tuple[str, ...]
    draft_model: str | None
    peer: bool
    retrieval: bool
    etas: tuple[float, ...]
    documents: int
    items: int
    questions: int
    new_tokens: int
    start: int
    seed: int


def long(
    data: Annotated[
        Path,
        typer.Option(help="Folder of documents; its docqa/ may hold questions with gold answers."),
    ],
    model: Annotated[str, typer.Option(help="Name or folder of the target model.")] = "smollm2",
    lengths: Annotated[
        str, typer.Option(help="Tokens to read of each document, comma-separated.")
    ] = "7000",
    kinds: Annotated[str, typer.Option(help=f"Kinds of tasks, comma-separated: {KINDS}.")] = KINDS,
    variants: Annotated[
        str,
        typer.Option(
            help="Drafters to compare with plain decoding: names of `ragspec drafters` or folders "
            "of heads. A plus sign fuses drafters; :N sets trees of N nodes instead of the budget."
        ),
    ] = VARIANTS,
    draft_model: Annotated[
        str | None,
        typer.Option(help="Name or folder of the draft model; 'self' for the target itself."),
    ] = None,
    peer: Annotated[bool, typer.Option(help="Also run generate of transformers.")] = False,
    retrieval: Annotated[
        bool, typer.Option(help="Also answer from retrieved passages alone.")
    ] = False,
    eta: Annotated[
        str,
        typer.Option(help="Strengths of steering by a draft model over retrieved chunks: 5,10,20."),
    ] = "",
    documents: Annotated[int, typer.Option(min=1, help="Documents of each length.")] = 3,
    items: Annotated[int, typer.Option(min=1, help="Tasks of a kind over each document.")] = 3,
    questions: Annotated[int, typer.Option(min=1, help="Most questions with gold answers.")] = 40,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    start: Annotated[int, typer.Option(min=0, help="First token to read.")] = 2000,
    seed: Annotated[int, typer.Option(help="Random seed of the choice of quotations.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Precision of the weights: float32, bfloat16, float16 or auto.")
    ] = "float32",
    device: Annotated[
        str, typer.Option(help="Device of the model: cpu, an accelerator or auto.")
    ] = "auto",
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this JSON file.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write curves by length to this page (HTML).")
    ] = None,
) -> None:
    """Compare variants of answering over long documents, each of which is read once."""
    for path in (json, page):
        check_output(path)
    options = LongBenchOptions(
        model=model,
        dtype=dtype,
        device=device,
        lengths=_numbers(lengths, "--lengths", int),
        kinds=_names(kinds),
        variants=_names(variants),
        draft_model=draft_model,
        peer=peer,
        retrieval=retrieval,
        etas=_numbers(eta, "--eta", float) if eta else (),
        documents=documents,
        items=items,
        questions=questions,
        new_tokens=new_tokens,
        start=start,
        seed=seed,
    )
    run_long_bench(options, data, json, page)


def run_long_bench(
    options: LongBenchOptions, data: Path, json: Path | None, page: Path | None
) -> None:
    """Measure, write the file after every task, and print the tables, also if interrupted."""
    from harness.long_page import write_lengths
    from harness.long_table import COLUMNS, rows_of, tables
    from harness.long_tasks import plan_tasks
    from ragspec.pipelines.console.terminal import Terminal, progress

    silence_transformers()
    plan = plan_tasks(
        *(data, options.kinds, options.lengths),
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
                    _write(json, asdict(options), rows, records)
    finally:
        for title, table in tables(rows):
            terminal.table(title, COLUMNS, table)
        if rows and page is not None:
            write_lengths(rows, _summarise(options, len(records)), page)
    if not records:
        raise InputError(
            f"Expected tasks over {data} at {', '.join(map(str, options.lengths))} tokens, got "
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
    variants = make_variants(options.variants, engine, draft)
    variants += steered_variants(options.etas, engine, draft)
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
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
