"""`ragspec bench answers`: search, right answers, support and refusals over a user's questions."""

import json
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ragspec.errors import DocumentError, InputError
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import argument, option, setting, takes_records
from ragspec.pipelines.console.terminal import Terminal, progress
from ragspec.pipelines.console.texts import Row, read_rows
from ragspec.storage.filesystem import write_output

if TYPE_CHECKING:
    from ragspec.pipelines.answering.answerer import Answerer

SUPPORT = ("supported", "quoted", "unsupported")
_MISNAMED = re.compile("(gold|answer|expect|refer)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AnswersBenchOptions:
    """Questions with their answers, the documents, and the model that is measured."""

    documents: o.DocumentOptions
    engine: o.EngineOptions
    questions: Path = argument(
        ..., "JSON lines of {question, answers}; without answers it should be refused."
    )
    json: Path | None = option(None, "Write the rows to this JSON file.")
    html: Path | None = option(None, "Write questions and answers to this page.", "--html")
    max_new_tokens: int = setting(160, "Most tokens of an answer.", least=1)

    def __post_init__(self) -> None:
        checks.check_paths(self.questions)
        checks.check_output(self.html, checks.PAGE)
        checks.check_output(self.json, checks.JSON)
        self.engine.check_needs()
        if not self.documents.docs:
            raise InputError("Expected --docs PATH, got none: the documents of the questions.")


@dataclass(frozen=True, slots=True)
class Item:
    """A question with gold answers, of which an answer should hold one; none if it has none."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """The figures of one question.

    Attributes:
        passages: Whether a passage of the prompt holds a gold answer.
        sentences: Whether one of the best sentences does.
        right: Whether the answer does; of a question without answers, whether it was refused.
        support: "supported", "quoted" or "unsupported".
        per_forward: Tokens a forward.
    """

    question: str
    answers: tuple[str, ...]
    answer: str
    texts: tuple[str, ...]
    passages: bool
    sentences: bool
    right: bool
    refused: bool
    support: str
    seconds: float
    tokens: int
    per_forward: float


@takes_records
def answers(options: AnswersBenchOptions) -> None:
    """Measure answers over documents: search, right ones, support, refusals and seconds."""
    items = read_questions(options.questions)
    terminal = Terminal()
    qa = options.documents.open(terminal)
    with terminal.working("loading the model"):
        answerer = qa.over(options.engine.load_engine())
    with progress(terminal, "answering") as show:
        rows = measure_answers(answerer, items, options.max_new_tokens, show)
    figures = summary(rows)
    terminal.table(f"answers of {options.engine.model}", ("figure", "value"), list(figures.items()))
    facts = {"model": options.engine.model, "questions": options.questions.name}
    if options.json is not None:
        record = facts | {"figures": figures, "rows": [asdict(row) for row in rows]}
        write_output(options.json, "the rows", json.dumps(record, indent=1) + "\n")
    if options.html is not None:
        from ragspec.pipelines.page.page import render_template

        values = {"facts": facts, "figures": figures, "rows": rows}
        write_output(options.html, "the page", render_template("answers.html.j2", **values))


def read_questions(path: Path) -> list[Item]:
    """Return the questions of JSON lines; raise DocumentError for a row of another form."""
    return [_item(row, where) for where, row in read_rows(path)]


def _item(row: Row, where: str) -> Item:
    question, gold = row.get("question", ""), row.get("answers", [])
    texts = [question, *gold] if isinstance(gold, list) else [None]
    misnamed = sorted(filter(_MISNAMED.match, row))
    problem = f"{misnamed[0]!r} looks like the answers" if misnamed and "answers" not in row else ""
    if not all(isinstance(each, str) and each.strip() for each in texts):
        problem = f"got the question {question!r} and the answers {gold!r}"
    if problem:
        raise DocumentError(f"{where}: {problem}; expected {{question, answers: [text, ...]}}.")
    return Item(question, tuple(gold))


def measure_answers(
    answerer: "Answerer",
    items: Sequence[Item],
    max_new_tokens: int,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    refuse: bool = True,
) -> list[AnswerRow]:
    """Ask every question and return its figures."""
    rows = []
    for number, item in enumerate(items):
        on_progress("answering", number, len(items))
        began = time.perf_counter()
        answer = answerer.ask(item.question, max_new_tokens=max_new_tokens, refuse=refuse)
        seconds = time.perf_counter() - began
        texts = tuple(each.text for each in answer.sentences)
        refused, gold = answer.refused is not None, item.answers
        rows.append(
            AnswerRow(
                question=item.question,
                answers=gold,
                answer=answer.text,
                texts=texts,
                passages=any(has_answer(hit.passage.text, gold) for hit in answer.passages),
                sentences=any(has_answer(text, gold) for text in texts),
                right=has_answer(answer.short or answer.text, gold) if gold else refused,
                refused=refused,
                support=str(answer.support),
                seconds=seconds,
                tokens=answer.report.tokens,
                per_forward=answer.report.tokens / max(1, answer.report.forward_passes),
            )
        )
    return rows


def has_answer(text: str, gold: Iterable[str]) -> bool:
    """Return whether a text holds a gold answer, in any case and signs, not within a word."""
    from ragspec.pipelines.answering.citations import LETTER
    from ragspec.retrievers.search.text import plain_signs

    within = rf"(?<={LETTER})(?={LETTER})|(?<=\d[.,:])(?=\d{{1,3}}\b)|(?<=\d)(?=[.,:]\d)"
    texts = map(plain_signs, (text, *gold))
    plain, *golds = (" ".join(unicodedata.normalize("NFC", each).lower().split()) for each in texts)
    end = rf"(?:(?<=[^\W\d_])s)?(?!{within})"  # of a plural, too
    return any(re.search(rf"(?!{within}){re.escape(each)}{end}", plain) for each in golds)


def summary(rows: Sequence[AnswerRow]) -> dict[str, str]:
    """Return the shares of all rows, for people."""
    answerable = [row for row in rows if row.answers]
    written = [row for row in answerable if not row.refused]

    def share(part: Iterable[bool]) -> str:
        values = list(part)
        return f"{fmean(values):.1%} of {len(values)}" if values else "-"

    wrong = [row for row in written if not row.right]
    figures = {
        "passages hold an answer": share(row.passages for row in answerable),
        "sentences hold an answer": share(row.sentences for row in answerable),
        "right answers": share(row.right for row in answerable),
        **{kind: share(row.support == kind for row in written) for kind in SUPPORT},
        "wrong and supported": share(row.support == "supported" for row in wrong),
        "refused, has an answer": share(row.refused for row in answerable),
        "refused, has none": share(row.refused for row in rows if not row.answers),
    }
    if written:
        figures["seconds"] = f"{fmean(row.seconds for row in written):.2f}"
        figures["tokens"] = f"{fmean(row.tokens for row in written):.0f}"
        figures["tokens a forward"] = f"{fmean(row.per_forward for row in written):.2f}"
    return figures
