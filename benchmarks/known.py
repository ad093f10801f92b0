"""Known texts for budget.py: gold copies with slips, prose, and answers that a model wrote."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.data import docqa_documents, long_documents, read_records
from harness.replay import Known
from harness.tasks import plain_ids, quotation
from text import quote_tasks, spread

from ragspec.models.resolve import STARTER
from ragspec.pipelines.docqa.prompt import render
from ragspec.pipelines.methods import Sources
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import split_document

TEXTS = 30
LONGEST = 96  # tokens of a text
FEWEST = 40  # of a real answer
SLIPS = 0.04  # of the tokens of a copy


def shared_texts(data: Path, tokenizer: Any) -> dict[str, list[Known]]:
    """Return the texts of the evaluation data."""
    documents = long_documents(data)
    quote, summary, answer = [], [], []
    for number, (name, task) in enumerate(spread(quote_tasks(data), TEXTS)):
        prompt, begun, gold = quotation(tokenizer, documents[name], task, number)
        ids = prompt.token_ids + tuple(plain_ids(tokenizer, begun))
        quote.append(known(ids, slipped(plain_ids(tokenizer, gold), number), prompt.spans))
    for number, document in enumerate(documents.values()):
        ids = plain_ids(tokenizer, document.text[:80_000])
        for length in (2000, 7000):  # what comes later shares its names and phrases, as a summary
            start = (number * 997) % (len(ids) - length - 2 * LONGEST)
            summary.append(known(ids[start : start + length], ids[start + length + LONGEST :]))
    named = docqa_documents(data)
    items = [r for r in read_records(data / "docqa" / "items.jsonl") if r["split"] == "valid"]
    for row in spread(items, TEXTS):
        answer.append(gold_answer(tokenizer, row, named[row["doc_id"]]))
    prose = [
        r for r in read_records(data / "lm" / "valid.jsonl.gz") if r["kind"] in ("book", "play")
    ]
    free = [halves(plain_ids(tokenizer, row["text"][:4000])) for row in spread(prose, TEXTS)]
    return {"quote": quote, "answer": answer, "free": free, "summary": summary}


def real_answers(probe: Path, folder: Path, vocab_size: int) -> tuple[list[Known], Sources]:
    """Return answers that a model wrote, and stores of its other answers and of a corpus."""
    rows = unzipped(probe / "history.json.gz")
    selected = spread([row for row in rows if len(row["answer"]) > FEWEST], TEXTS)
    message = [row["prompt"] + row["answer"] for row in rows if row not in selected]
    corpus, history = (
        CorpusIndex.build(texts, None, folder / name, vocab_size=vocab_size)
        for name, texts in (("corpus", unzipped(probe / "store.json.gz")), ("history", message))
    )
    return [known(row["prompt"], row["answer"]) for row in selected], Sources(corpus, history)


def unzipped(path: Path) -> Any:
    """Return what a JSON file holds."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def gold_answer(tokenizer: Any, row: Mapping[str, Any], document: Document) -> Known:
    """Return a question about a document, with the gold evidence and answer after it."""
    passages = split_document(document)
    start, end = row["evidence_span"]
    inside = [i for i, p in enumerate(passages) if p.start < end and start < p.end]
    text = passages[max(0, inside[0] - 1) : inside[-1] + 2]
    prompt = render(tokenizer, row["question"], [Hit(document, each, 1.0) for each in text])
    number = 1 + text.index(passages[inside[0]])
    gold = f" [{number}] {row['evidence']}\nAnswer: {row['answers'][0]}"
    ids = slipped(plain_ids(tokenizer, gold), len(gold))
    return Known(prompt.token_ids, tuple(ids), prompt.spans, prompt.layout)


def bundled_texts(tokenizer: Any) -> dict[str, list[Known]]:
    """Return texts made of the guide: passages to quote, short answers, and its prose."""
    paths = sorted((STARTER / "guide").glob("*.md"))
    pages = [plain_ids(tokenizer, path.read_text(encoding="utf-8")) for path in paths]
    everything = [token for page in pages for token in page]
    draw = random.Random(0)
    record: dict[str, list[Known]] = {"quote": [], "answer": [], "free": [], "summary": []}
    for number in range(TEXTS):
        page = pages[number % len(pages)]
        start = draw.randrange(16, len(page) - LONGEST)
        text = slipped(page[start : start + LONGEST], number)
        record["quote"].append(known([*page, *page[start - 8 : start]], text))
        short = slipped(page[start : start + 24], number)
        other = pages[(number + 1) % len(pages)]
        record["answer"].append(known([*page, *page[start - 4 : start]], [*short, *other[60:84]]))
        record["free"].append(halves(page[draw.randrange(len(page) // 2) :][: 3 * LONGEST]))
        if number % 2:
            turned = everything[start * 7 :] + everything[: start * 7]
            record["summary"].append(known(turned[:7000], turned[7000 + LONGEST :] or page))
    return record


def known(prompt: Sequence[int], text: Sequence[int], spans: Any = ()) -> Known:
    """Return a text after its prompt, no longer than is generated."""
    return Known(tuple(prompt), tuple(text[:LONGEST]), tuple(spans))


def slipped(ids: Sequence[int], seed: int) -> list[int]:
    """Return a text with other tokens here and there, as no model copies for ever."""
    draw = random.Random(seed)
    return [draw.choice(ids) if draw.random() < SLIPS else token for token in ids]


def halves(ids: Sequence[int]) -> Known:
    """Return a text that goes on from its own beginning."""
    half = max(1, len(ids) // 2)
    return known(ids[:half], ids[half:])
