"""A search for the fastest settings of transformers' modes in each category."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragspec.pipelines.bench.measure import (
    ASSISTANT,
    LOOKUP,
    BenchRow,
    Variant,
    by_category,
    run_benchmark,
)
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.bench.variants import make_peer

DRAFT_LENGTHS = (5, 10, 20)
NGRAMS = (2, 3)
CONFIDENCES = (0.0, 0.4)  # thresholds that end an assistant's draft; transformers' default is 0.4
TUNING_ITEMS = 4


def peer_grid(name: str, model: Any, draft_model: Any) -> dict[str, Variant]:
    """Return the settings to try of a peer, by their names.

    Args:
        name: hf-greedy, hf-lookup or hf-assistant.
        model: A copy of the target.
        draft_model: The assistant; the others need none.
    """
    grid: dict[str, Variant] = {}
    if name == LOOKUP:
        for tokens in DRAFT_LENGTHS:
            for ngram in NGRAMS:
                peer = make_peer(f"{name}@{tokens}", model, None, max_matching_ngram_size=ngram)
                grid[f"{name}:{tokens}:{ngram}"] = peer
    elif name == ASSISTANT:
        for tokens in DRAFT_LENGTHS:
            for confidence in CONFIDENCES:
                peer = make_peer(f"{name}@{tokens}", model, draft_model)
                config = peer.keywords["assistant_model"].generation_config
                config.assistant_confidence_threshold = confidence
                grid[f"{name}:{tokens}:{confidence:g}"] = peer
    else:
        grid[name] = make_peer(name, model, draft_model)
    return grid


def fastest(grid: Mapping[str, Variant], items: Sequence[BenchItem]) -> str:
    """Return the setting with the least time over the first items of a category."""
    if len(grid) == 1:
        return next(iter(grid))
    seconds = dict.fromkeys(grid, 0.0)
    for item in items[:TUNING_ITEMS]:
        for name, variant in grid.items():
            seconds[name] += variant(item, item.new_tokens).seconds
    return min(seconds, key=seconds.__getitem__)


def run_tuned(
    items: Sequence[BenchItem],
    variants: Mapping[str, Mapping[str, Variant]],
    *,
    repeats: int = 1,
    on_progress: Callable[[str], None] = lambda line: None,
) -> list[BenchRow]:
    """Run the benchmark category by category, each variant with its fastest setting.

    Args:
        items: Prompts.
        variants: For each variant the settings to try, by name.
        repeats: Runs of each item in each variant.
        on_progress: Called with a line for each item.
    """
    rows: list[BenchRow] = []
    for group in by_category(items).values():
        chosen = {name: grid[name] for grid in variants.values() for name in [fastest(grid, group)]}
        rows += run_benchmark(group, chosen, repeats=repeats, on_progress=on_progress)
    return rows
