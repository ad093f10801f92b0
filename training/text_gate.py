"""Measure quotes, their places and the ends of a text model's answers over docqa's valid documents.

Prompts are those of the shared question-answering records (one to four passages, the gold one
among them), or, with `--passages N`, hold what BM25 ranks first in the item's own document, as in
use: there the gold passage may be missing. Decoding is greedy.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from text_data import QA_BLOCK, QA_RECORD, read_jsonl, sentence_spans
from text_model import repeat_accuracy
from text_passages import rank

EVIDENCE = re.compile(r"^\s*\[(\d+)\] (.*)$")


@dataclass(frozen=True)
class Item:
    """A question with its prompt, its document, the gold evidence and the gold answers."""

    name: str
    prompt: str
    passages: list[str]
    document: str
    evidence: str
    answers: list[str]
    question: str


def squeeze(text: str) -> str:
    """Reduce every run of white space to one space."""
    return " ".join(text.split())


def cut(text: str, words: int = 105) -> list[str]:
    """Cut a document into passages of whole sentences, about `words` words each."""
    passages, start, stop, count = [], -1, 0, 0
    for a, b in sentence_spans(text):
        size = len(text[a:b].split())
        if start >= 0 and count + size > words + 20:
            passages.append(text[start:stop])
            start, count = -1, 0
        start = a if start < 0 else start
        stop, count = b, count + size
    return [*passages, text[start:stop]]


def read_items(shared: Path, split: str, count: int, words: int = 105) -> list[Item]:
    """Build the prompts of `split` with `count` passages of about `words` words each."""
    folder = shared / "data" / "docqa"
    documents = {d["doc_id"]: d for d in read_jsonl(folder / "documents.jsonl.gz")}
    items = []
    for record in read_jsonl(folder / "items.jsonl"):
        if record["split"] != split:
            continue
        document = documents[record["doc_id"]]
        passages = cut(document["text"], words)
        chosen = [passages[i] for i in rank(record["question"], passages)[:count]]
        blocks = [f"[{n}] {document['title']}\n{text}" for n, text in enumerate(chosen, start=1)]
        question, gold = record["question"], (record["evidence"], record["answers"])
        prompt = "Context:\n" + "\n\n".join(blocks) + f"\n\nQuestion: {question}\nEvidence:"
        items.append(Item(record["id"], prompt, chosen, document["text"], *gold, question))
    return items


def read_records(shared: Path, split: str) -> list[Item]:
    """Take the prompts of the shared records about documents of docqa, as they are laid out."""
    documents = read_jsonl(shared / "data" / "docqa" / "documents.jsonl.gz")
    titles = {document["title"] for document in documents if document["split"] == split}
    items = []
    for record in read_jsonl(shared / "data" / "lm" / f"{split}.jsonl.gz"):
        match = QA_RECORD.match(record["text"]) if record["kind"] == "qa" else None
        if match is None:
            continue
        blocks = [block.partition("\n") for block in QA_BLOCK.split(match["context"])]
        if blocks[int(match["gold"]) - 1][0][4:] not in titles:
            continue
        passages = [passage for _, _, passage in blocks]
        prompt = match[0][: match.start("gold") - len(" [")]
        text = "\n".join(passages)
        gold = match["evidence"], [match["answer"].strip()]
        items.append(Item(record["id"], prompt, passages, text, *gold, match["question"]))
    return items


def overlaps(quote: str, gold: str, document: str) -> bool:
    """Say whether a quote lies on the gold evidence: half of the shorter one is shared."""
    text, quote, gold = squeeze(document), squeeze(quote), squeeze(gold)
    here, there = text.find(quote), text.find(gold)
    if not quote or here < 0 or there < 0:
        return False
    shared = min(here + len(quote), there + len(gold)) - max(here, there)
    return shared >= 0.5 * min(len(quote), len(gold))


def judge(item: Item, output: str, ended: bool) -> dict[str, Any]:
    """Judge one generated text (what follows "Evidence:")."""
    line, _, rest = output.partition("\n")
    match = EVIDENCE.match(line)
    quote = match[2].strip() if match else line.strip()
    passages = [squeeze(passage) for passage in item.passages]
    result = len(quote.split()) >= 6 and any(squeeze(quote) in passage for passage in passages)
    answer = squeeze(rest.partition("Answer:")[2]).lower()
    golds = [squeeze(gold).lower() for gold in item.answers]
    number = int(match[1]) if match else 0
    named = passages[number - 1] if 0 < number <= len(passages) else ""
    gold = squeeze(item.evidence)
    return {
        "id": item.name,
        "verbatim": result,
        "overlap": overlaps(quote, item.evidence, item.document),
        "ended": ended,
        "answer": bool(answer) and any(gold in answer or answer in gold for gold in golds),
        "retrieved": any(gold[:60] in text for text in passages),
        "label": result and match is not None and squeeze(quote) in named,
        "question": item.question,
        "output": output,
    }


def generate(
    model: Any, tokenizer: Any, prompts: list[str], limit: int
) -> list[tuple[list[int], bool]]:
    """Decode greedily, prompts of like length together; give each output and whether it ended."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, tuple[list[int], bool]] = {}
    tokenizer.padding_side = "left"
    for start in range(0, len(order), 8):
        rows = order[start : start + 8]
        inputs = tokenizer(
            [prompts[i] for i in rows], return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=limit,
                do_sample=False,
            )
        for i, row in zip(rows, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ended = 0 in row
            body = row[: row.index(0)] if ended else row
            results[i] = (body, ended)
    return [results[i] for i in range(len(prompts))]


def agreement(draft: Any, prompt: list[int], output: list[int]) -> tuple[int, int]:
    """Count the tokens of an output that a draft model would have guessed, and all of them."""
    tokens = torch.tensor([prompt + output])
    with torch.no_grad():
        guesses = draft(input_ids=tokens[:, :-1], use_cache=False).logits[0].argmax(-1)
    hits = guesses[len(prompt) - 1 :] == tokens[0, len(prompt) :]
    return int(hits.sum()), len(output)


def measure(
    model: Any, tokenizer: Any, items: list[Item], draft: Any = None, limit: int = 160
) -> dict[str, Any]:
    """Run the gate; returns the rates and the judged rows."""
    outputs = generate(model, tokenizer, [item.prompt for item in items], limit)
    rows = [
        judge(item, tokenizer.decode(output), ended)
        for item, (output, ended) in zip(items, outputs, strict=True)
    ]
    keys = ("verbatim", "overlap", "ended", "answer", "retrieved", "label")
    rates: dict[str, Any] = {k: round(sum(row[k] for row in rows) / len(rows), 3) for k in keys}
    rates["items"] = len(rows)
    if draft is not None:
        counts = [
            agreement(draft, tokenizer.encode(item.prompt, add_special_tokens=False), output)
            for item, (output, _) in zip(items, outputs, strict=True)
        ]
        rates["draft_agreement"] = round(sum(a for a, _ in counts) / sum(b for _, b in counts), 3)
    rates["repeat_128"] = round(repeat_accuracy(model, 16, 128, 7), 4)
    rates["repeat_400"] = round(repeat_accuracy(model, 4, 400, 7), 4)
    return {"rates": rates, "rows": rows}


def main() -> None:
    """Print the rates of a model folder as JSON; with --rows also every output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("ragspec/starter/target"))
    parser.add_argument("--draft", type=Path, default=None, help="count the tokens it guesses too")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--split", default="valid")
    parser.add_argument("--passages", type=int, default=None, help="retrieve so many; else records")
    parser.add_argument("--words", type=int, default=105, help="of a passage")
    parser.add_argument("--stride", type=int, default=1, help="take every n-th item only")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=Path, default=None, help="write the judged rows here")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=dtype) if args.draft else None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.passages:
        items = read_items(args.shared, args.split, args.passages, args.words)[:: args.stride]
    else:
        items = read_records(args.shared, args.split)[:: args.stride]
    result = measure(model.eval(), tokenizer, items, draft)
    if args.rows:
        args.rows.write_text(json.dumps(result["rows"], indent=1, ensure_ascii=False))
    print(json.dumps({"passages": args.passages, **result["rates"]}))


if __name__ == "__main__":
    main()
