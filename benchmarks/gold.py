"""Tokens a step of each drafter if the target generates exactly the gold text, without a model.

    python benchmarks/gold.py --data DIR [--methods context,lookup] [--budget 10] [--json FILE]

DIR holds docqa/documents.jsonl.gz, docqa/items.jsonl and longdocs/. A question's prompt holds the
passages of its document with the evidence, and one passage before and after them. The gold text is
"[k] evidence" and the answer. A quotation's prompt holds about --window tokens around it (0: the
whole document). All figures are simulated: a model does not generate exactly the gold text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.data import docqa_documents, long_documents, read_records
from harness.replay import Replay, ReplayText
from harness.tasks import CONTEXT_TOKENS, QUOTATION, plain_ids, quotation
from text import quote_tasks

from ragspec.drafters.method import Sources, build
from ragspec.models.load import load_model
from ragspec.pipelines.answering.prompt import build_prompt
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import split_document

METHODS = "lookup,context,match,suffix,select"
Texts = dict[str, list[ReplayText]]


def questions(data: Path, tokenizer: Any) -> Texts:
    """Return the questions of split valid by tier, with their gold evidence and answer."""
    documents = docqa_documents(data)
    by_document = {name: split_document(document) for name, document in documents.items()}
    by_tier: Texts = {}
    for row in read_records(data / "docqa" / "items.jsonl"):
        if row["split"] != "valid":
            continue
        document, passages = documents[row["doc_id"]], by_document[row["doc_id"]]
        start, end = row["evidence_span"]
        inside = [i for i, p in enumerate(passages) if p.start < end and start < p.end]
        in_prompt = passages[max(0, inside[0] - 1) : inside[-1] + 2]
        hits = [Hit(document, passage, 1.0) for passage in in_prompt]
        prompt = build_prompt(tokenizer, row["question"], hits)
        number = 1 + in_prompt.index(passages[inside[0]])
        gold = f" [{number}] {row['evidence']}\nAnswer: {row['answers'][0]}"
        ids = tuple(plain_ids(tokenizer, gold))
        by_tier.setdefault(row["tier"], []).append(
            ReplayText(prompt.token_ids, ids, prompt.spans, prompt.layout)
        )
    return by_tier


def quotations(data: Path, tokenizer: Any, window: int) -> Texts:
    """Return the passages to quote from long documents."""
    documents, texts = long_documents(data), []
    for number, (name, task) in enumerate(quote_tasks(data)):
        prompt, cue, gold = quotation(tokenizer, documents[name], task, number, window)
        ids = prompt.token_ids + tuple(plain_ids(tokenizer, cue))
        texts.append(ReplayText(ids, tuple(plain_ids(tokenizer, gold)), prompt.spans))
    return {QUOTATION: texts}


def measure(
    texts: Texts, methods: Iterable[str], budget: int, vocab_size: int
) -> list[dict[str, Any]]:
    """Return one row for each category and method."""
    rows = []
    for category, group in texts.items():
        for method in methods:
            drafters = None if method == "plain" else build(method, Sources())
            replay = Replay(drafters, budget, vocab_size)
            for text in group:
                replay.play(text)
            counts = replay.counts
            rows.append(
                {
                    "category": category,
                    "method": method,
                    "budget": budget,
                    "texts": counts.texts,
                    "tokens": counts.tokens,
                    "steps": counts.steps,
                    "tokens_per_step": round(counts.tokens_per_step, 3),
                    "nodes": round(counts.nodes, 2),
                    "faults": counts.faults,
                }
            )
            print(category, method, rows[-1]["tokens_per_step"], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return tokens a step as a Markdown table, categories by methods."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [f"| simulated | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for category in dict.fromkeys(row["category"] for row in rows):
        cells = {r["method"]: r["tokens_per_step"] for r in rows if r["category"] == category}
        lines.append(f"| {category} | {' | '.join(f'{cells[m]:.2f}' for m in methods)} |")
    return "\n".join(lines)


def main() -> None:
    """Replay all categories with each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--budget", type=int, default=10, help="draft nodes")
    parser.add_argument(
        "--window", type=int, default=CONTEXT_TOKENS, help="tokens around a quotation"
    )
    parser.add_argument("--limit", type=int, help="most texts of a category")
    parser.add_argument("--model", default="starter", help="model of the tokenizer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model)
    texts = questions(options.data, tokenizer) | quotations(options.data, tokenizer, options.window)
    texts = {name: group[: options.limit] for name, group in texts.items()}
    rows = measure(texts, options.methods.split(","), options.budget, int(model.config.vocab_size))
    print(table(rows))
    if options.json:
        facts = {"simulated": True, "budget": options.budget, "window": options.window}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
