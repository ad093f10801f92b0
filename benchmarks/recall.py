"""Recall@k of dense, sparse and fused search over passages with gold ids.

The data folder holds passages.jsonl.gz {id, doc, text}, passage_docs.jsonl.gz {doc_id, title} and
queries.jsonl.gz {id, split, origin, question, gold}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.data import read_records

from ragspec.retrievers.search.dense import (
    DEFAULT_EMBEDDER,
    DenseIndex,
    StaticEmbedder,
    load_embedder,
)
from ragspec.retrievers.search.fusion import EQUAL, STATIC, Ranking, fuse_rankings
from ragspec.retrievers.search.passage_index import CANDIDATES
from ragspec.retrievers.search.sparse import SparseIndex

CUTS = (1, 5, 20)


def read_passages(folder: Path) -> tuple[list[str], list[str]]:
    """Return the ids of all passages and the texts to index (title, then text)."""
    documents = read_records(folder / "passage_docs.jsonl.gz")
    titles = {document["doc_id"]: document["title"] for document in documents}
    ids, texts = [], []
    for record in read_records(folder / "passages.jsonl.gz"):
        ids.append(record["id"])
        texts.append(f"{titles[record['doc']]}\n{record['text']}")
    return ids, texts


def recalls(
    rankings: dict[str, list[list[int]]], queries: list[dict[str, Any]], ids: list[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return recall by ranking, origin of the query (or "all") and cut."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, rows in rankings.items():
        hits: dict[str, list[list[bool]]] = defaultdict(list)
        for query, row in zip(queries, rows, strict=True):
            gold = set(query["gold"])
            right = [any(ids[number] in gold for number in row[:cut]) for cut in CUTS]
            for origin in (query["origin"], "all"):
                hits[origin].append(right)
        table[name] = {
            origin: {str(cut): sum(r[i] for r in rows) / len(rows) for i, cut in enumerate(CUTS)}
            for origin, rows in sorted(hits.items())
        }
    return table


def measure(folder: Path, split: str, embedder: str) -> dict[str, Any]:
    """Index all passages, search every query of a split, and return recalls and seconds."""
    queries = [
        query for query in read_records(folder / "queries.jsonl.gz") if query["split"] == split
    ]
    ids, texts = read_passages(folder)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    dense = DenseIndex.build(texts, load_embedder(embedder))
    seconds["embed"] = time.perf_counter() - start
    start = time.perf_counter()
    sparse = SparseIndex.build(texts, [text.partition("\n")[0] for text in texts])
    seconds["index_words"] = time.perf_counter() - start
    start = time.perf_counter()
    questions = [query["question"] for query in queries]
    by_dense = dense.search_vectors(dense.embed(questions), CANDIDATES)
    seconds["search_dense"] = time.perf_counter() - start
    start = time.perf_counter()
    by_sparse = [sparse.search(question, CANDIDATES) for question in questions]
    seconds["search_sparse"] = time.perf_counter() - start
    fusion = STATIC if isinstance(dense.embedder, StaticEmbedder) else EQUAL
    fused = [
        [number for number, _, _ in fuse_rankings({"dense": one, "sparse": other}, fusion)]
        for one, other in zip(by_dense, by_sparse, strict=True)
    ]
    rankings = {"dense": numbers(by_dense), "sparse": numbers(by_sparse), "fused": fused}
    return {
        "split": split,
        "embedder": embedder,
        "fusion": asdict(fusion),
        "passages": len(ids),
        "queries": len(queries),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "recall": recalls(rankings, queries, ids),
    }


def numbers(rankings: list[Ranking]) -> list[list[int]]:
    """Return the passage numbers of rankings."""
    return [[number for number, _ in ranking] for ranking in rankings]


def main() -> None:
    """Print the table; with --json also write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the passages")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER)
    parser.add_argument("--json", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    figures = measure(args.data, args.split, args.embedder)
    print(f"{figures['passages']} passages, {figures['queries']} {args.split} queries")
    print("seconds:", figures["seconds"])
    for name, origins in figures["recall"].items():
        for origin, cuts in origins.items():
            print(f"{name:7} {origin:6} " + "  ".join(f"@{k} {v:.3f}" for k, v in cuts.items()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
