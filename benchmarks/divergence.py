"""Where speculative text parts from plain text in low precision, and how close the choice was.

    python benchmarks/divergence.py --data DIR --dtype bfloat16

In float32 the count must be 0. In bf16 a forward over several positions rounds otherwise than over
one: each first difference is printed with the margin of the target's two best choices there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from text import docqa, spread

from ragspec.engine.engine import Engine
from ragspec.pipelines.cli.compare import compare, plain_engine
from ragspec.sampling.settings import Sampling


def main() -> None:
    """Compare every question about unseen documents and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--items", type=int, default=115)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine.from_pretrained("starter", dtype=options.dtype)
    plain = plain_engine(engine)
    margins = []
    items = spread(docqa(options.data, engine, top_k=3), options.items)
    for item in items:
        ids = list(item.prompt)
        fast = engine.generate(
            ids, max_new_tokens=item.new_tokens, spans=item.spans, texts=item.texts
        )
        slow = plain.generate(ids, max_new_tokens=item.new_tokens)
        found = compare(engine, fast, slow, Sampling())
        if found.first_divergence is not None:
            margins.append(found.first_divergence.margin)
            print(item.id, found.summary(), flush=True)
    result = {"dtype": options.dtype, "items": len(items), "margins": sorted(margins)}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
