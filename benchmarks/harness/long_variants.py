"""The variants that `bench.py long` compares: our drafters, transformers, and retrieval alone.

All variants reuse the KV cache of the document, transformers that of its copy of the model. Seconds
are those of decoding: from the first token, which the prefill gives, to the last.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

import torch

from harness.long_tasks import Task
from harness.tasks import plain_ids
from harness.token_clock import TokenClock
from ragspec.budget.goodput import make_budget
from ragspec.drafters.base import Drafter
from ragspec.drafters.method import Sources
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.answering.answer import Answer
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.answering.long_document import LongDocument
from ragspec.pipelines.bench.measure import Outcome
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.bench.variants import make_engine, needs_model, run_peer
from ragspec.reports.generation import accepted_of
from ragspec.reports.report import kind_of_label
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.methods.rapid import Rapid
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.rules.base import Step
from ragspec.trees.operations import depths

PLAIN, PEER, RETRIEVAL = "plain", "hf-greedy", "retrieval"
CHUNK = 1024  # tokens of a prefill chunk of transformers, as in our engine
SELF = "self"  # as a draft model: the target


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One step: nodes and levels of the verified tree, accepted nodes, milliseconds."""

    nodes: int
    levels: int
    accepted: int
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class VariantAnswer:
    """The answer of a variant to a task.

    Attributes:
        seconds: Decode seconds.
        by_source: Accepted tokens by drafter.
        same: Whether the variant should generate the plain text; False for another distribution or
            prompt.
    """

    outcome: Outcome
    text: str
    seconds: float
    steps: tuple[DraftStep, ...] = ()
    by_source: dict[str, int] = field(default_factory=dict)
    same: bool = True

    @property
    def token_seconds(self) -> float:
        """Decode seconds of a token; the prefill gives the first one."""
        return self.seconds / max(1, len(self.outcome.tokens) - 1)

    @property
    def level_ms(self) -> float | None:
        """Median milliseconds of a level of a draft tree; None without drafts.

        A draft model runs once a level. If the budget cuts a tree, its levels cost less than this.
        """
        each = [step.draft_ms / step.levels for step in self.steps if step.levels]
        return median(each) if each else None


class Variant(Protocol):
    """One variant of answering; `read` is called before the tasks over a document."""

    name: str

    def read(self, document: LongDocument) -> None:
        """Prepare for questions over a document that was read."""
        ...

    def answer(self, task: Task, new_tokens: int) -> VariantAnswer:
        """Return the greedy answer to a task."""
        ...


class DraftingVariant:
    """An engine of this project over the KV cache of the document."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._document: LongDocument | None = None

    def read(self, document: LongDocument) -> None:
        """Reuse the KV cache of the document."""
        self._document = document.over(self.engine)

    def answer(self, task: Task, new_tokens: int) -> VariantAnswer:
        """Ask the document."""
        assert self._document is not None
        start = plain_ids(self.engine.tokenizer, task.start)
        began = time.perf_counter()
        answer = self._document.ask(
            task.question, max_new_tokens=len(start) + new_tokens, resume_from=start
        )
        return _to_variant_answer(answer, time.perf_counter() - began, len(start))


class RetrievalVariant:
    """Retrieval alone: the prompt holds only the retrieved passages of the document.

    Args:
        engine: Engine over the target; the variant drafts from the text alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = RETRIEVAL
        self.engine = make_engine("context", engine, Sources())
        self._qa: DocQA | None = None

    def read(self, document: LongDocument) -> None:
        """Index the part of the document that was read."""
        part = replace(document.document, text=document.text, headings=(), pages=())
        self._qa = DocQA(PassageIndex.build([part]), engine=self.engine)

    def answer(self, task: Task, new_tokens: int) -> VariantAnswer:
        """Ask the passages."""
        assert self._qa is not None
        start = plain_ids(self.engine.tokenizer, task.start)
        began = time.perf_counter()
        answer = self._qa.ask(
            task.question, max_new_tokens=len(start) + new_tokens, resume_from=start, refuse=False
        )
        return replace(
            _to_variant_answer(answer, time.perf_counter() - began, len(start)), same=False
        )


