"""The divergence of speculative from plain text in low precision.

    python benchmarks/divergence.py --data DIR --dtype bfloat16

In float32 no text may diverge. In bf16 a forward over several positions rounds otherwise than over
one. Each first difference is printed with the margin of the target's two best choices. The speedup
is the median of per-prompt ratios, both engines interleaved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from text import docqa, spread

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.cli.show import compare
from ragspec.reports.report import loop_share
from ragspec.sampling.settings import Sampling

MAX_LOOP_SHARE = 0.2


def main() -> None:
    """Decode every question plainly and with drafts at every width; print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="context")
    parser.add_argument("--items", type=int, default=115)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    engine = Engine(model, tokenizer, drafter=options.drafter, max_batch_size=1)
    items = spread(docqa(options.data, engine, top_k=3), options.items)
    figures = measure(engine, items)
    figures |= {"model": options.model, "dtype": options.dtype, "items": len(items)}
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


def measure(fast: Engine, items: Sequence[BenchItem]) -> dict[str, Any]:
    """Return the differences of an engine from plain decoding, and its speedup."""
    plain = fast.with_drafter(None).with_limits(1)  # with another prefix cache
    margins, ratios = list[float](), list[float]()
    for item in items:
        ids = list(item.prompt)
        options: dict[str, Any] = {"max_new_tokens": item.new_tokens, "ignore_eos": True}
        theirs = plain.generate(ids, **options)
        ours = fast.generate(ids, spans=item.spans, texts=item.texts, **options)
        divergence = compare(fast, ours, theirs, Sampling()).first_divergence
        if divergence is not None:
            margins.append(divergence.margin)
            print(f"{item.id}: token {divergence.index}, {divergence.margin:.3g}")
        if loop_share(theirs.tokens) <= MAX_LOOP_SHARE:
            ratios.append(theirs.report.decode_seconds / ours.report.decode_seconds)
    return {
        "label": fast.generate([1, 2, 3], max_new_tokens=1).label,
        "diverged": len(margins),
        "margins": sorted(margins),
        "speedup": round(median(ratios), 3) if ratios else None,
        "timed": len(ratios),
    }


if __name__ == "__main__":
    main()
