"""The demonstration: questions over documents, each answered plainly and with speculation.

Both runs use one model in float32, so their texts must be equal; the two take turns in going
first, and both are warmed up before anything is timed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, RagspecError

if TYPE_CHECKING:
    from ragspec.pipelines.cli.compare import Comparison
    from ragspec.pipelines.console.terminal import Terminal
    from ragspec.pipelines.docqa.docqa import Answer, DocQA

REAL = "smollm2"
QUESTIONS = "questions.jsonl"
WARM_UP_TOKENS = 8
LOOPING = 0.2  # share of tokens inside loops from which on an answer counts as looping


class UnequalTextError(RagspecError):
    """Speculation changed a text in float32, which must not happen."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question, its speculative answer, and how the two runs compare."""

    question: str
    answer: Answer
    compared: Comparison

    @property
    def loops(self) -> bool:
        """Whether a good part of the answer repeats itself."""
        return self.answer.report.loop_share > LOOPING

    def to_dict(self) -> dict[str, Any]:
        """Return the item as JSON types."""
        return {
            "question": self.question,
            "answer": self.answer.text,
            "citations": [asdict(citation) for citation in self.answer.citations],
            "tokens": self.answer.report.tokens,
            "forwards": self.answer.report.forward_passes,
            "loop_share": self.answer.report.loop_share,
            **self.compared.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of the whole demonstration; seconds are sums, the ratio is a median.

    Answers that repeat themselves flatter speculation: `looping` counts them, and the ratio is
    that of the others wherever there are any.
    """

    questions: int
    equal: int
    looping: int
    ratio: float
    decode_ratio: float
    seconds_plain: float
    seconds: float
    tokens: int
    forwards: int

    @classmethod
    def of(cls, items: Sequence[Item]) -> Summary:
        """Return the summary of the items, at least one."""
        straight = [item for item in items if not item.loops]
        return cls(
            questions=len(items),
            equal=sum(item.compared.equal for item in items),
            looping=len(items) - len(straight),
            ratio=_median(item.compared.ratio for item in straight or items),
            decode_ratio=_median(item.compared.decode_ratio for item in straight or items),
            seconds_plain=sum(item.compared.seconds_plain for item in items),
            seconds=sum(item.compared.seconds for item in items),
            tokens=sum(item.answer.report.tokens for item in items),
            forwards=sum(item.answer.report.forward_passes for item in items),
        )


def _median(ratios: Iterable[float | None]) -> float:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.median(known) if known else math.nan


def run_demo(
    docs: Path | None,
    out: Path,
    count: int,
    model: str | None,
    terminal: Terminal,
    as_json: bool,
    *,
    fetch: bool = False,
) -> None:
    """Ask, compare, show the table and write the page.

    model, fetch: see `chosen_model`. Raises InputError without questions or where the page cannot
    be written, UnequalTextError where a text differs.
    """
    from ragspec.pipelines.console.options import checked_output
    from ragspec.pipelines.docqa.docqa import DocQA

    checked_output(out)
    folder = docs or guide()
    name = chosen_model(model, fetch, terminal)
    with terminal.working("loading the model and reading the documents"):
        engine = demo_engine(name)
        qa = DocQA.from_documents(folder, engine=engine)
        questions = questions_of(folder, qa)[:count]
    show = None if as_json else terminal.piece
    items = list(_shown(ask_all(qa, questions, show), terminal))
    summary = Summary.of(items)
    if as_json:
        terminal.json({"summary": asdict(summary), "items": [item.to_dict() for item in items]})
    else:
        show_table(items, summary, terminal)
    write_report(items, summary, folder, qa, out)  # last: a full disk must not cost the figures
    terminal.note(f"wrote {out}")
    refuse_unequal(items)


def chosen_model(model: str | None, fetch: bool, terminal: Terminal) -> str:
    """Return the model to demonstrate with: the one that is named, else the real one if it is here.

    fetch: get it where it is not. Without it the bundled starter stands in, and is said to.
    """
    from ragspec.models.fetch import fetch as get
    from ragspec.models.resolve import fetched_folder, is_model

    if model is not None:
        return model
    if is_model(fetched_folder(REAL)):
        return REAL
    missing = f"{REAL} is not here; `ragspec models get {REAL}` fetches it"
    if fetch:
        try:
            get(REAL, note=terminal.note)
            return REAL
        except RagspecError as error:
            missing = f"{REAL} cannot be had: {error}"
    terminal.note(missing)
    terminal.note("the bundled starter model answers: small, and able to quote rather than to talk")
    return "starter"


def guide() -> Path:
    """Return the folder of the bundled documents."""
    import ragspec

    return Path(ragspec.__file__).resolve().parent / "starter" / "guide"


def demo_engine(model: str) -> Any:
    """Return the engine of the demonstration: float32, so that both texts must be equal."""
    from ragspec.pipelines.console.options import EngineOptions

    return EngineOptions(model, None, "auto", "auto", "auto", "float32").engine()


def questions_of(folder: Path, qa: DocQA) -> list[str]:
    """Return the questions beside the documents, else one about each heading.

    Raises InputError where there are neither.
    """
    path = (folder if folder.is_dir() else folder.parent) / QUESTIONS
    if path.is_file():
        try:
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
            found = [str(row["question"]) for row in rows]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(
                f'{path} cannot be read ({error}): expected a line {{"question": "..."}} each.'
            ) from error
    else:
        titles = dict.fromkeys(title for doc in qa.documents for _, title in doc.headings)
        found = [f"What is said about {title}?" for title in titles]
    if not found:
        raise InputError(
            f"no questions for {folder}: expected {QUESTIONS} in it, or headings in its documents."
        )
    return found


def ask_all(
    qa: DocQA, questions: Sequence[str], show: Callable[[str], None] | None = None
) -> Iterator[Item]:
    """Yield each question answered with speculation and compared with plain decoding.

    show: called with the pieces of the speculative answers as they come.
    """
    from ragspec.pipelines.cli.ask import over
    from ragspec.pipelines.cli.compare import compare, plain_engine
    from ragspec.sampling.settings import Sampling

    sampling = Sampling(seed=0)
    plain_qa = over(qa, plain_engine(qa.engine))
    for asked in (plain_qa, qa):
        asked.ask(questions[0], sampling, max_new_tokens=WARM_UP_TOKENS, refuse=False)
    for number, question in enumerate(questions):
        pair = (plain_qa, qa) if number % 2 == 0 else (qa, plain_qa)
        if show is not None:
            show(f"\n{number + 1}/{len(questions)} {question}\n")
        answers = {
            id(asked): asked.ask(
                question, sampling, refuse=False, stream=show if asked is qa else None
            )
            for asked in pair
        }
        if show is not None:
            show("\n")
        plain, answer = answers[id(plain_qa)], answers[id(qa)]
        compared = compare(qa.engine, answer.generation, plain.generation, sampling)
        yield Item(question, answer, compared)


def _shown(items: Iterator[Item], terminal: Terminal) -> Iterator[Item]:
    """Say of every answer what it rests on and how long both ways took."""
    for item in items:
        for citation in item.answer.citations:
            terminal.note(f"  from {citation.document}, {citation.place}")
        took = item.compared
        terminal.note(
            f"  {took.seconds_plain:.1f} s plain, {took.seconds:.1f} s speculative, "
            f"texts {'equal' if took.equal else 'DIFFERENT'}"
        )
        yield item


def show_table(items: Sequence[Item], summary: Summary, terminal: Terminal) -> None:
    """Show one row a question and the medians below."""
    from ragspec.pipelines.cli.compare import ratio_text

    columns = ["question", ">tokens", ">a pass", ">plain s", ">ours s", ">ratio", ">decoding"]
    columns += [">loops", "equal"]
    rows = [
        (
            item.question,
            str(item.answer.report.tokens),
            f"{item.answer.report.tokens_per_forward:.2f}",
            f"{item.compared.seconds_plain:.2f}",
            f"{item.compared.seconds:.2f}",
            ratio_text(item.compared.ratio),
            ratio_text(item.compared.decode_ratio),
            f"{item.answer.report.loop_share:.0%}",
            "yes" if item.compared.equal else "NO",
        )
        for item in items
    ]
    terminal.table("Plain and speculative, side by side", columns, rows)
    left_out = f" ({summary.looping} looping answers left out)" if summary.looping else ""
    terminal.line(
        f"{summary.equal} of {summary.questions} texts equal; median ratio {summary.ratio:.2f}"
        f"{left_out}, of decoding alone {summary.decode_ratio:.2f}; in all "
        f"{summary.seconds_plain:.2f} s plain, {summary.seconds:.2f} s speculative."
    )


def refuse_unequal(items: Sequence[Item]) -> None:
    """Raise UnequalTextError where a text differs."""
    for item in items:
        if not item.compared.equal:
            raise UnequalTextError(
                f"the answer to {item.question!r} differs from plain decoding "
                f"({item.compared.summary()}); expected equal tokens in float32. Please report "
                "it with the output of `ragspec doctor --json`."
            )


def write_report(
    items: Sequence[Item], summary: Summary, folder: Path, qa: DocQA, out: Path
) -> None:
    """Write the page of the demonstration. Raises InputError where it cannot be written."""
    from ragspec.pipelines.cli.ask import answered, trace_of
    from ragspec.pipelines.page.page import render_template, save
    from ragspec.pipelines.page.run_view import run_view

    views = []
    for item in items:
        trace = trace_of(answered(item.question, item.answer), qa.engine)
        views.append((item, run_view(trace)))
    longest = max(item.compared.seconds_plain for item in items)
    longest = max(longest, *(item.compared.seconds for item in items))
    figures = [
        ("questions", str(summary.questions)),
        ("texts equal", f"{summary.equal} of {summary.questions}"),
        ("median speed-up", f"{summary.ratio:.2f}×"),
        ("while decoding", f"{summary.decode_ratio:.2f}×"),
        *([("looping, left out", str(summary.looping))] if summary.looping else []),
        ("seconds, plain", f"{summary.seconds_plain:.2f}"),
        ("seconds, speculative", f"{summary.seconds:.2f}"),
        ("tokens a pass", f"{summary.tokens / max(summary.forwards, 1):.2f}"),
    ]
    page = render_template(
        "demo.html.j2", views=views, figures=figures, folder=folder.name, longest=longest
    )
    save(page, out)
