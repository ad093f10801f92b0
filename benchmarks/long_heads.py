"""A draft head over a saved document.

    OMP_NUM_THREADS=1 python benchmarks/long_heads.py --data DIR --head HEAD [--tokens 6000]

The script reads a part of each document in DIR/longdocs once. All variants answer each question
over its KV cache in changing order: plain, `auto`, the head alone, and both. Decoding is greedy.
The figures are tokens a forward, and the speedups over plain decoding, of decoding and of the whole
answer: medians of the ratios of questions, and quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from harness.data import long_documents

from ragspec import Engine
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.pipelines.answering.long_document import LongDocument
from ragspec.retrievers import Document

QUESTIONS = (
    "What is this text about?",
    "Who or what is named first, and what happens then?",
    "What is the most important thing that the text says, and why?",
    "Which people or things does the text name, and how do they differ?",
    "How does the text end?",
)
PLAIN, AUTO = "plain", "auto"
WARM_UP = 8  # tokens


def make_variants(engine: Engine, head: Path, budget: int | None) -> dict[str, Engine]:
    """Return engines over one target.

    Args:
        engine: Engine of the target.
        head: Folder of the head.
        budget: Nodes of the head's trees if it drafts alone; None for the default.
    """

    def over(drafter: Any, nodes: int | None = None) -> Engine:
        extra: dict[str, Any] = {} if nodes is None else {"budget": nodes}
        return Engine(engine.target, engine.tokenizer, drafter, **extra)

    def head_drafter() -> HeadDrafter:
        return HeadDrafter(head, engine.target)

    return {
        PLAIN: over(None),
        AUTO: over(AUTO),
        "head": over(head_drafter(), budget),
        "auto and head": over([AUTO, head_drafter()]),
    }


def measure(
    document: Document,
    variants: Mapping[str, Engine],
    part: tuple[int, int],
    questions: Sequence[str],
    tokens: int,
) -> list[dict[str, Any]]:
    """Return a row for each question over one document."""
    opened = LongDocument.open(document, variants[PLAIN], token_range=part)
    views = {name: opened.over(engine) for name, engine in variants.items()}
    for view in views.values():
        view.ask(questions[0], max_new_tokens=WARM_UP)
    rows, order = [], list(views)
    for number, question in enumerate(questions):
        row: dict[str, Any] = {"document": document.name, "tokens": opened.tokens}
        row |= {"question": question, "bytes": opened.bytes, "variants": {}}
        texts = []
        for name in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            answer = views[name].ask(question, max_new_tokens=tokens)
            whole, report = time.perf_counter() - began, answer.report
            texts.append(list(answer.generation.tokens))
            row["variants"][name] = {
                "tokens": report.tokens,
                "forwards": len(answer.generation.steps),
                "decode": report.decode_seconds,
                "whole": whole,
                "head": report.drafted_by_source.get("head", 0),
                "accepted": report.accepted_by_source.get("head", 0),
            }
        row["equal"] = all(text == texts[0] for text in texts)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each variant over all questions."""
    summary = {}
    for name in rows[0]["variants"]:
        answers = [row["variants"][name] for row in rows]
        plain = [row["variants"][PLAIN] for row in rows]
        auto = [row["variants"][AUTO] for row in rows]
        faster = {
            what: [p[what] / o[what] for p, o in zip(plain, answers, strict=True) if o[what] > 0]
            for what in ("decode", "whole")
        }
        against = [a["decode"] / o["decode"] for a, o in zip(auto, answers, strict=True)]
        low, _, high = quantiles(faster["decode"], n=4)
        summary[name] = {
            "tokens a forward": sum(o["tokens"] for o in answers)
            / sum(o["forwards"] for o in answers),
            "decode": median(faster["decode"]),
            "quartiles": [low, high],
            "whole": median(faster["whole"]),
            "against auto": median(against),
            "drafted by the head": sum(o["head"] for o in answers),
            "accepted from the head": sum(o["accepted"] for o in answers),
        }
    return summary


def main() -> None:
    """Print a row for each question, and the figures of all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens to read of each document")
    parser.add_argument("--start", type=int, default=2000, help="first token to read")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, help="nodes of the head's trees if it drafts alone")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(inputs.model, None, dtype=inputs.dtype)
    variants = make_variants(engine, inputs.head, inputs.budget)
    rows: list[dict[str, Any]] = []
    for document in list(long_documents(inputs.data).values())[: inputs.documents]:
        part = (inputs.start, inputs.start + inputs.tokens)
        questions = QUESTIONS[: inputs.questions]
        rows += measure(document, variants, part, questions, inputs.new_tokens)
        if inputs.json is not None:
            contents = {"rows": rows, "figures": figures(rows)}
            inputs.json.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures(rows), indent=1))
    print(f"{sum(row['equal'] for row in rows)} of {len(rows)} answers are equal in all variants")


if __name__ == "__main__":
    main()
