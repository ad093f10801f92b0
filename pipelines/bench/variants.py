"""Variants of text decoding that a benchmark compares: this engine and modes of transformers.

Every peer runs on a copy of the model that ragspec never touches. `hf-lookup@N` and
`hf-assistant@N` draft N tokens a step.
"""

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ragspec.drafters.method import Sources, listed
from ragspec.engine.engine import Engine
from ragspec.pipelines.bench.measure import ASSISTANT, LOOKUP, Outcome, Variant, parts_of, peer_of
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.methods import compose
from ragspec.sampling.settings import Sampling
from ragspec.types import PreTrainedModel
from ragspec.verification.causal import CausalTarget

_RUNS = itertools.count()
LOOKUP_TOKENS = 10  # of transformers' guide; the assistant's config has its default


def run_engine(engine: Engine, item: BenchItem, limit: int) -> Outcome:
    """Generate with an engine of this project, the item's source texts as further draft sources."""
    start = time.perf_counter()
    generation = engine.generate(
        list(item.prompt),
        Sampling(temperature=item.temperature, seed=0),
        max_new_tokens=limit,
        spans=item.spans,
        texts=item.texts,
        ignore_eos=item.fixed,
        tenant=str(next(_RUNS)),  # a drafter must not know the text of an earlier run
    )
    seconds = time.perf_counter() - start
    report = generation.report
    prefill = report.milliseconds["prefill"] / 1000.0
    return Outcome(generation.tokens, report.forward_passes, seconds, prefill, generation.label)


def run_peer(model: PreTrainedModel, item: BenchItem, limit: int, **arguments: object) -> Outcome:
    """Generate with transformers; a hook counts the forwards of this run only."""
    config = model.generation_config
    end = config.eos_token_id
    ids = torch.tensor([item.prompt], device=model.device)
    calls: list[None] = []
    if item.temperature:  # its samples are another stream than ours
        arguments |= {"temperature": item.temperature, "top_k": 0, "top_p": 1.0}
    config.eos_token_id = None if item.fixed else end
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    start = time.perf_counter()
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=bool(item.temperature),
            **arguments,
        )
        seconds = time.perf_counter() - start
    finally:
        hook.remove()
        config.eos_token_id = end
    return Outcome(out[0, len(item.prompt) :].tolist(), len(calls), seconds)


def build_variants(
    names: Sequence[str],
    engine: Engine,
    draft_model: CausalTarget | None,
    load_copy: Callable[[], PreTrainedModel],
    sources: Sources | None = None,
) -> dict[str, Variant]:
    """Build the variants by name; raise InputError for an unknown one, or one without its store.

    Args:
        draft_model: None skips the variants that need one.
        load_copy: Returns a fresh copy of the target for peers.
    """
    peer = load_copy() if any(map(peer_of, names)) else None
    available = replace(sources or Sources(), draft_model=draft_model)
    return {
        name: make_peer(name, peer, draft_model)
        if peer_of(name)
        else partial(run_engine, make_engine(name, engine, available))
        for name in names
        if draft_model is not None or not needs_model(name)
    }


def needs_model(name: str) -> bool:
    """Return whether a variant needs a draft model."""
    return peer_of(name) == ASSISTANT or "draft model" in _sources_of(name, "needs")


def make_engine(name: str, engine: Engine, sources: Sources) -> Engine:
    """Return an engine over the same target with the drafters of a name."""
    uses = _sources_of(name, "needs") | _sources_of(name, "uses")
    if "store" not in uses:
        sources = replace(sources, corpus=None, history=None)
    if "draft model" not in uses:
        sources = replace(sources, draft_model=None)
    drafter = None if name == "plain" else compose(parts_of(name), sources, engine.target)
    # A copy: acceptance learned by one variant must not help or hurt another.
    engine = engine.with_drafter(drafter, copy.deepcopy(engine.budget), engine.rule).with_limits(1)
    engine.prefix_cache.max_bytes = 0  # every variant reads every prompt
    return engine


def make_peer(
    name: str, model: PreTrainedModel, draft_model: CausalTarget | None, **arguments: object
) -> partial[Outcome]:
    """Return a mode of transformers by name, with further arguments of its `generate`."""
    kind, _, tokens = name.partition("@")
    options: dict[str, Any] = arguments
    if kind == LOOKUP:
        options["prompt_lookup_num_tokens"] = int(tokens or LOOKUP_TOKENS)
    elif kind == ASSISTANT:
        assert draft_model is not None  # see `build_variants`
        assistant = options["assistant_model"] = copy.deepcopy(draft_model.model)
        if tokens:
            assistant.generation_config.num_assistant_tokens = int(tokens)
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return partial(run_peer, model, **options)


def _sources_of(name: str, field: str) -> set[str]:
    """Return what the methods of a name need, or use: see `Method`."""
    methods = listed()
    parts = [methods[part] for part in parts_of(name) if part in methods]
    return {source for method in parts for source in getattr(method, field)}
