"""A feature head over a saved document: with the states of what a question finds, and without.

    OMP_NUM_THREADS=1 python benchmarks/long_heads.py --data DIR --head HEAD [--tokens 6000]

Parts of the documents in DIR/longdocs, each read once. The questions are answered in ways that take
turns over what was kept: plainly, by `auto`, by the head alone, and by both; the head hears of the
question alone ("question") or of chunks of the document, too ("chunks"). Greedy. Figures: tokens a
forward; seconds of decoding, and of the whole answer, against plain decoding, by the median of the
ratios question by question, and their quartiles.
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
from ragspec.drafters.eagle.drafter import HeadDrafter
from ragspec.pipelines.long.document import LongDocument
from ragspec.retrievers import Document

QUESTIONS = (
    "What is this text about?",
    "Who or what is named first, and what happens then?",
    "What is the most important thing that the text says, and why?",
    "Which people or things does the text name, and how do they differ?",
    "How does the text end?",
)
PLAIN, AUTO = "plain", "auto"
WITHOUT: Mapping[str, Any] = {"known_states": ()}
WARM_UP = 8  # tokens
Ways = Mapping[str, tuple[Engine, Mapping[str, Any]]]


def make_ways(engine: Engine, head: Path, budget: int | None) -> dict[str, tuple[Engine, Any]]:
    """Return engines over one target, and options for each question.

    budget: nodes of the head's trees where it drafts alone; None: as it pays.
    """

    def over(drafter: Any, nodes: int | None = None) -> Engine:
        extra = {} if nodes is None else {"budget": nodes}
        return Engine(engine.target, engine.tokenizer, drafter, **extra)

    def instance() -> HeadDrafter:
        return HeadDrafter(head, engine.target)

    return {
        PLAIN: (over(None), {}),
        AUTO: (over(AUTO), {}),
        "head, question": (over(instance(), budget), WITHOUT),
        "head, chunks": (over(instance(), budget), {}),
        "auto and head, question": (over([AUTO, instance()]), WITHOUT),
        "auto and head, chunks": (over([AUTO, instance()]), {}),
    }


def measure(
    document: Document, ways: Ways, part: tuple[int, int], questions: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """Return a row for each question over one document."""
    reader = ways["head, chunks"][0]  # keeps states, too
    opened = LongDocument.open(document, reader, token_range=part)
    views = {name: (opened.over(engine), options) for name, (engine, options) in ways.items()}
    for view, options in views.values():
        view.ask(questions[0], max_new_tokens=WARM_UP, **options)
    rows, order = [], list(views)
    for number, question in enumerate(questions):
        row: dict[str, Any] = {"document": document.name, "tokens": opened.tokens}
        row |= {"question": question, "bytes": opened.bytes, "ways": {}}
        row["chunks"] = sum(
            end - start for start, end in opened.chunks.spans(question, opened.prefix)
        )
        texts = []
        for name in order[number % len(order) :] + order[: number % len(order)]:
            view, options = views[name]
            began = time.perf_counter()
            result = view.ask(question, max_new_tokens=tokens, **options)
            whole, report = time.perf_counter() - began, result.report
            texts.append(list(result.generation.tokens))
            row["ways"][name] = {
                "tokens": report.tokens,
                "forwards": len(result.generation.steps),
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
    """Return, for each way, what its questions came to."""
    record = {}
    for name in rows[0]["ways"]:
        current = [row["ways"][name] for row in rows]
        plain = [row["ways"][PLAIN] for row in rows]
        auto = [row["ways"][AUTO] for row in rows]
        faster = {
            what: [p[what] / o[what] for p, o in zip(plain, current, strict=True) if o[what] > 0]
            for what in ("decode", "whole")
        }
        against = [a["decode"] / o["decode"] for a, o in zip(auto, current, strict=True)]
        low, _, high = quantiles(faster["decode"], n=4)
        record[name] = {
            "tokens a forward": sum(o["tokens"] for o in current)
            / sum(o["forwards"] for o in current),
            "decode": median(faster["decode"]),
            "quartiles": [low, high],
            "whole": median(faster["whole"]),
            "against auto": median(against),
            "asked of the head": sum(o["head"] for o in current),
            "accepted of it": sum(o["accepted"] for o in current),
        }
    return record


def main() -> None:
    """Print a row for each question, and the figures of all ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=6000, help="that are read of each document")
    parser.add_argument("--start", type=int, default=2000, help="first token that is read")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, help="nodes of the head's trees where it is alone")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(inputs.model, None, dtype=inputs.dtype)
    ways = make_ways(engine, inputs.head, inputs.budget)
    rows: list[dict[str, Any]] = []
    for document in list(long_documents(inputs.data).values())[: inputs.documents]:
        part = (inputs.start, inputs.start + inputs.tokens)
        request = QUESTIONS[: inputs.questions]
        rows += measure(document, ways, part, request, inputs.new_tokens)
        if inputs.json is not None:
            known = {"rows": rows, "figures": figures(rows)}
            inputs.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures(rows), indent=1))
    print(f"{sum(row['equal'] for row in rows)} of {len(rows)} answers are equal in all ways")


if __name__ == "__main__":
    main()
