"""The divergence of speculative from plain text in low precision, and the cost of equal bits.

    python benchmarks/divergence.py --data DIR --dtype bfloat16 --widths 0,4,8,16

In float32 no text may diverge. In bf16 a forward over several positions rounds otherwise than over
one. Each first difference is printed with the margin of the target's two best choices. A width
above 0 is that of a `ConstantWidthTarget`, which may not diverge in any dtype. Its cost is the time
of plain and of speculative decoding by that of the first width, medians of per-prompt ratios, all
variants interleaved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.constant_width import ConstantWidthTarget
from text import docqa, spread

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.cli.compare import compare, plain_engine
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
    parser.add_argument(
        "--widths", default="0", help="widths, comma-separated; 0 is the unchanged model"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    pairs = {
        width: _build_engines(model, tokenizer, width, options.drafter)
        for width in map(int, options.widths.split(","))
    }
    engine = next(iter(pairs.values()))[0]
    items = spread(docqa(options.data, engine, top_k=3), options.items)
    rows = list(_rows(pairs, items))
    figures = {"model": options.model, "dtype": options.dtype, "items": len(items), "rows": rows}
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


def _build_engines(model: Any, tokenizer: Any, width: int, drafter: str) -> tuple[Engine, Engine]:
    target = ConstantWidthTarget(model, width) if width else model
    engine = Engine(target, tokenizer, drafter=drafter, batch_size=1)
    return engine, plain_engine(engine)


def _rows(
    pairs: dict[int, tuple[Engine, Engine]], items: Sequence[BenchItem]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each width; seconds are decode seconds."""
    margins: dict[int, list[float]] = {width: [] for width in pairs}
    seconds: dict[tuple[int, int], list[float]] = {}
    is_timed = []
    for item in items:
        ids = list(item.prompt)
        options: dict[str, Any] = {"max_new_tokens": item.new_tokens, "ignore_eos": True}
        for width, (fast, plain) in pairs.items():
            ours = fast.generate(ids, spans=item.spans, texts=item.texts, **options)
            theirs = plain.generate(ids, **options)
            for variant, generation in enumerate((theirs, ours)):
                times = seconds.setdefault((width, variant), [])
                times.append(generation.report.decode_seconds)
            divergence = compare(fast, ours, theirs, Sampling()).first_divergence
            if divergence is not None:
                margins[width].append(divergence.margin)
                print(
                    f"{item.id} at width {width}: token {divergence.index}, {divergence.margin:.3g}"
                )
        is_timed.append(loop_share(theirs.tokens) <= MAX_LOOP_SHARE)
    first = next(iter(pairs))
    for width, (fast, _) in pairs.items():
        plain_cost, fast_cost = (
            median(
                mine / base
                for mine, base, good in zip(
                    seconds[width, variant], seconds[first, variant], is_timed, strict=True
                )
                if good or not any(is_timed)
            )
            for variant in (0, 1)
        )
        gain = median(a / b for a, b in zip(seconds[width, 0], seconds[width, 1], strict=True))
        yield {
            "width": width,
            "label": fast.generate([1, 2, 3], max_new_tokens=1).label,
            "diverged": len(margins[width]),
            "margins": sorted(margins[width]),
            "plain_seconds": round(plain_cost, 3),
            "speculative_seconds": round(fast_cost, 3),
            "speedup": round(gain, 3),
            "timed": sum(is_timed),
        }


if __name__ == "__main__":
    main()
