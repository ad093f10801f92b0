"""Variants of text decoding that a benchmark compares: our engine, and transformers' own modes.

Every peer runs on its own copy of the model, which ragspec never touches. A peer has a small grid
of settings, and the benchmark keeps the fastest.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from ragspec.drafters.eagle.drafter import HeadDrafter
from ragspec.drafters.eagle.head import CONFIG
from ragspec.drafters.method import Sources, listed
from ragspec.engine.engine import Engine
from ragspec.errors import UnknownNameError
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.methods import build_method
from ragspec.registry import unknown
from ragspec.sampling.settings import Sampling

DRAFT_LENGTHS = (5, 10, 20)
NGRAMS = (2, 3)
CONFIDENCES = (0.0, 0.4)  # below which an assistant stops its draft; 0.4 is transformers' default
SEED = 0
PEERS = ("hf-greedy", "hf-lookup", "hf-assistant")
DEFAULT_VARIANTS = (*PEERS, "plain", "context", "model", "fused")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one item: generated tokens, target forwards (prefill included), wall seconds.

    step_tokens: tokens of each step, the target's own included. prefill: seconds spent on the
    prompt; None if a run of one token has to measure it. label: the label of our result. figures:
    further numbers of the run by name.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    step_tokens: list[int] = field(default_factory=list)
    prefill: float | None = None
    label: str = ""
    figures: dict[str, float] = field(default_factory=dict)


class Variant(Protocol):
    """One way of generating, one item at a time."""

    name: str

    def run(self, item: Any, limit: int) -> Outcome:
        """Return the outcome of an item with at most `limit` new tokens."""


class EngineVariant:
    """An engine of this project."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def run(self, item: BenchItem, limit: int) -> Outcome:
        """Generate with the item's source texts as additional draft sources."""
        start = time.perf_counter()
        result = self.engine.generate(
            list(item.prompt),
            Sampling(temperature=item.temperature, seed=SEED),
            max_new_tokens=limit,
            spans=item.spans,
            texts=item.texts,
            ignore_eos=item.fixed,
        )
        seconds = time.perf_counter() - start
        return Outcome(
            result.tokens,
            result.report.forward_passes,
            seconds,
            [len(step.tokens) for step in result.steps],
            result.report.milliseconds["prefill"] / 1000.0,
            result.label,
        )


