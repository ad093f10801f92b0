"""Text decoding against transformers, on evaluation data that is not part of the project.

    python benchmarks/text.py --data DIR --json results.json

DIR holds docqa/documents.jsonl.gz, docqa/items.jsonl, spec_bench/*.jsonl and lm/valid.jsonl.gz.
Prompts of "docqa" are built by DocQA's own search over all documents; the other categories write a
fixed number of new tokens. See `ragspec.pipelines.bench` for how runs are compared.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ragspec.engine import Engine
from ragspec.loading import load_model
from ragspec.pipelines.bench import run_benchmark, write_json
from ragspec.pipelines.bench_data import (
    BenchItem,
    by_category,
    docqa_items,
    free_items,
    read_items,
)
from ragspec.pipelines.bench_modes import MODES, build_modes
from ragspec.pipelines.bench_table import make_table
from ragspec.pipelines.docqa import DocQA
from ragspec.retrievers.documents import Document
from ragspec.retrievers.index import PassageIndex


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def docqa(data: Path, engine: Engine, top_k: int) -> list[BenchItem]:
    """Return the questions about documents that the starter models never saw."""
    documents = [
        Document(name=row["doc_id"], title=row["title"], text=row["text"])
        for row in read_lines(data / "docqa" / "documents.jsonl.gz")
    ]
    qa = DocQA(PassageIndex.build(documents), engine=engine)
    items = [r for r in read_lines(data / "docqa" / "items.jsonl") if r["split"] == "valid"]
    return docqa_items(qa, [(row["id"], row["question"]) for row in items], top_k)


def free(data: Path, tokenizer: Any, count: int) -> list[BenchItem]:
    """Return beginnings of unseen documentation and books, spread over the file."""
    rows = [
        row for row in read_lines(data / "lm" / "valid.jsonl.gz") if row["kind"] in ("docs", "book")
    ]
    step = max(1, len(rows) // count)
    return free_items(tokenizer, [(row["id"], row["text"]) for row in rows[::step]])[:count]


def collect(data: Path, engine: Engine, wanted: list[str], items: int) -> list[BenchItem]:
    """Return at most `items` prompts of each category that was asked for, all without a list."""
    found: list[BenchItem] = []
    if not wanted or "docqa" in wanted:
        found += docqa(data, engine, top_k=3)
    if not wanted or "free" in wanted:
        found += free(data, engine.tokenizer, items)
    spec = data / "spec_bench" / "question_dev.jsonl"
    found += read_items(spec, engine.tokenizer, engine.target.max_length)
    groups = by_category(found)
    return [
        item
        for name, group in groups.items()
        if not wanted or name in wanted
        for item in spread(group, items)
    ]


def spread(group: list[BenchItem], count: int) -> list[BenchItem]:
    """Return `count` items spread evenly over a group."""
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
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--categories", default="", help="comma-separated; all without it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine.from_pretrained(
        options.model, "context", None, options.budget, options.device, options.dtype
    )
    draft = load_model(options.draft_model, options.device, options.dtype)[0]
    wanted = [name for name in options.categories.split(",") if name]
    items = collect(options.data, engine, wanted, options.items)
    modes = build_modes(
        options.modes.split(","), engine, draft, lambda: copy.deepcopy(engine.model)
    )
    result = run_benchmark(
        items, modes, repeats=options.repeats, progress=lambda line: print(line, flush=True)
    )
    rows = result.rows()
    Console(width=140).print(make_table(rows, "hf-greedy"))
    if options.json:
        facts = {"model": options.model, "dtype": str(engine.target.dtype), "items": options.items}
        write_json(options.json, rows, facts)


if __name__ == "__main__":
    main()
