"""The demonstration: questions over documents, each answered plainly and with speculation.

Both runs use one model in float32, so their texts must be equal. They take turns in going first,
and both are warmed up before anything is timed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, RagspecError

if TYPE_CHECKING:
    from ragspec.pipelines.cli.compare import Comparison
    from ragspec.pipelines.console.terminal import Terminal
    from ragspec.pipelines.docqa.docqa import Answer, DocQA

MODEL = "smollm2"
QUESTIONS = "questions.jsonl"
WARM_UP_TOKENS = 8
LOOPING = 0.2  # share of tokens inside loops above which an answer is left out of the median


class UnequalTextError(RagspecError):
    """Speculation changed a text in float32, which must not happen."""


@dataclass(frozen=True, slots=True)
class DemoItem:
    """One question, its speculative answer, and the comparison with plain decoding."""

    question: str
    answer: Answer
    compared: Comparison

    def to_dict(self) -> dict[str, Any]:
        """Return the item as JSON types."""
        report = self.answer.report
        return {
            "question": self.question,
            "answer": self.answer.text,
            "citations": [asdict(citation) for citation in self.answer.citations],
            "tokens": report.tokens,
            "forwards": report.forward_passes,
            "loop_share": report.loop_share,
            **self.compared.to_dict(),
        }


def run_demo(
    docs: Path | None,
    count: int,
    model: str | None,
    terminal: Terminal,
    as_json: bool,
    *,
    fetch: bool = False,
) -> None:
    """Ask the questions both ways and show answers, citations, times and tokens.

    Args:
        docs: Documents with `questions.jsonl` beside them (default: the bundled guide).
        count: Number of questions.
        model: See `pick_model`, as `fetch`.
        terminal: Where to show it.
        as_json: Print one JSON object instead.

    Raises:
        InputError: There are no questions.
        UnequalTextError: A text differs from that of plain decoding.
    """
    from ragspec.pipelines.console.options import EngineOptions
    from ragspec.pipelines.docqa.docqa import DocQA

    folder = docs or guide()
    name = pick_model(model, fetch, terminal)
    with terminal.working("loading the model and reading the documents"):
        engine = EngineOptions(name, dtype="float32").load_engine()
        qa = DocQA.from_documents(folder, engine=engine)
        questions = questions_of(folder, qa)[:count]
    items = []
    for item in ask_all(qa, questions, None if as_json else terminal.piece):
        items.append(item)
        for citation in item.answer.citations:
            terminal.note(f"  from {citation.document}, {citation.place}")
        terminal.note(f"  {item.answer.report.tokens} tokens, {item.compared.summary()}")
    summary = summarise(items)
    if as_json:
        terminal.json({"summary": summary, "items": [item.to_dict() for item in items]})
    else:
        terminal.line(
            f"{summary['equal']} of {summary['questions']} texts equal; {summary['tokens']} tokens "
            f"in {summary['seconds_plain']:.2f} s plain, {summary['seconds']:.2f} s speculative; "
            f"median speedup {summary['ratio']:.2f}, of decoding alone "
            f"{summary['decode_ratio']:.2f} ({summary['looping']} looping answers left out)"
        )
    for item in items:
        if not item.compared.equal:
            raise UnequalTextError(
                f"the answer to {item.question!r} differs from plain decoding "
                f"({item.compared.summary()}); expected equal tokens in float32. Please report "
                "it with the output of `ragspec doctor --json`."
            )


def pick_model(model: str | None, fetch: bool, terminal: Terminal) -> str:
    """Return the named model, else smollm2 if it is here or `fetch` gets it, else the starter."""
    from ragspec.models.fetch import fetch as download
    from ragspec.models.resolve import fetched_folder, is_model

    if model is not None or is_model(fetched_folder(MODEL)):
        return model or MODEL
    missing = f"{MODEL} is not here; `ragspec models get {MODEL}` fetches it"
    if fetch:
        try:
            download(MODEL, note=terminal.note)
            return MODEL
        except RagspecError as error:
            missing = f"{MODEL} cannot be had: {error}"
    terminal.note(f"{missing}. The bundled starter model answers: it is small and mostly quotes.")
    return "starter"


def guide() -> Path:
    """Return the folder of the bundled documents."""
    import ragspec

    return Path(ragspec.__file__).resolve().parent / "starter" / "guide"


def questions_of(folder: Path, qa: DocQA) -> list[str]:
    """Return the questions beside the documents, else one about each heading."""
    path = (folder if folder.is_dir() else folder.parent) / QUESTIONS
    if not path.is_file():
        titles = dict.fromkeys(title for doc in qa.documents for _, title in doc.headings)
        questions = [f"What is said about {title}?" for title in titles]
    else:
        try:
            lines = path.read_text("utf-8").splitlines()
            questions = [str(json.loads(line)["question"]) for line in lines if line]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(
                f'{path} cannot be read ({error}): expected a line {{"question": "..."}} each.'
            ) from error
    if not questions:
        raise InputError(
            f"no questions for {folder}: expected {QUESTIONS} in it, or headings in its documents."
        )
    return questions


def ask_all(
    qa: DocQA, questions: Sequence[str], show: Callable[[str], None] | None = None
) -> Iterator[DemoItem]:
    """Yield each question answered with speculation and compared with plain decoding.

    show: called with the pieces of the speculative answers as they come.
    """
    from ragspec.pipelines.cli.compare import compare, plain_engine
    from ragspec.pipelines.docqa.docqa import DocQA
    from ragspec.sampling.settings import Sampling

    show = show or (lambda piece: None)
    sampling = Sampling(seed=0)
    plain_qa = DocQA(qa.retriever, engine=plain_engine(qa.engine))
    for each in (plain_qa, qa):
        each.ask(questions[0], sampling, max_new_tokens=WARM_UP_TOKENS, refuse=False)
    for number, question in enumerate(questions):
        show(f"\n{number + 1}/{len(questions)} {question}\n")
        answers: dict[bool, Answer] = {}
        for is_plain in (True, False) if number % 2 == 0 else (False, True):
            ask = (plain_qa if is_plain else qa).ask
            stream = None if is_plain else show
            answers[is_plain] = ask(question, sampling, refuse=False, stream=stream)
        show("\n")
        both = answers[False].generation, answers[True].generation
        yield DemoItem(question, answers[False], compare(qa.engine, *both, sampling))


def summarise(items: Sequence[DemoItem]) -> dict[str, Any]:
    """Return sums of seconds and tokens, and the median speedups over plain decoding.

    Answers that repeat themselves flatter speculation: they are counted as `looping` and left out
    of the medians, unless there are no others.
    """
    straight = [item for item in items if item.answer.report.loop_share <= LOOPING]
    summary: dict[str, Any] = {
        "questions": len(items),
        "equal": sum(item.compared.equal for item in items),
        "looping": len(items) - len(straight),
        "seconds_plain": sum(item.compared.seconds_plain for item in items),
        "seconds": sum(item.compared.seconds for item in items),
        "tokens": sum(item.answer.report.tokens for item in items),
        "forwards": sum(item.answer.report.forward_passes for item in items),
    }
    for name in ("ratio", "decode_ratio"):
        ratios = [getattr(item.compared, name) for item in straight or items]
        known = [ratio for ratio in ratios if ratio is not None]
        summary[name] = statistics.median(known) if known else 0.0
    return summary