class TransformersVariant:
    """`generate` of transformers with fixed arguments, on a model that variants may share.

    A variant counts forwards by a hook that exists during its own runs only.
    """

    def __init__(self, name: str, model: Any, **arguments: Any) -> None:
        self.name = name
        self.model = model
        self.arguments = arguments
        self._cache_lengths: list[int] = []  # before each forward

    def run(self, item: BenchItem, limit: int) -> Outcome:
        """Generate with transformers and count forwards."""
        config = self.model.generation_config
        end = config.eos_token_id
        ids = torch.tensor([item.prompt], device=self.model.device)
        self._cache_lengths = []
        config.eos_token_id = None if item.fixed else end
        hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        start = time.perf_counter()
        try:
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                **_sampling_arguments(item.temperature),
                **self.arguments,
            )
            seconds = time.perf_counter() - start
        finally:
            hook.remove()
            config.eos_token_id = end
        steps = _step_tokens(self._cache_lengths, len(item.prompt), out.shape[1])
        tokens = out[0, len(item.prompt) :].tolist()
        return Outcome(tokens, len(self._cache_lengths), seconds, steps)

    def _count(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        cache = options.get("past_key_values")
        self._cache_lengths.append(0 if cache is None else int(cache.get_seq_length()))


def known_variants() -> tuple[str, ...]:
    """Return the names of all variants that can be compared."""
    return (*PEERS, "plain", *listed())


def check_variants(names: Sequence[str]) -> None:
    """Check that every name is a variant, a head's folder, or drafters joined by plus signs.

    Raises:
        UnknownNameError: A name is none of these.
    """
    for name in names:
        parts = _parts(name)
        options = known_variants() if len(parts) == 1 else tuple(listed())
        for part in parts:
            if part not in options and not _is_head(part):
                raise UnknownNameError(unknown("variant", part, options))


def build_variants(
    names: Sequence[str],
    engine: Engine,
    draft_model: Any,
    load_copy: Callable[[], Any],
    sources: Sources | None = None,
) -> dict[str, list[Variant]]:
    """Build the settings to try for each name; the benchmark keeps the fastest.

    Args:
        names: Variants, see `check_variants`.
        engine: Supplies target, tokenizer and budget.
        draft_model: A transformers model; None skips the variants that need one.
        load_copy: Returns a fresh copy of the target for peers.
        sources: Stores that methods may draft from.

    Raises:
        UnknownNameError: A name is no variant.
        InputError: A method lacks a store that it needs.
    """
    check_variants(names)
    peer = load_copy() if any(name in PEERS for name in names) else None
    available = replace(sources or Sources(), draft_model=draft_model)
    variants: dict[str, list[Variant]] = {}
    for name in names:
        if draft_model is None and needs_model(name):
            continue
        if name in PEERS:
            variants[name] = _peers(name, peer, draft_model)
        else:
            variants[name] = [EngineVariant(name, make_engine(name, engine, available))]
    return variants


def needs_model(name: str) -> bool:
    """Return whether a variant needs a draft model."""
    methods = listed()
    needs = {need for part in _parts(name) if part in methods for need in methods[part].needs}
    return name == "hf-assistant" or "draft model" in needs


def make_engine(name: str, engine: Engine, sources: Sources) -> Engine:
    """Return an engine over the same target with the drafters of a name, see `check_variants`.

    Among fused drafters only those that need the draft model receive it.
    """
    parts, drafters = _parts(name), list[Any]()
    without_model = replace(sources, draft_model=None)
    for part in parts:
        available = sources if len(parts) == 1 or needs_model(part) else without_model
        if part in known_variants():
            drafter = build_method(part, available)
            drafters += drafter if isinstance(drafter, list) else [drafter] if drafter else []
        else:
            drafters.append(HeadDrafter(part, engine.target))
    # A copy: acceptance learned by one variant must not help or hurt another.
    budget = copy.deepcopy(engine.budget)
    fused = drafters[0] if len(drafters) == 1 else drafters or None
    return Engine(engine.target, engine.tokenizer, fused, None, budget, rule=engine.rule)


def _peers(name: str, model: Any, draft_model: Any) -> list[Variant]:
    if name == "hf-greedy":
        return [TransformersVariant(name, model)]
    if name == "hf-lookup":
        return [
            TransformersVariant(
                f"{name}:{n}:{gram}",
                model,
                prompt_lookup_num_tokens=n,
                max_matching_ngram_size=gram,
            )
            for n in DRAFT_LENGTHS
            for gram in NGRAMS
        ]
    return [
        TransformersVariant(
            f"{name}:{n}:{confidence:g}", model, **_assistant(draft_model, n, confidence)
        )
        for n in DRAFT_LENGTHS
        for confidence in CONFIDENCES
    ]


def _assistant(draft_model: Any, tokens: int, confidence: float) -> dict[str, Any]:
    assistant = copy.deepcopy(draft_model)
    config = assistant.generation_config
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = confidence
    return {"assistant_model": assistant}


def _step_tokens(cache_lengths: Sequence[int], prompt: int, total: int) -> list[int]:
    """Return the tokens of each forward: the next cache lacks only the last token."""
    ends = (prompt, *(length + 1 for length in cache_lengths[1:]), total)
    return [end - start for start, end in pairwise(ends) if end > start]


def _sampling_arguments(temperature: float) -> dict[str, Any]:
    """Return generate's arguments; transformers' samples are another stream than ours."""
    if temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def _parts(name: str) -> list[str]:
    """Return the drafters that a variant fuses; a head's path counts as one."""
    return [name] if _is_head(name) else name.split("+")


def _is_head(name: str) -> bool:
    return (Path(name) / CONFIG).is_file()