def _to_variant_answer(answer: Answer, seconds: float, start: int) -> VariantAnswer:
    report, steps = answer.report, answer.generation.steps
    outcome = Outcome(
        answer.generation.tokens[start:],
        report.forward_passes,
        seconds,
        report.milliseconds["prefill"] / 1000.0,
    )
    return VariantAnswer(
        outcome,
        answer.text,
        report.decode_seconds,
        tuple(_draft_step(step) for step in steps if "prefill" not in step.milliseconds),
        dict(report.accepted_by_source),
        not kind_of_label(answer.label).startswith("exact-for"),
    )


def _draft_step(step: Step) -> DraftStep:
    levels = 1 + int(depths(step.tree.parents).max()) if len(step.tree) else 0
    spent = (round(step.milliseconds.get(name, 0.0), 3) for name in ("draft", "verify"))
    return DraftStep(len(step.tree), levels, len(accepted_of(step)), *spent)


class PeerVariant:
    """Greedy `generate` of transformers on a copy of the model, which reads a document once, too.

    It always generates all new tokens, since stop strings and repetitions do not end its texts. So
    it is compared by the token.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = PEER
        self.model = copy.deepcopy(engine.model)
        self.tokenizer = engine.tokenizer
        self._cache: Any = None
        self._document: LongDocument | None = None

    @torch.inference_mode()
    def read(self, document: LongDocument) -> None:
        """Prefill the document in chunks."""
        from transformers import DynamicCache

        self._document, self._cache = document, None
        cache = DynamicCache(config=self.model.config)
        ids = document.prefix.token_ids
        for first in range(0, len(ids), CHUNK):
            chunk = torch.tensor([ids[first : first + CHUNK]], device=self.model.device)
            self.model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache = cache

    def answer(self, task: Task, new_tokens: int) -> VariantAnswer:
        """Answer from a copy of the KV cache."""
        assert self._document is not None
        prompt = self._document.prompt(task.question).token_ids
        ids = (*prompt, *plain_ids(self.tokenizer, task.start))
        clock = TokenClock()
        cache = copy.deepcopy(self._cache)
        item = BenchItem(task.id, task.kind, ids, new_tokens, fixed=True)
        outcome = run_peer(self.model, item, new_tokens, past_key_values=cache, streamer=clock)
        seconds = clock.times[-1] - clock.times[1]
        outcome = replace(outcome, prefill=outcome.seconds - seconds)
        return VariantAnswer(outcome, self.tokenizer.decode(outcome.tokens), seconds)


def make_variants(names: Sequence[str], engine: Engine, draft_model: Any = None) -> list[Variant]:
    """Return the drafting variants, plain decoding first.

    Args:
        names: Drafters; plus signs fuse them, and `:N` sets trees of N nodes instead of the budget.
        engine: Engine over the target.
        draft_model: For drafters that need one.

    Raises:
        UnknownNameError: A drafter is unknown.
        InputError: A drafter lacks its draft model.
    """
    names = list(dict.fromkeys((PLAIN, *names)))
    variants: list[Variant] = []
    for name in names:
        drafter, nodes = _split(name)
        with_model = needs_model(drafter)
        if with_model:
            _check_model(name, draft_model)
        sources = Sources(draft_model=draft_model if with_model else None)
        drafting = make_engine(drafter, engine, sources)
        if nodes:
            drafting.budget = make_budget(nodes)
        variants.append(DraftingVariant(name, drafting))
    return variants


def steered_variants(etas: Sequence[float], engine: Engine, draft_model: Any) -> list[Variant]:
    """Return variants whose distribution a draft model over retrieved chunks steers.

    `auto` and the draft model draft for them, see `Steering`. Raises InputError without a draft
    model.
    """
    variants: list[Variant] = []
    for eta in etas:
        _check_model(name := f"steered, eta {eta:g}", draft_model)
        drafters: list[Drafter] = [AutoDrafter(), Rapid(draft_model, eta=eta)]
        steered = Engine(engine.target, engine.tokenizer, drafters, None, "auto")
        variants.append(DraftingVariant(name, steered))
    return variants


def _check_model(name: str, draft_model: Any) -> None:
    if draft_model is None:
        raise InputError(
            f"Expected a draft model for {name}, got none. Add --draft-model {SELF} or a folder."
        )


def _split(name: str) -> tuple[str, int]:
    """Return the drafters of a variant and the nodes of its trees, 0 without `:N`."""
    drafter, colon, nodes = name.rpartition(":")
    return (drafter, int(nodes)) if colon and nodes.isdecimal() else (name, 0)
