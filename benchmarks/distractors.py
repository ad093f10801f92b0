"""The effect of unrelated stores on the drafts of a store with the text.

    python benchmarks/distractors.py --data DIR [--budget 16] [--others 4] [--json FILE]

DIR holds lm/ and longdocs/. The training pages of a manual are one store. The script continues
held-out pages of the same manual with this store alone, and with `--others` further stores of a
long book each. Simulated: the generated text is the page itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.data import long_documents, read_records
from harness.replay import Replay, ReplayCounts, ReplayText
from harness.tasks import plain_ids

from ragspec.models.load import load_model
from ragspec.retrievers import AutoDrafter, CorpusIndex

PROMPT, TEXT, PAGES = 128, 256, 12  # tokens, tokens, pages a manual


def pages(path: Path) -> dict[str, list[str]]:
    """Return the pages of each manual in a file of the language model's text."""
    by_manual: dict[str, list[str]] = {}
    for row in read_records(path):
        if row["kind"] == "docs":
            by_manual.setdefault(row["doc"].split("/")[0], []).append(row["text"])
    return by_manual


def cut_pages(texts: list[str], tokenizer: Any) -> list[ReplayText]:
    """Return the first tokens of pages as prompts, and the tokens after them as texts."""
    ids = [plain_ids(tokenizer, text[:8000]) for text in texts]
    long = [each for each in ids if len(each) >= PROMPT + TEXT]
    return [ReplayText(tuple(i[:PROMPT]), tuple(i[PROMPT : PROMPT + TEXT])) for i in long[:PAGES]]


def measure(
    stores: list[CorpusIndex], texts: list[ReplayText], budget: int, size: int
) -> ReplayCounts:
    """Return the counts of the texts with these stores and the default drafters."""
    drafters = [store.drafter(name=f"store {i}") for i, store in enumerate(stores)]
    replay = Replay(AutoDrafter(*drafters), budget, size)
    for text in texts:
        replay.play(text)
    return replay.counts


def main() -> None:
    """Build the stores, replay the pages with and without the others, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter", help="model of the tokenizer")
    parser.add_argument("--budget", type=int, default=16, help="draft nodes")
    parser.add_argument("--others", type=int, default=4, help="number of stores of books")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model)
    size = int(model.config.vocab_size)
    manuals = pages(options.data / "lm" / "train.jsonl.gz")
    books = list(long_documents(options.data).values())[: options.others]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def store(texts: list[str]) -> CorpusIndex:
            out = Path(folder) / str(len(list(Path(folder).iterdir())))
            return stack.enter_context(CorpusIndex.build(texts, tokenizer, out=out))

        others = [store([book.text]) for book in books]
        for name, texts in pages(options.data / "lm" / "valid.jsonl.gz").items():
            replayed = cut_pages(texts, tokenizer)
            if not replayed or name not in manuals:
                continue
            manual_store = store(manuals[name])
            alone = measure([manual_store], replayed, options.budget, size).tokens_per_step
            beside = measure(
                [manual_store, *others], replayed, options.budget, size
            ).tokens_per_step
            none = measure([], replayed, options.budget, size).tokens_per_step
            rows.append(
                {
                    "manual": name,
                    "pages": len(replayed),
                    "without": round(none, 3),
                    "alone": round(alone, 3),
                    "beside": round(beside, 3),
                    "share": round(beside / alone, 4),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    share = statistics.median(row["share"] for row in rows)
    facts = {"simulated": True, "budget": options.budget, "others": len(books), "share": share}
    print(json.dumps(facts))
    if options.json:
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
