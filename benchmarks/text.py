"""Text decoding against transformers, on evaluation data that is not part of the project.

    python benchmarks/text.py --data DIR --json results.json

DIR holds docqa/documents.jsonl.gz, docqa/items.jsonl, longdocs/, spec_bench/question_dev.jsonl and
lm/valid.jsonl.gz. Categories:

- docqa: prompts of DocQA's search over all documents
- quotation: from a long document, of which the prompt holds about 1,500 tokens
- edits: a copy of a text with one word changed
- code: functions of the interpreter's standard library, cut in the middle
- Spec-Bench's summarization, rag, qa, math, translation and chat (MT-Bench's categories together)
- free: free text

All but docqa and edits generate a fixed number of tokens. Code, Spec-Bench and free text are
sampled, since small models loop when greedy (--temperature 0 for large ones). See
`pipelines.bench.measure` for the comparison of runs. The script tries a small grid of settings of
transformers' modes on the first prompts of each category and uses the fastest.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from harness.data import docqa_documents, long_documents, read_records
from harness.tasks import (
    CODE,
    CONTEXT_TOKENS,
    EDITS,
    QUOTATION,
    QuoteTask,
    code_items,
    edit_items,
    library_files,
    quotation_items,
)
from harness.tuned_peers import peer_grid, run_tuned

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.bench.measure import (
    DEFAULT_VARIANTS,
    PEERS,
    by_category,
    choose_baseline,
    show_results,
)
from ragspec.pipelines.bench.prompts import (
    DOCQA,
    FIXED_NEW_TOKENS,
    FREE,
    FREE_TEMPERATURE,
    BenchItem,
    docqa_items,
    free_items,
    items_of,
    read_turns,
)
from ragspec.pipelines.bench.variants import build_variants
from ragspec.pipelines.methods import open_sources
from ragspec.retrievers.search.passage_index import PassageIndex

T = TypeVar("T")
OVERHEAD = 120  # tokens of a quotation's prompt outside the document
# MT-Bench's eight categories count as one; one name of Spec-Bench is shortened.
POOLED = {
    "math_reasoning": "math",
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        "chat",
    ),
}


def docqa(data: Path, engine: Engine, top_k: int) -> list[BenchItem]:
    """Return the questions over documents outside the starter models' training data."""
    documents = docqa_documents(data)
    qa = DocQA(PassageIndex.build(list(documents.values())), engine=engine, top_k=top_k)
    items = [r for r in read_records(data / "docqa" / "items.jsonl") if r["split"] == "valid"]
    return docqa_items(qa, [(row["id"], row["question"]) for row in items])


def free(data: Path, tokenizer: Any, count: int) -> list[BenchItem]:
    """Return first tokens of held-out documentation and books, spread over the file."""
    rows = [
        row
        for row in read_records(data / "lm" / "valid.jsonl.gz")
        if row["kind"] in ("docs", "book")
    ]
    step = max(1, len(rows) // count)
    return free_items(tokenizer, [(row["id"], row["text"]) for row in rows[::step]])[:count]


def edits(data: Path, tokenizer: Any, count: int) -> list[BenchItem]:
    """Return pieces of held-out documentation to copy with one word changed."""
    rows = [row for row in read_records(data / "lm" / "valid.jsonl.gz") if row["kind"] == "docs"]
    step = max(1, len(rows) // (2 * count))  # not every piece has a word to change
    return edit_items(tokenizer, [(row["id"], row["text"]) for row in rows[::step]], count)


def quote_tasks(data: Path) -> list[tuple[str, QuoteTask]]:
    """Return pairs of a document's name and a passage to quote."""
    rows = read_records(data / "longdocs" / "quote_tasks.jsonl")
    return [
        (row["doc"], QuoteTask(row["id"], row["query"], row["cue"], *row["reference_span"]))
        for row in rows
    ]


def quotations(data: Path, tokenizer: Any, count: int, room: int) -> list[BenchItem]:
    """Return passages to quote, spread over all long documents."""
    tasks = spread(quote_tasks(data), count)
    return quotation_items(tokenizer, long_documents(data), tasks, room)


def collect(
    data: Path, engine: Engine, categories: list[str], items: int, temperature: float
) -> list[BenchItem]:
    """Return at most `items` prompts of each category; all categories if none is named."""
    tokenizer = engine.tokenizer
    room = CONTEXT_TOKENS
    if engine.target.max_length is not None:
        room = min(room, engine.target.max_length - FIXED_NEW_TOKENS - OVERHEAD)
    makers = {
        DOCQA: lambda: docqa(data, engine, top_k=3),
        QUOTATION: lambda: quotations(data, tokenizer, items, room),
        EDITS: lambda: edits(data, tokenizer, items),
        CODE: lambda: code_items(tokenizer, library_files(), items, room // 2),
        FREE: lambda: free(data, tokenizer, items),
    }
    collected = [
        item
        for name, make in makers.items()
        if not categories or name in categories
        for item in make()
    ]
    spec = data / "spec_bench" / "question_dev.jsonl"
    if not categories or set(categories) - set(makers):
        collected += [
            replace(item, category=POOLED.get(item.category, item.category))
            for item in items_of(read_turns(spec), tokenizer, engine.target.max_length)
        ]
    greedy = (DOCQA, QUOTATION, EDITS)
    collected = [
        item if item.category in greedy else replace(item, temperature=temperature)
        for item in collected
    ]
    groups = by_category(collected)
    return [
        item
        for name, group in groups.items()
        if not categories or name in categories
        for item in spread(group, items)
    ]


def spread(group: list[T], count: int) -> list[T]:
    """Return at most `count` entries of a list, spread evenly over it."""
    if len(group) <= count:
        return group
    return [group[i * len(group) // count] for i in range(count)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--draft-model", default="starter-draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", default="auto")
    parser.add_argument("--items", type=int, default=24, help="most prompts of a category")
    parser.add_argument("--store", type=Path, help="store of text to draft from")
    parser.add_argument("--history", type=Path, help="store of the model's own answers")
    parser.add_argument("--temperature", type=float, default=FREE_TEMPERATURE)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS))
    parser.add_argument("--categories", default="", help="comma-separated; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine.from_pretrained(
        options.model, "context", None, options.budget, options.device, options.dtype
    )
    draft = None
    if options.draft_model:
        draft = load_model(options.draft_model, options.device, options.dtype)[0]
    categories = [name for name in options.categories.split(",") if name]
    items = collect(options.data, engine, categories, options.items, options.temperature)
    sources = open_sources(
        options.store, options.history, tokenizer=engine.tokenizer, model=engine.model
    )
    names = options.variants.split(",")
    peer = copy.deepcopy(engine.model)
    variants = build_variants(names, engine, draft, lambda: peer, sources)
    grids = {
        name: peer_grid(name, peer, draft) if name in PEERS else {name: variant}
        for name, variant in variants.items()
    }
    rows = run_tuned(
        items, grids, repeats=options.repeats, on_progress=lambda line: print(line, flush=True)
    )
    facts = {"model": options.model, "dtype": str(engine.target.dtype), "items": options.items}
    facts["budget"] = options.budget
    show_results(rows, choose_baseline(variants), facts, options.json)


if __name__ == "__main__":
    main()
