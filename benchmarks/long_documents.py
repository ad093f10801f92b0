"""The next question over a long document: read again, saved in memory, or saved on disk.

    OMP_NUM_THREADS=1 python benchmarks/long_documents.py --data DIR --model smollm2 [--tokens 7000]

The script reads a part of each document in DIR/longdocs and asks a first question. Three variants
answer the next question in changing order: a prefill of the whole prompt, the KV cache in memory,
and a `LongDocument` opened from disk. The figures are seconds to the first token and to the end of
the answer (greedy, at most 64 tokens), medians over the documents.
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
VARIANTS = ("restart", "memory", "disk")


def timed(run: Callable[[Callable[[str], None]], Any]) -> tuple[float, float, Any]:
    """Return the seconds to the first text and to the end, and the result of `run`."""
    began, first = time.perf_counter(), list[float]()

    def on_text(piece: str) -> None:
        if not first:
            first.append(time.perf_counter() - began)

    tokens = run(on_text)
    return first[0] if first else float("nan"), time.perf_counter() - began, tokens


def measure(document: Document, engine: Engine, part: tuple[int, int], turn: int) -> dict[str, Any]:
    """Return the seconds of all variants for one document."""
    began = time.perf_counter()
    opened = LongDocument.open(document, engine, token_range=part)
    row: dict[str, Any] = {"document": document.name, "read": time.perf_counter() - began}
    row |= {"tokens": opened.tokens, "bytes": opened.bytes}
    opened.ask(FIRST, max_new_tokens=NEW_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        opened.save(Path(folder) / "memory")

        def restart(on_text: Callable[[str], None]) -> Any:
            prompt = opened.prompt(NEXT)
            stream = engine.stream(
                list(prompt.token_ids),
                max_new_tokens=NEW_TOKENS,
                stop=opened.template.stop,
                spans=prompt.spans,
                texts=prompt.layout,
            )
            for piece in stream:
                on_text(piece)
            return stream.result.tokens

        def memory(on_text: Callable[[str], None]) -> Any:
            return opened.ask(NEXT, max_new_tokens=NEW_TOKENS, stream=on_text).generation.tokens

        def disk(on_text: Callable[[str], None]) -> Any:
            again = LongDocument.open(Path(folder) / "memory", engine)
            return again.ask(NEXT, max_new_tokens=NEW_TOKENS, stream=on_text).generation.tokens

        variants = {"restart": restart, "memory": memory, "disk": disk}
        texts = []
        for name in VARIANTS[turn % 3 :] + VARIANTS[: turn % 3]:
            first, whole, tokens = timed(variants[name])
            row |= {f"{name}, first": first, f"{name}, whole": whole}
            texts.append(tokens)
    shortest = min(map(len, texts))  # ask() ends a text that loops
    row["equal"] = len({tuple(text[:shortest]) for text in texts}) == 1
    return row


def main() -> None:
    """Print a row for each document, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens to read of each document")
    parser.add_argument("--start", type=int, default=2000, help="first token to read")
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
        f"restart to {name}, {span}": median(
            r[f"restart, {span}"] / r[f"{name}, {span}"] for r in rows
        )
        for name in ("memory", "disk")
        for span in ("first", "whole")
    }
    print(json.dumps(ratios, indent=1))
    if inputs.json is not None:
        inputs.json.write_text(
            json.dumps({"rows": rows, "ratios": ratios}) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
