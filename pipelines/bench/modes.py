"""The ways of decoding that a benchmark compares: ours, and transformers' own.

Every peer runs on its own copy of the model, which ragspec never touches, and is given a small
grid over its knobs; the best setting of the grid is what it is judged by.
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
CONFIDENCES = (0.0, 0.4)  # at which an assistant stops its draft: never, and transformers' default
SEED = 0
FUSED = "+"  # between drafters that make one mode
PEERS = ("hf-greedy", "hf-lookup", "hf-assistant")
MODES = (*PEERS, "plain", "context", "model", "fused")  # what is run where nothing is said


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: generated tokens, target forwards (prefill included), wall seconds.

    step_tokens: how many tokens each step gave, the target's own included. prefill: seconds of the
    work on the prompt, in which drafters are opened; None where a run of one token must tell.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    step_tokens: list[int] = field(default_factory=list)
    prefill: float | None = None


class Mode(Protocol):
    """One way of decoding, one prompt at a time."""

    name: str

    def run(self, item: BenchItem, new_tokens: int) -> Outcome:
        """Return what the mode makes of the item."""
        ...


class OurMode:
    """An engine of this project."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def run(self, item: BenchItem, new_tokens: int) -> Outcome:
        """Return what the engine makes of the item; what is known of its text goes along."""
        began = time.perf_counter()
        result = self.engine.generate(
            list(item.prompt),
            Sampling(temperature=item.temperature, seed=SEED),
            max_new_tokens=new_tokens,
            spans=item.spans,
            texts=item.texts,
            ignore_eos=item.fixed,
        )
        seconds = time.perf_counter() - began
        given = [len(step.tokens) for step in result.steps]
        prefill = result.report.milliseconds["prefill"] / 1000.0
        return Outcome(result.tokens, result.report.forward_passes, seconds, given, prefill)


class TokenClock:
    """Takes the time of every token that `generate` of transformers hands to a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Note a token; the first call brings the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class HFMode:
    """`generate` of transformers with some arguments, on a model that modes may share.

    A mode counts forwards by a hook that is there for its own runs only.
    """

    def __init__(self, name: str, model: Any, **arguments: Any) -> None:
        self.name = name
        self.model = model
        self.arguments = arguments
        self._begun: list[int] = []  # by forward, the tokens in the cache

    def run(self, item: BenchItem, new_tokens: int) -> Outcome:
        """Return what `generate` makes of the item."""
        config = self.model.generation_config
        end = config.eos_token_id
        ids = torch.tensor([item.prompt], device=self.model.device)
        self._begun = []
        config.eos_token_id = None if item.fixed else end
        hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        began = time.perf_counter()
        try:
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                **_sampled(item.temperature),
                **self.arguments,
            )
            seconds = time.perf_counter() - began
        finally:
            hook.remove()
            config.eos_token_id = end
        given = _step_tokens(self._begun, len(item.prompt), out.shape[1])
        return Outcome(out[0, len(item.prompt) :].tolist(), len(self._begun), seconds, given)

    def _count(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        cache = options.get("past_key_values")
        self._begun.append(0 if cache is None else int(cache.get_seq_length()))


def _step_tokens(begun: Sequence[int], prompt: int, whole: int) -> list[int]:
    """Return what each forward gave, as the next one shows: its cache lacks the last token only."""
    ends = (prompt, *(length + 1 for length in begun[1:]), whole)
    return [end - start for start, end in pairwise(ends) if end > start]


def known() -> tuple[str, ...]:
    """Return the names of all ways of decoding that can be compared."""
    return (*PEERS, "plain", *listed())


def check_modes(names: Sequence[str]) -> None:
    """Raise UnknownNameError for the first name that is no mode; costs nothing.

    A drafter is a name or the folder of a head; several that are fused are joined by plus signs.
    """
    for name in names:
        parts = _parts(name)
        options = known() if len(parts) == 1 else tuple(listed())
        for part in parts:
            if part not in options and not _is_head(part):
                raise UnknownNameError(unknown("mode", part, options))


def _parts(name: str) -> list[str]:
    """Return the drafters that a mode fuses, a head whose path has a plus sign as one."""
    return [name] if _is_head(name) else name.split(FUSED)


def _is_head(name: str) -> bool:
    return (Path(name) / CONFIG).is_file()


def _sampled(temperature: float) -> dict[str, Any]:
    """Return generate's arguments for a temperature; its samples are another stream than ours."""
    if temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def build_modes(
    names: Sequence[str],
    engine: Engine,
    draft_model: Any,
    load_copy: Callable[[], Any],
    sources: Sources | None = None,
) -> dict[str, list[Mode]]:
    """Return, for each name, the settings to try; the benchmark keeps the fastest.

    engine: gives model, tokenizer and budget. draft_model: a transformers model or None, which
    leaves the modes out that need one. load_copy: gives a fresh copy of the target. sources: the
    stores that methods may draft from. Raises UnknownNameError, and InputError for a method
    without the store that it needs.
    """
    check_modes(names)
    peer = load_copy() if any(name in PEERS for name in names) else None
    held = replace(sources or Sources(), draft_model=draft_model)
    found: dict[str, list[Mode]] = {}
    for name in names:
        if draft_model is None and needs_model(name):
            continue
        if name in PEERS:
            found[name] = _peers(name, peer, draft_model)
        else:
            found[name] = [OurMode(name, make_engine(name, engine, held))]
    return found


def needs_model(name: str) -> bool:
    """Tell whether a way of decoding cannot do without a draft model."""
    methods = listed()
    needs = {need for part in _parts(name) if part in methods for need in methods[part].needs}
    return name == "hf-assistant" or "draft model" in needs


def _peers(name: str, model: Any, draft_model: Any) -> list[Mode]:
    if name == "hf-greedy":
        return [HFMode(name, model)]
    if name == "hf-lookup":
        return [
            HFMode(
                f"{name}:{n}:{gram}",
                model,
                prompt_lookup_num_tokens=n,
                max_matching_ngram_size=gram,
            )
            for n in DRAFT_LENGTHS
            for gram in NGRAMS
        ]
    return [
        HFMode(f"{name}:{n}:{confidence:g}", model, **_assistant(draft_model, n, confidence))
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


def make_engine(name: str, engine: Engine, sources: Sources) -> Engine:
    """Return an engine over the same target that drafts as a name says: see `check_modes`.

    Of fused drafters only those that need the draft model are given it.
    """
    parts, drafters = _parts(name), list[Any]()
    alone = replace(sources, draft_model=None)
    for part in parts:
        given = sources if len(parts) == 1 or needs_model(part) else alone
        made = build_method(part, given) if part in known() else HeadDrafter(part, engine.target)
        drafters += made if isinstance(made, list) else [] if made is None else [made]
    # A copy: what one mode learns about acceptance must not help or hurt another.
    budget = copy.deepcopy(engine.budget)
    fused = drafters[0] if len(drafters) == 1 else drafters or None
    return Engine(engine.target, engine.tokenizer, fused, None, budget, rule=engine.rule)
