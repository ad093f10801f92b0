"""Where speculative text parts from plain text in low precision, and what the same bits cost.

    python benchmarks/divergence.py --data DIR --dtype bfloat16 --widths 0,4,8,16

In float32 the count must be 0. In bf16 a forward over several positions rounds otherwise than over
one: each first difference is printed with the margin of the target's two best choices there. A
width above 0 is that of a `ConstantWidthTarget`, whose count must be 0 in any dtype; the price is
the time of its plain decoding, and of its speculative one, against those of the model as it is,
medians of per-prompt ratios, all ways interleaved.
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

LOOPING = 0.2


def main() -> None:
    """Decode every question plainly and with drafts, at every width, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="context")
    parser.add_argument("--items", type=int, default=115)
    parser.add_argument("--widths", default="0", help="0 is the model as it is")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    pairs = {
        width: _pair(model, tokenizer, width, options.drafter)
        for width in map(int, options.widths.split(","))
    }
    engine = next(iter(pairs.values()))[0]
    items = spread(docqa(options.data, engine, top_k=3), options.items)
    rows = list(_rows(pairs, items))
    result = {"model": options.model, "dtype": options.dtype, "items": len(items), "rows": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result), encoding="utf-8")


def _pair(model: Any, tokenizer: Any, width: int, drafter: str) -> tuple[Engine, Engine]:
    target = ConstantWidthTarget(model, width) if width else model
    engine = Engine(target, tokenizer, drafter=drafter, batch_size=1)
    return engine, plain_engine(engine)


def _rows(
    pairs: dict[int, tuple[Engine, Engine]], items: Sequence[BenchItem]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each width; seconds are those of decoding."""
    margins: dict[int, list[float]] = {width: [] for width in pairs}
    seconds: dict[tuple[int, int], list[float]] = {}
    selected = []
    for item in items:
        ids, options = list(item.prompt), {"max_new_tokens": item.new_tokens, "ignore_eos": True}
        for width, (fast, plain) in pairs.items():
            ours = fast.generate(ids, spans=item.spans, texts=item.texts, **options)
            theirs = plain.generate(ids, **options)
            for direction, result in enumerate((theirs, ours)):
                seconds.setdefault((width, direction), []).append(result.report.decode_seconds)
            parted = compare(fast, ours, theirs, Sampling()).first_divergence
            if parted is not None:
                margins[width].append(parted.margin)
                print(f"{item.id} at width {width}: token {parted.index}, {parted.margin:.3g}")
        selected.append(loop_share(theirs.tokens) <= LOOPING)
    first = next(iter(pairs))
    for width, (fast, _) in pairs.items():
        plain_price, fast_price = (
            median(
                mine / base
                for mine, base, good in zip(
                    seconds[width, variant], seconds[first, variant], selected, strict=True
                )
                if good or not any(selected)
            )
            for variant in (0, 1)
        )
        gain = median(a / b for a, b in zip(seconds[width, 0], seconds[width, 1], strict=True))
        yield {
            "width": width,
            "label": fast.generate([1, 2, 3], max_new_tokens=1).label,
            "parted": len(margins[width]),
            "margins": sorted(margins[width]),
            "plain_seconds": round(plain_price, 3),
            "speculative_seconds": round(fast_price, 3),
            "speed_up": round(gain, 3),
            "timed": sum(selected),
        }


if __name__ == "__main__":
    main()
