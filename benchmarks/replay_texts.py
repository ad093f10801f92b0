"""Texts of budget.py: gold copies with errors, prose, and answers that a model wrote."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.data import docqa_documents, long_documents, read_records
from harness.replay import ReplayText
from harness.tasks import plain_ids, quotation
from text import quote_tasks, spread

from ragspec.drafters.method import Sources
from ragspec.models.resolve import STARTER
from ragspec.pipelines.docqa.prompt import render
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import split_document

TEXTS = 30
MAX_TOKENS = 96  # tokens of a text
MIN_ANSWER = 40  # least tokens of a real answer
ERROR_RATE = 0.04  # share of wrong tokens of a copy


def shared_texts(data: Path, tokenizer: Any) -> dict[str, list[ReplayText]]:
    """Return the texts of the evaluation data."""
    documents = long_documents(data)
    quote, summary, answer = [], [], []
    for number, (name, task) in enumerate(spread(quote_tasks(data), TEXTS)):
        prompt, cue, gold = quotation(tokenizer, documents[name], task, number)
        ids = prompt.token_ids + tuple(plain_ids(tokenizer, cue))
        quote.append(replay_text(ids, add_errors(plain_ids(tokenizer, gold), number), prompt.spans))
    for number, document in enumerate(documents.values()):
        ids = plain_ids(tokenizer, document.text[:80_000])
        for length in (2000, 7000):  # later text shares names and phrases, as a summary does
            start = (number * 997) % (len(ids) - length - 2 * MAX_TOKENS)
            summary.append(
                replay_text(ids[start : start + length], ids[start + length + MAX_TOKENS :])
            )
    by_name = docqa_documents(data)
    items = [r for r in read_records(data / "docqa" / "items.jsonl") if r["split"] == "valid"]
    for row in spread(items, TEXTS):
        answer.append(gold_answer(tokenizer, row, by_name[row["doc_id"]]))
    prose = [
        r for r in read_records(data / "lm" / "valid.jsonl.gz") if r["kind"] in ("book", "play")
    ]
    free = [halves(plain_ids(tokenizer, row["text"][:4000])) for row in spread(prose, TEXTS)]
    return {"quote": quote, "answer": answer, "free": free, "summary": summary}


def real_answers(probe: Path, folder: Path, vocab_size: int) -> tuple[list[ReplayText], Sources]:
    """Return answers that a model wrote, and stores of its other answers and a corpus."""
    rows = read_gzip(probe / "history.json.gz")
    replayed = spread([row for row in rows if len(row["answer"]) > MIN_ANSWER], TEXTS)
    others = [row["prompt"] + row["answer"] for row in rows if row not in replayed]
    corpus, history = (
        CorpusIndex.build(texts, None, folder / name, vocab_size=vocab_size)
        for name, texts in (("corpus", read_gzip(probe / "store.json.gz")), ("history", others))
    )
    return [replay_text(row["prompt"], row["answer"]) for row in replayed], Sources(corpus, history)


def read_gzip(path: Path) -> Any:
    """Return the contents of a gzipped JSON file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def gold_answer(tokenizer: Any, row: Mapping[str, Any], document: Document) -> ReplayText:
    """Return a question about a document, followed by the gold evidence and answer."""
    passages = split_document(document)
    start, end = row["evidence_span"]
    inside = [i for i, p in enumerate(passages) if p.start < end and start < p.end]
    in_prompt = passages[max(0, inside[0] - 1) : inside[-1] + 2]
    prompt = render(tokenizer, row["question"], [Hit(document, each, 1.0) for each in in_prompt])
    number = 1 + in_prompt.index(passages[inside[0]])
    gold = f" [{number}] {row['evidence']}\nAnswer: {row['answers'][0]}"
    ids = add_errors(plain_ids(tokenizer, gold), len(gold))
    return ReplayText(prompt.token_ids, tuple(ids), prompt.spans, prompt.layout)


def bundled_texts(tokenizer: Any) -> dict[str, list[ReplayText]]:
    """Return texts from the bundled guide: passages to quote, short answers, and prose."""
    paths = sorted((STARTER / "guide").glob("*.md"))
    pages = [plain_ids(tokenizer, path.read_text(encoding="utf-8")) for path in paths]
    everything = [token for page in pages for token in page]
    rng = random.Random(0)
    texts: dict[str, list[ReplayText]] = {"quote": [], "answer": [], "free": [], "summary": []}
    for number in range(TEXTS):
        page = pages[number % len(pages)]
        start = rng.randrange(16, len(page) - MAX_TOKENS)
        text = add_errors(page[start : start + MAX_TOKENS], number)
        texts["quote"].append(replay_text([*page, *page[start - 8 : start]], text))
        short = add_errors(page[start : start + 24], number)
        other = pages[(number + 1) % len(pages)]
        texts["answer"].append(
            replay_text([*page, *page[start - 4 : start]], [*short, *other[60:84]])
        )
        texts["free"].append(halves(page[rng.randrange(len(page) // 2) :][: 3 * MAX_TOKENS]))
        if number % 2:
            rotated = everything[start * 7 :] + everything[: start * 7]
            texts["summary"].append(
                replay_text(rotated[:7000], rotated[7000 + MAX_TOKENS :] or page)
            )
    return texts


def replay_text(prompt: Sequence[int], text: Sequence[int], spans: Any = ()) -> ReplayText:
    """Return a prompt and its text, cut to `MAX_TOKENS`."""
    return ReplayText(tuple(prompt), tuple(text[:MAX_TOKENS]), tuple(spans))


def add_errors(ids: Sequence[int], seed: int) -> list[int]:
    """Return a text with random wrong tokens, since no model copies without errors."""
    rng = random.Random(seed)
    return [rng.choice(ids) if rng.random() < ERROR_RATE else token for token in ids]


def halves(ids: Sequence[int]) -> ReplayText:
    """Return the first half of a text as prompt and the second half as text."""
    half = max(1, len(ids) // 2)
    return replay_text(ids[:half], ids[half:])
