"""Answers over documents by prompt: shares with a gold answer, citations, an end, loops.

    python benchmarks/answers.py --data DIR --model smollm2 [--prompts evidence,quote,answer]
        [--split valid] [--json FILE]

There are two sets of 40 questions. The first ones of the split in DIR's `docqa/items.jsonl` are
over all of its documents. Those of `manual_questions.jsonl`, our own, are over the manuals of DIR's
`lm/valid.jsonl.gz`.

- refused: share of questions without support in the search results. It is printed for the documents
  of the set, and for those of the other set, which hold no answer.
- gold: share of answers that hold a gold answer, regardless of case and spaces. If the prompt asks
  for a short answer, that answer counts.
- in prompt: share of prompts with a gold answer, an upper bound of gold.
- cited: share of answers that quote a passage word for word.
- names: share of answers that quote a passage or cite one as [k].
- ends: share of answers that end before the limit.
- loops: share of answers with eight words three times.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from harness.data import docqa_documents, gold_questions, holds, read_records

from ragspec.engine.engine import Engine
from ragspec.pipelines.answering.answer import Answer
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.console.options import silence_transformers
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import PassageIndex

MANUAL_QUESTIONS = Path(__file__).with_name("manual_questions.jsonl")
CITATION = re.compile(r"\[\d+\]")
LOOP_WORDS, LOOPS = 8, 3
SETS = ("docqa", "manuals")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its gold answers, of which an answer should hold one."""

    text: str
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one question with one prompt."""

    prompt: str
    kind: str
    question: str
    text: str
    gold: bool
    in_prompt: bool
    cited: bool
    names: bool
    ends: bool
    loops: bool
    tokens: int
    per_forward: float
    seconds: float


def questions(data: Path, kind: str, split: str, most: int) -> list[Question]:
    """Return the questions of one set."""
    if kind != "manuals":
        return [Question(q.text, q.answers) for q in gold_questions(data, split)[:most]]
    return [Question(r["question"], tuple(r["answers"])) for r in read_records(MANUAL_QUESTIONS)][
        :most
    ]


def documents(data: Path, kind: str) -> list[Document]:
    """Return the documents of one set."""
    if kind == "manuals":
        records = [r for r in read_records(data / "lm" / "valid.jsonl.gz") if r["kind"] == "docs"]
        return [Document(r["doc"], r["doc"], r["text"]) for r in records]
    return list(docqa_documents(data).values())


def loops(text: str) -> bool:
    """Return whether the text repeats itself."""
    words = text.split()
    runs = Counter(tuple(words[i : i + LOOP_WORDS]) for i in range(len(words) - LOOP_WORDS + 1))
    return max(runs.values(), default=0) >= LOOPS


def make_row(prompt: str, kind: str, question: Question, answer: Answer, seconds: float) -> Row:
    """Return the row of one answer."""
    return Row(
        prompt=prompt,
        kind=kind,
        question=question.text,
        text=answer.text,
        gold=holds(answer.short or answer.text, question.gold),
        in_prompt=any(holds(hit.passage.text, question.gold) for hit in answer.passages),
        cited=answer.supported,
        names=answer.supported or bool(CITATION.search(answer.text)),
        ends=not answer.cut,
        loops=loops(answer.text),
        tokens=answer.report.tokens,
        per_forward=answer.report.tokens / max(1, answer.report.forward_passes),
        seconds=seconds,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the shares of every prompt and set as a Markdown table."""
    lines = [
        "| prompt | questions | in prompt | gold | cited | names | ends | loops | tokens | s |"
    ]
    lines.append("| --- " * 10 + "|")
    for prompt in dict.fromkeys(row.prompt for row in rows):
        for kind in SETS:
            some = [row for row in rows if (row.prompt, row.kind) == (prompt, kind)]
            if some:
                names = ("in_prompt", "gold", "cited", "names", "ends", "loops")
                shares = " | ".join(
                    f"{fmean(getattr(row, name) for row in some):.0%}" for name in names
                )
                means = (
                    f"{fmean(r.tokens for r in some):.0f} | {fmean(r.seconds for r in some):.1f}"
                )
                lines.append(f"| {prompt} | {kind} ({len(some)}) | {shares} | {means} |")
    return "\n".join(lines)


def refused_share(index: PassageIndex, all_questions: Sequence[Question]) -> float:
    """Return the share of questions without support in the index."""
    return fmean(not index.support(question.text).covered for question in all_questions)


def main() -> None:
    """Ask every question with every prompt and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", default="evidence,quote,answer")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--split", default="valid")
    parser.add_argument("--questions", type=int, default=40, help="most questions of a set")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(options.model, device="cpu", dtype="float32")
    rows: list[Row] = []
    kinds = options.sets.split(",")
    indexes = {kind: PassageIndex.build(documents(options.data, kind)) for kind in kinds}
    for kind in kinds:
        settings = {"engine": engine, "top_k": options.passages}
        answerers = {
            prompt: DocQA(indexes[kind], prompt=prompt, **settings)
            for prompt in options.prompts.split(",")
        }
        all_questions = questions(options.data, kind, options.split, options.questions)
        for over in kinds:
            share = refused_share(indexes[over], questions(options.data, kind, options.split, 999))
            print(f"questions of {kind} over {over}: {share:.1%} refused")
        for number, question in enumerate(all_questions, 1):
            for prompt, qa in answerers.items():
                began = time.perf_counter()
                answer = qa.ask(question.text, max_new_tokens=options.tokens, refuse=False)
                seconds = time.perf_counter() - began
                rows.append(make_row(Path(prompt).stem, kind, question, answer, seconds))
            print(f"{kind} {number}/{len(all_questions)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
