"""Text on an accelerator beside transformers: drafters with steps of fixed shape on and off.

    python benchmarks/gpu_text.py [--model starter] [--draft-model starter-draft] [--data FILE]
        [--drafters plain,context,model] [--modes off,graph] [--items 4] [--json FILE]

Rows are `NAME mode`, all taking turns on the same prompts in one run; ratios are decode seconds
against transformers' greedy decoding. DATA has rows of Spec-Bench or {id, category, prompt}; the
bundled prompts without it. On a CPU the modes are off and eager, to test the script.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ragspec.drafters.method import Sources
from ragspec.engine.engine import Engine
from ragspec.models.device import is_cuda, pick_device
from ragspec.models.load import load_model
from ragspec.pipelines.bench.measure import (
    GREEDY,
    LOOKUP,
    Variant,
    by_category,
    run_benchmark,
    show_results,
)
from ragspec.pipelines.bench.prompts import bundled_items, items_of, read_turns
from ragspec.pipelines.bench.variants import make_engine, make_peer, run_engine
from ragspec.verification.open import open_target


def main() -> None:
    """Measure every drafter in every mode and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--draft-model", default="starter-draft", help="'' for none")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--drafters", default="plain,context,model")
    parser.add_argument("--modes", help="default: off,graph on CUDA, else off,eager")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--items", type=int, default=4, help="of each category")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = pick_device("auto")
    modes = (options.modes or ("off,graph" if is_cuda(device) else "off,eager")).split(",")
    model, tokenizer = load_model(options.model, device, options.dtype)
    drafting = None
    if options.draft_model:
        drafting, _ = load_model(options.draft_model, device, options.dtype)
    sources = Sources(draft_model=drafting)
    peer, _ = load_model(options.model, device, options.dtype)
    variants: dict[str, Variant] = {name: make_peer(name, peer, None) for name in (GREEDY, LOOKUP)}
    engines = [Engine(open_target(model, mode, runtime="torch"), tokenizer, None) for mode in modes]
    for mode, engine in zip(modes, engines, strict=True):
        if engine.target.static != mode:
            print(f"{mode}: steps run as {engine.target.static!r} ({engine.target.refusal})")
        for name in options.drafters.split(","):
            if name != "model" or drafting is not None:
                variants[f"{name} {mode}"] = partial(run_engine, make_engine(name, engine, sources))
    limit = engines[0].target.max_length
    items = bundled_items(engines[0])
    if options.data:
        items = items_of(read_turns(options.data), tokenizer, limit)
    few = [item for group in by_category(items).values() for item in group[: options.items]]
    rows = run_benchmark(
        few, variants, repeats=options.repeats, on_progress=lambda line: print(line, flush=True)
    )
    facts = {"model": options.model, "device": str(device), "dtype": str(model.dtype)}
    show_results(rows, GREEDY, facts, options.json)


if __name__ == "__main__":
    main()
