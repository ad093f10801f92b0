"""Answers over documents by prompt: search, right ones, support, refusals and seconds.

    python benchmarks/answers.py --data DIR [--model smollm2] [--prompts answer,extract]
        [--doors ask,chat,server] [--sets docqa,manuals,books] [--half report] [--json FILE]

There are three sets of questions: 40 of the split in DIR's `docqa/items.jsonl` over all of its
documents, 40 of our own over the manuals of DIR's `lm/valid.jsonl.gz`, and 30 of our own over the
books of DIR's `longdocs`. The questions of even number served to choose words, thresholds and
prompts ("tune"), those of odd number report. A file of JSON lines beside this one has 45 questions
of our own without an answer in the documents; the questions of other sets have none either.

Figures are those of `ragspec bench answers`. `--doors` asks with the default prompt through
`DocQA`, in a conversation of one turn, and by HTTP requests to a server. `--refusals` measures
refusals alone, over one document, over each set, and over all documents and DIR's
`retrieval/passages.jsonl.gz` together. `--held-out` measures them on DIR's `retrieval/queries`,
over documents that served for no choice: with the question's own documents, and without them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fastapi.testclient import TestClient
from harness.data import ITEMS, docqa_documents, gold_questions, long_documents, read_records

from ragspec.engine.engine import Engine
from ragspec.pipelines.answering.answerer import JUDGED, unique
from ragspec.pipelines.answering.conversation import Conversation
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.bench.answers import AnswerRow, Item, has_answer, measure_answers, summary
from ragspec.pipelines.console.options import silence_transformers
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.sentences import LEAST_SCORE, rank_sentences

HERE = Path(__file__).parent
OWN = {"manuals": HERE / "manual_questions.jsonl", "books": HERE / "book_questions.jsonl"}
UNANSWERABLE = HERE / "unanswerable_questions.jsonl"
SETS = ("docqa", "manuals", "books")
HALVES = {"tune": slice(0, None, 2), "report": slice(1, None, 2), "all": slice(None)}
MOST = 40


def questions(data: Path, kind: str, split: str = "valid") -> list[tuple[Item, str]]:
    """Return the questions of a set, each with the name of its document."""
    if kind == "docqa":
        gold = gold_questions(data, split)[:MOST]
        return [(Item(each.text, each.answers), each.document) for each in gold]
    records = read_records(OWN[kind])
    return [(Item(r["question"], tuple(r["answers"])), r["doc"]) for r in records]


def unanswerable(kind: str) -> list[Item]:
    """Return questions that the documents of a set do not answer."""
    return [Item(r["question"], ()) for r in read_records(UNANSWERABLE) if r["set"] == kind]


def documents(data: Path, kind: str) -> list[Document]:
    """Return the documents of one set."""
    if kind == "manuals":
        records = [r for r in read_records(data / "lm" / "valid.jsonl.gz") if r["kind"] == "docs"]
        return [Document(r["doc"], r["doc"], r["text"]) for r in records]
    if kind == "books":
        return list(long_documents(data).values())
    return list(docqa_documents(data).values())


def many_documents(data: Path) -> list[Document]:
    """Return the documents of the passages, each of its passages."""
    folder = data / "retrieval"
    titles = {r["doc_id"]: r["title"] for r in read_records(folder / "passage_docs.jsonl.gz")}
    texts: dict[str, list[str]] = {}
    for record in read_records(folder / "passages.jsonl.gz"):
        texts.setdefault(record["doc"], []).append(record["text"])
    return [
        Document(f"passages/{name}", titles[name], "\n\n".join(parts))
        for name, parts in texts.items()
    ]


def refused(index: PassageIndex, items: Sequence[Item]) -> float:
    """Return the share of questions that are refused over an index."""
    qa = DocQA(index, prompt="extract")
    return fmean(qa.search(item.question).refused is not None for item in items)


def show_refusals(data: Path, half: slice) -> None:
    """Print the shares of refused questions with and without an answer."""
    indexes = {kind: PassageIndex.build(documents(data, kind)) for kind in SETS}
    every = [each for index in indexes.values() for each in index.documents]
    several = many_documents(data)
    indexes["all"] = PassageIndex.build([*every, *several])
    print(f"all: {len(indexes['all'].documents):,} documents")
    named = {document.name: document for document in every}
    for kind in SETS:
        asked = questions(data, kind)[half]
        items = [item for item, _ in asked]
        others = [q for other in SETS if other != kind for q, _ in questions(data, other)[half]]
        none = [*unanswerable(kind)[half], *others]
        singles = [(PassageIndex.build([named[name]]), item) for item, name in asked]
        # The answers of questions of the neighbours stand in other documents.
        pairs = zip(asked, asked[1:] + asked[:1], strict=True)
        apart = [
            refused(PassageIndex.build([named[one]]), [item])
            for (_, one), (item, other) in pairs
            if one != other
        ]
        print(
            f"{kind}: with an answer {refused(indexes[kind], items):.1%} refused, over one "
            f"document {fmean(refused(index, [item]) for index, item in singles):.1%}, over all "
            f"{refused(indexes['all'], items):.1%}; without {refused(indexes[kind], none):.1%}, of "
            f"our own {refused(indexes[kind], unanswerable(kind)[half]):.1%}, over one document of "
            f"another question {fmean(apart):.1%}",
            flush=True,
        )


def show_held_out(data: Path, split: str, most: int = 150) -> None:
    """Print refusals over the documents of a split, with and without those of each question."""
    used = {record["question"] for record in read_records(data / ITEMS)}
    records = [*read_records(data / "retrieval" / "queries.jsonl.gz")]
    records = [record for record in records if record["question"] not in used]
    listed = read_records(data / "retrieval" / "passage_docs.jsonl.gz")
    firsts = sorted((r["first"], r["doc_id"]) for r in listed)
    every = {document.name: document for document in many_documents(data)}

    def names(record: dict[str, Any]) -> set[str]:
        places = [bisect_right(firsts, (passage, "~")) - 1 for passage in record["gold"]]
        return {f"passages/{firsts[place][1]}" for place in places}

    for origin in ("nq", "wiki", "covid"):
        some = [r for r in records if (r["split"], r["origin"]) == (split, origin)]
        index = PassageIndex.build([every[n] for n in sorted(set().union(*map(names, some)))])
        random.Random(5).shuffle(some)
        shares = dict[bool, list[bool]]()
        for record in some[:most]:
            hits = index.search(record["question"], 60)
            rest = [h for h in hits if h.document.name not in names(record)]
            rest = [h for h in rest if not has_answer(h.passage.text, record["answers"])]
            for answered, part in ((True, hits), (False, rest)):
                sentences = rank_sentences(record["question"], unique(part)[:JUDGED])
                score = max((each.score for each in sentences), default=0.0)
                shares.setdefault(answered, []).append(score < LEAST_SCORE)
        print(f"{split} {origin}: {len(index.documents)} documents, {len(some[:most])} questions")
        print(f"  refused with {fmean(shares[True]):.1%}, without {fmean(shares[False]):.1%}")


def request_answer(client: TestClient, item: Item, tokens: int) -> AnswerRow:
    """Return the figures of an answer of a server with documents."""
    messages = [{"role": "user", "content": item.question}]
    body = {"model": "model", "messages": messages, "temperature": 0, "max_tokens": tokens}
    began = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    message = reply["choices"][0]["message"]
    texts = tuple(each["text"] for each in message.get("sentences", ()))
    steps = reply["metrics"]["speculative_decoding"]
    return AnswerRow(
        question=item.question,
        answers=item.answers,
        answer=message["content"],
        texts=texts,
        passages=False,  # the reply does not have them
        sentences=any(has_answer(text, item.answers) for text in texts),
        right=has_answer(message["content"], item.answers),
        refused="refused" in message,
        support=message.get("support", "unsupported"),
        seconds=time.perf_counter() - began,
        tokens=reply["usage"]["completion_tokens"],
        per_forward=reply["usage"]["completion_tokens"] / max(1, steps["num_forwards"]),
    )


def show_doors(data: Path, engine: Engine, doors: Sequence[str], half: slice, tokens: int) -> None:
    """Ask every question through every door and print the figures."""
    rows: dict[str, list[AnswerRow]] = {door: [] for door in doors}
    for kind in SETS:
        qa = DocQA(PassageIndex.build(documents(data, kind)), engine=engine)
        app = build_app(Serving(engine, "model", documents=qa), ServerSettings())
        with TestClient(app, "http://localhost") as client:
            ask: dict[str, Callable[[Item], AnswerRow]] = {
                "ask": lambda item, qa=qa: measure_answers(qa, [item], tokens)[0],
                "chat": lambda item, qa=qa: measure_answers(
                    Conversation(engine, qa), [item], tokens
                )[0],
                "server": lambda item, client=client: request_answer(client, item, tokens),
            }
            items = [item for item, _ in questions(data, kind)[half]]
            for item in items:
                for door in doors:
                    rows[door].append(ask[door](item))
        for door, every in rows.items():
            print(kind, door, summary(every[-len(items) :]), flush=True)
    for door, every in rows.items():
        print("all", door, summary(every))


def main() -> None:
    """Ask every question with every prompt and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", default="answer,extract")
    parser.add_argument("--doors", default="")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument("--held-out", choices=("train", "valid"))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--passages", type=int, help="default: that of the model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    half = HALVES[options.half]
    if options.refusals:
        show_refusals(options.data, half)
        return
    if options.held_out:
        show_held_out(options.data, options.held_out)
        return
    engine = Engine.from_pretrained(options.model, device="cpu")
    if options.doors:
        show_doors(options.data, engine, options.doors.split(","), half, options.tokens)
        return
    rows: dict[str, list[AnswerRow]] = {prompt: [] for prompt in options.prompts.split(",")}
    for kind in options.sets.split(","):
        index = PassageIndex.build(documents(options.data, kind))
        items = [item for item, _ in questions(options.data, kind)[half]]
        for item in items:  # prompts take turns, so that a busy machine slows all alike
            for prompt in rows:
                qa = DocQA(index, engine=engine, prompt=prompt, top_k=options.passages)
                rows[prompt] += measure_answers(qa, [item], options.tokens, refuse=False)
        for prompt, every in rows.items():
            print(kind, prompt, summary(every[-len(items) :]), flush=True)
    for prompt, every in rows.items():
        print("all", prompt, summary(every))
    if options.json:
        record = {prompt: [asdict(row) for row in every] for prompt, every in rows.items()}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
