"""Text decoding against transformers, on evaluation data that is not part of the project.

    python benchmarks/text.py --data DIR --json results.json

DIR holds docqa/documents.jsonl.gz, docqa/items.jsonl, longdocs/, spec_bench/question_dev.jsonl and
lm/valid.jsonl.gz. Categories: docqa (prompts by DocQA's own search over all documents), quotation
(from a long document, of which the prompt holds about 1,500 tokens), edits (a text again, with one
word changed), code (functions of the interpreter's own library, cut in the middle), Spec-Bench's
summarization, rag, qa, math, translation and chat (MT-Bench's categories together), and free text.
All but docqa and edits write a fixed number of new tokens; code and Spec-Bench are sampled, as free
text is, since small models loop when greedy (--temperature 0 for large ones). See
`pipelines.bench.measure` for how runs are compared. Of transformers' modes a small grid of settings
is tried over the first prompts of each category, and the fastest is kept.
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
from rich.console import Console

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.bench.measure import by_category, choose_baseline
from ragspec.pipelines.bench.prompts import (
    DOCQA,
    FIXED_NEW_TOKENS,
    FREE,
    FREE_TEMPERATURE,
    BenchItem,
    docqa_items,
    free_items,
    read_items,
)
from ragspec.pipelines.bench.results import make_table, write_json
from ragspec.pipelines.bench.variants import DEFAULT_VARIANTS, PEERS, build_variants
from ragspec.pipelines.docqa.docqa import DocQA
from ragspec.pipelines.methods import open_sources
from ragspec.retrievers.search.passage_index import PassageIndex

T = TypeVar("T")
AROUND = 120  # tokens of a quotation's prompt that are not the document's
# MT-Bench's eight categories count as one, and Spec-Bench's own name for one is long.
POOLED = {
    "math_reasoning": "math",
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        "chat",
    ),
}


def docqa(data: Path, engine: Engine, top_k: int) -> list[BenchItem]:
    """Return the questions about documents that the starter models never saw."""
    documents = docqa_documents(data)
    qa = DocQA(PassageIndex.build(list(documents.values())), engine=engine)
    items = [r for r in read_records(data / "docqa" / "items.jsonl") if r["split"] == "valid"]
    return docqa_items(qa, [(row["id"], row["question"]) for row in items], top_k)


def free(data: Path, tokenizer: Any, count: int) -> list[BenchItem]:
    """Return beginnings of unseen documentation and books, spread over the file."""
    rows = [
        row
        for row in read_records(data / "lm" / "valid.jsonl.gz")
        if row["kind"] in ("docs", "book")
    ]
    step = max(1, len(rows) // count)
    return free_items(tokenizer, [(row["id"], row["text"]) for row in rows[::step]])[:count]


def edits(data: Path, tokenizer: Any, count: int) -> list[BenchItem]:
    """Return pieces of unseen documentation to be written again with a word changed."""
    rows = [row for row in read_records(data / "lm" / "valid.jsonl.gz") if row["kind"] == "docs"]
    step = max(1, len(rows) // (2 * count))  # not every piece has a word to change
    return edit_items(tokenizer, [(row["id"], row["text"]) for row in rows[::step]], count)


def quote_tasks(data: Path) -> list[tuple[str, QuoteTask]]:
    """Return (name of the document, what to quote from it)."""
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
    data: Path, engine: Engine, selection: list[str], items: int, temperature: float
) -> list[BenchItem]:
    """Return at most `items` prompts of each category that was asked for, all without a list."""
    tokenizer = engine.tokenizer
    room = CONTEXT_TOKENS
    if engine.target.max_length is not None:
        room = min(room, engine.target.max_length - FIXED_NEW_TOKENS - AROUND)
    makers = {
        DOCQA: lambda: docqa(data, engine, top_k=3),
        QUOTATION: lambda: quotations(data, tokenizer, items, room),
        EDITS: lambda: edits(data, tokenizer, items),
        CODE: lambda: code_items(tokenizer, library_files(), items, room // 2),
        FREE: lambda: free(data, tokenizer, items),
    }
    results = [
        item
        for name, make in makers.items()
        if not selection or name in selection
        for item in make()
    ]
    spec = data / "spec_bench" / "question_dev.jsonl"
    if not selection or set(selection) - set(makers):
        results += [
            replace(item, category=POOLED.get(item.category, item.category))
            for item in read_items(spec, tokenizer, engine.target.max_length)
        ]
    greedy = (DOCQA, QUOTATION, EDITS)
    results = [
        item if item.category in greedy else replace(item, temperature=temperature)
        for item in results
    ]
    groups = by_category(results)
    return [
        item
        for name, group in groups.items()
        if not selection or name in selection
        for item in spread(group, items)
    ]


def spread(group: list[T], count: int) -> list[T]:
    """Return `count` of a list, spread evenly over it."""
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
    parser.add_argument("--items", type=int, default=24, help="prompts a category")
    parser.add_argument("--store", type=Path, help="a store of text to draft from")
    parser.add_argument("--history", type=Path, help="a store of the model's own answers")
    parser.add_argument("--temperature", type=float, default=FREE_TEMPERATURE)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--modes", default=",".join(DEFAULT_VARIANTS))
    parser.add_argument("--categories", default="", help="comma-separated; all without it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine.from_pretrained(
        options.model, "context", None, options.budget, options.device, options.dtype
    )
    draft = None
    if options.draft_model:
        draft = load_model(options.draft_model, options.device, options.dtype)[0]
    selection = [name for name in options.categories.split(",") if name]
    items = collect(options.data, engine, selection, options.items, options.temperature)
    sources = open_sources(
        options.store, options.history, tokenizer=engine.tokenizer, model=engine.model
    )
    names = options.modes.split(",")
    peer = copy.deepcopy(engine.model)
    modes = build_variants(names, engine, draft, lambda: peer, sources)
    grids = {
        name: peer_grid(name, peer, draft) if name in PEERS else {name: variant}
        for name, variant in modes.items()
    }
    rows = run_tuned(
        items, grids, repeats=options.repeats, on_progress=lambda line: print(line, flush=True)
    )
    Console(width=140).print(make_table(rows, choose_baseline(modes)))
    if options.json:
        facts = {"model": options.model, "dtype": str(engine.target.dtype), "items": options.items}
        facts["budget"] = options.budget
        write_json(options.json, rows, facts)


if __name__ == "__main__":
    main()
