"""The next question over a long document: read anew, kept in memory, and kept on disk.

    OMP_NUM_THREADS=1 python benchmarks/long_documents.py --data DIR --model smollm2 [--tokens 7000]

Parts of the documents in DIR/longdocs. Each document is read, asked a first question, and then the
next one in three ways that take turns: its prompt read anew by the same engine, from the keys that
are kept, and by a `LongDocument` that is opened from disk for it. Seconds to the first token and to
the end of the answer (greedy, at most 64 tokens); medians over the documents.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.data import long_documents

from ragspec import Engine
from ragspec.pipelines import LongDocument
from ragspec.retrievers import Document

FIRST, NEXT = "What is this text about?", "Who or what is named first, and what happens then?"
NEW_TOKENS = 64
WAYS = ("restart", "memory", "disk")


def timed(run: Callable[[Callable[[str], None]], Any]) -> tuple[float, float, Any]:
    """Return the seconds to the first piece of text and to the end, and what came of it."""
    began, first = time.perf_counter(), list[float]()

    def take(piece: str) -> None:
        if not first:
            first.append(time.perf_counter() - began)

    result = run(take)
    return first[0] if first else float("nan"), time.perf_counter() - began, result


def measure(document: Document, engine: Engine, part: tuple[int, int], turn: int) -> dict[str, Any]:
    """Return the seconds of all ways for one document."""
    began = time.perf_counter()
    opened = LongDocument.open(document, engine, token_range=part)
    row: dict[str, Any] = {"document": document.name, "read": time.perf_counter() - began}
    row |= {"tokens": opened.tokens, "bytes": opened.bytes}
    opened.ask(FIRST, max_new_tokens=NEW_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        opened.save(Path(folder) / "memory")

        def restart(take: Callable[[str], None]) -> Any:
            instance = opened.prompt(NEXT)
            stream = engine.stream(
                list(instance.token_ids),
                max_new_tokens=NEW_TOKENS,
                stop=opened.template.stop,
                spans=instance.spans,
                texts=instance.layout,
            )
            for piece in stream:
                take(piece)
            return stream.result.tokens

        def selected(take: Callable[[str], None]) -> Any:
            return opened.ask(NEXT, max_new_tokens=NEW_TOKENS, stream=take).generation.tokens

        def disk(take: Callable[[str], None]) -> Any:
            again = LongDocument.open(Path(folder) / "memory", engine)
            return again.ask(NEXT, max_new_tokens=NEW_TOKENS, stream=take).generation.tokens

        ways = {"restart": restart, "memory": selected, "disk": disk}
        texts = []
        for name in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            first, whole, written = timed(ways[name])
            row |= {f"{name}, first": first, f"{name}, whole": whole}
            texts.append(written)
    shortest = min(map(len, texts))  # a text that repeats itself is ended by ask()
    row["equal"] = len({tuple(text[:shortest]) for text in texts}) == 1
    return row


def main() -> None:
    """Print a row for each document, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--start", type=int, default=2000, help="first token that is read")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(inputs.model, dtype=inputs.dtype)
    rows, books = [], list(long_documents(inputs.data).values())
    for turn, document in enumerate(books[: inputs.documents]):
        part = (inputs.start, inputs.start + inputs.tokens)
        rows.append(measure(document, engine, part, turn))
        print(json.dumps(rows[-1]), flush=True)
    ratios = {
        f"restart to {name}, {what}": median(
            r[f"restart, {what}"] / r[f"{name}, {what}"] for r in rows
        )
        for name in ("memory", "disk")
        for what in ("first", "whole")
    }
    print(json.dumps(ratios, indent=1))
    if inputs.json is not None:
        inputs.json.write_text(
            json.dumps({"rows": rows, "ratios": ratios}) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
