"""Exact search among many vectors: one query and a batch, beside faiss and one matrix product.

    OMP_NUM_THREADS=1 python benchmarks/search.py [--vectors 1000000] [--json FILE]

Random unit vectors with a common component, as in embeddings (224 wide, k = 20). All variants are
interleaved. The figures are medians of wall time and of processor time, which other work disturbs
less. The 8-bit copy is built first. The product is an earlier `DenseIndex.search`: queries times
vectors, transposed, and the k largest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ragspec.retrievers.search.dense import DenseIndex

WIDTH, K, BATCH = 224, 20, 8


def vectors(count: int, seed: int) -> Any:
    """Return unit vectors f32 [count, WIDTH]."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, WIDTH, generator=generator) + 0.8
    return torch.nn.functional.normalize(raw, dim=-1).numpy()


def make_variants(stored: Any, queries: Any) -> dict[str, Callable[[], Any]]:
    """Return the searches to time by name."""
    embedder: Any = None
    index, matrix = DenseIndex(stored, embedder), torch.from_numpy(stored)
    index.search_vectors(queries[:1], K)

    def product(count: int) -> Any:
        return (torch.from_numpy(queries[:count]) @ matrix.T).topk(K, dim=1)

    searches: dict[str, Callable[[], Any]] = {
        "ours, 1": lambda: index.search_vectors(queries[:1], K),
        "ours, 8": lambda: index.search_vectors(queries, K),
        "product, 1": lambda: product(1),
        "product, 8": lambda: product(BATCH),
    }
    try:
        import faiss
    except ImportError:
        return searches
    faiss.omp_set_num_threads(torch.get_num_threads())
    flat = faiss.IndexFlatIP(WIDTH)
    flat.add(stored)
    return searches | {
        "faiss flat, 1": lambda: flat.search(queries[:1], K),
        "faiss flat, 8": lambda: flat.search(queries, K),
    }


def figures(spent: dict[str, list[float]]) -> dict[str, float]:
    """Return medians of all rounds but the first, and ratios within a round."""
    rows = {name: round(median(times[1:]), 2) for name, times in spent.items()}
    for this, other, times in (("ours, 8", "ours, 1", 8), ("ours, 1", "product, 1", 1)):
        rounds = zip(spent[other][1:], spent[this][1:], strict=True)
        name = f"{times} x {other} / {this}" if times > 1 else f"{other} / {this}"
        rows[name] = round(median(times * a / b for a, b in rounds), 2)
    return rows


def main() -> None:
    """Time all searches and print medians in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=9, help="timed rounds")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    stored, queries = vectors(inputs.vectors, 0), vectors(BATCH, 1)
    searches = make_variants(stored, queries)
    clocks = {"wall": time.perf_counter, "processor": time.process_time}
    spent: dict[str, defaultdict[str, list[float]]] = {on: defaultdict(list) for on in clocks}
    for _ in range(inputs.turns + 1):
        for name, search in searches.items():
            began = {on: clock() for on, clock in clocks.items()}
            search()
            for on, clock in clocks.items():
                spent[on][name].append(1000.0 * (clock() - began[on]))
    rows = {on: figures(times) for on, times in spent.items()}
    print(json.dumps({"vectors": inputs.vectors, "milliseconds": rows}, indent=1))
    if inputs.json is not None:
        inputs.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    assert all(np.isfinite(list(times.values())).all() for times in rows.values())


if __name__ == "__main__":
    main()
