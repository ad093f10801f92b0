"""`ragspec bench long`: answers over long documents that are read once, by every way in turns.

Each document, or part of it, is read once and asked in all ways, which begin with another one at
every task; a way is compared with plain decoding by seconds of decoding a token. What is known of a
task is written at once, so that an interrupt loses nothing that was measured.
"""

from __future__ import annotations

import json as codec
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console.options import checked_output, silence_transformers

if TYPE_CHECKING:
    from harness.long_table import LongRow, Requests
    from harness.long_tasks import PrefillJob
    from harness.long_ways import Variant
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.long.document import LongDocument

WAYS, KINDS = "auto,context", "questions,summaries,quotations"
WARM_UP = 8  # tokens that every way writes before anything is timed
ProgressCallback = Callable[[str, int, int], None]
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class LongBench:
    """What one `ragspec bench long` was asked for, beside its files."""

    model: str
    dtype: str
    device: str
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    ways: tuple[str, ...]
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
        typer.Option(help="A folder of documents; docqa/ in it brings questions with answers."),
    ],
    model: Annotated[str, typer.Option(help="Path or name of the target.")] = "smollm2",
    lengths: Annotated[str, typer.Option(help="Tokens that are read of each: 1000,7500.")] = "7000",
    kinds: Annotated[str, typer.Option(help=f"Of {KINDS}.")] = KINDS,
    ways: Annotated[
        str,
        typer.Option(
            help="Drafters beside plain decoding, of `ragspec drafters` and folders of heads; a "
            "plus sign fuses them, :N makes trees of N nodes in place of the budget's."
        ),
    ] = WAYS,
    draft_model: Annotated[
        str | None, typer.Option(help="For drafters that need one; 'self' for the target.")
    ] = None,
    peer: Annotated[bool, typer.Option(help="transformers' own generate, too.")] = False,
    retrieval: Annotated[
        bool, typer.Option(help="The passages that a question finds alone, too.")
    ] = False,
    eta: Annotated[
        str, typer.Option(help="Steered by the draft model over what a question finds: 5,10,20.")
    ] = "",
    documents: Annotated[int, typer.Option(min=1, help="Documents of each length.")] = 3,
    items: Annotated[int, typer.Option(min=1, help="Tasks of a kind over each of them.")] = 3,
    questions: Annotated[int, typer.Option(min=1, help="Questions with gold answers.")] = 40,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    start: Annotated[int, typer.Option(min=0, help="First token that is read.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the choice of quotations.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ...")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, an accelerator, or auto.")] = "auto",
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write curves by length here (HTML).")] = None,
) -> None:
    """Compare ways of answering over long documents, each of which is read once."""
    for path in (json, page):
        checked_output(path)
    request = LongBench(
        model=model,
        dtype=dtype,
        device=device,
        lengths=_numbers(lengths, "--lengths", int),
        kinds=_names(kinds),
        ways=_names(ways),
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
    run_long_bench(request, data, json, page)


def run_long_bench(request: LongBench, data: Path, json: Path | None, page: Path | None) -> None:
    """Measure, write what is known after every task, and show the table, interrupted or not."""
    from harness.long_page import write_lengths
    from harness.long_table import COLUMNS, rows_of, tables
    from harness.long_tasks import readings
    from ragspec.pipelines.console.terminal import Terminal, progress

    silence_transformers()
    plan = readings(
        *(data, request.kinds, request.lengths),
        documents=request.documents,
        items=request.items,
        questions=request.questions,
        start=request.start,
    )
    terminal = Terminal()
    with terminal.working("loading the model"):
        engine, ways = _prepared(request)
    results: list[Requests] = []
    rows: list[LongRow] = []
    try:
        with progress(terminal, "measuring") as on_progress:
            for each in measure(plan, engine, ways, request, on_progress):
                results.append(each)
                rows = rows_of(results)
                if json is not None:
                    _write(json, asdict(request), rows, results)
    finally:
        for title, table in tables(rows):
            terminal.table(title, COLUMNS, table)
        if rows and page is not None:
            write_lengths(rows, _reported_of(request, len(results)), page)
    if not results:
        raise InputError(
            f"nothing could be asked over {data} at {', '.join(map(str, request.lengths))} tokens; "
            "expected longer parts, with the evidence of questions or sentences to quote in them."
        )


def _prepared(request: LongBench) -> tuple[Engine, list[Variant]]:
    """Return an engine for reading, and the ways over its target."""
    from harness.long_ways import SELF, PeerVariant, RetrievalVariant, make_ways, steered_ways
    from ragspec.engine.engine import Engine as AnyEngine
    from ragspec.models.load import load_model

    engine = AnyEngine.from_pretrained(
        request.model, None, device=request.device, dtype=request.dtype
    )
    draft = engine.model if request.draft_model == SELF else None
    if request.draft_model is not None and draft is None:
        draft = load_model(request.draft_model, request.device, request.dtype)[0]
    ways = make_ways(request.ways, engine, draft)
    ways += steered_ways(request.etas, engine, draft)
    ways += [PeerVariant(engine)] if request.peer else []
    ways += [RetrievalVariant(engine)] if request.retrieval else []
    return engine, ways


def measure(
    plan: Sequence[PrefillJob],
    engine: Engine,
    ways: Sequence[Variant],
    request: LongBench,
    on_progress: ProgressCallback = lambda what, done, total: None,
) -> Iterator[Requests]:
    """Yield what came of every task, each document read once.

    on_progress: of what is done, in answers, and of how many; reading counts as one.
    """
    from harness.long_table import Requests as AnyAsked

    each = [1 + len(ways) * (len(r.tasks) + len(r.kinds) * r.items) for r in plan]
    turn, done = 0, 0
    for number, job in enumerate(plan):
        document = _opened(job, engine)
        first = document.hit.passage.start
        tasks = job.latents_to_draw(document.text, first, request.seed + number)
        for direction in ways if tasks else ():
            direction.read(document)
            direction.answer(tasks[0], WARM_UP)
        for task in tasks:
            shift = turn % len(ways)
            record = {}
            for direction in (*ways[shift:], *ways[:shift]):
                done += 1
                on_progress("measuring", done, sum(each))
                record[direction.name] = direction.answer(task, request.new_tokens)
            turn += 1
            ordered = {variant.name: record[variant.name] for variant in ways}
            yield AnyAsked(job.document.name, job.length, document.tokens, task, ordered)
        done = sum(each[: number + 1])  # fewer questions than planned where evidence lies outside


def _opened(job: PrefillJob, engine: Engine) -> LongDocument:
    """Read a document, or the part of it that is to be read."""
    from ragspec.pipelines.docqa.prompt import plain_ids
    from ragspec.pipelines.long.document import LongDocument as AnyDocument

    tokens = len(plain_ids(engine.tokenizer, job.document.text))
    return AnyDocument.open(job.document, engine, token_range=job.part(tokens))


def _write(
    path: Path, facts: dict[str, Any], rows: Sequence[LongRow], request: Sequence[Requests]
) -> None:
    """Write all that is known, in the place of what was."""
    known = {"facts": facts, "rows": [asdict(row) for row in rows]}
    text = codec.dumps(known | {"latents_to_draw": [each.to_dict() for each in request]}, indent=1)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _reported_of(request: LongBench, tasks: int) -> str:
    return (
        f"{request.model} in {request.dtype}, greedy, {tasks} tasks, at most "
        f"{request.new_tokens} tokens "
        "each. Every document is read once; the ways take turns over what was kept of it."
    )


def _numbers(text: str, option: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Return the positive numbers that a text names; raises InputError."""
    try:
        result = tuple(dict.fromkeys(kind(each) for each in _names(text)))
    except ValueError:
        result = ()
    if not result or min(result) <= 0:
        raise InputError(f"{option} is {text!r}; expected numbers above 0 such as 10,20.")
    return result


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
