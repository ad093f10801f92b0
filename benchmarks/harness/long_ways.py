"""The ways in which `ragspec bench long` answers: our drafters, transformers, and retrieval alone.

All go on from what was read of a document once, transformers from a cache of its own copy of the
model. Seconds are those of decoding: from the first token, which the prompt gives, to the last.
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
from harness.token_clock import TokenClock
from ragspec.budget.policy import make_budget
from ragspec.drafters.base import Drafter
from ragspec.drafters.method import Sources
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.bench.measure import Outcome
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.bench.variants import (
    TransformersVariant,
    check_variants,
    make_engine,
    needs_model,
)
from ragspec.pipelines.docqa.docqa import Answer, DocQA
from ragspec.pipelines.docqa.prompt import plain_ids
from ragspec.pipelines.long.document import LongDocument
from ragspec.reports.builder import accepted_of
from ragspec.reports.report import kind_of_label
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.rapid.drafter import Rapid
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.rules.base import Step
from ragspec.trees.operations import depths

PLAIN, PEER, RETRIEVAL = "plain", "hf-greedy", "retrieval"
PIECE = 1024  # tokens of a document that transformers reads at a time, as we do
SELF = "self"  # as a draft model: the target


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One forward: nodes, levels of the tree that was verified, accepted ones, milliseconds."""

    nodes: int
    levels: int
    accepted: int
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a way made of a task. seconds: of decoding; by_source: accepted tokens by drafter.

    same: whether the text is to be that of plain decoding, not one of another law or prompt.
    """

    outcome: Outcome
    text: str
    seconds: float
    steps: tuple[DraftStep, ...] = ()
    by_source: dict[str, int] = field(default_factory=dict)
    same: bool = True

    @property
    def token_seconds(self) -> float:
        """Seconds of decoding for each token but the first, which the prompt gives."""
        return self.seconds / max(1, len(self.outcome.tokens) - 1)

    @property
    def level_ms(self) -> float | None:
        """Milliseconds of drafting a level of a tree, median over the drafts; None without any.

        A draft model runs once a level; where the budget cut a tree its levels cost less than this.
        """
        each = [step.draft_ms / step.levels for step in self.steps if step.levels]
        return median(each) if each else None


class Variant(Protocol):
    """One way of answering; `read` comes before the tasks over a document."""

    name: str

    def read(self, document: LongDocument) -> None:
        """Make ready for questions over a document that is read."""
        ...

    def answer(self, task: Task, new_tokens: int) -> Result:
        """Return what the way makes of a task, greedily."""
        ...


class DraftingVariant:
    """An engine of this project over the saved document."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._document: LongDocument | None = None

    def read(self, document: LongDocument) -> None:
        """Take what was read; nothing is read again."""
        self._document = document.over(self.engine)

    def answer(self, task: Task, new_tokens: int) -> Result:
        """Ask the document."""
        assert self._document is not None
        begun = plain_ids(self.engine.tokenizer, task.begun)
        began = time.perf_counter()
        answer = self._document.ask(
            task.question, max_new_tokens=len(begun) + new_tokens, resume_from=begun
        )
        return _matches(answer, time.perf_counter() - began, len(begun))


class RetrievalVariant:
    """Retrieval alone: the passages of the document that a question finds, and nothing else."""

    def __init__(self, engine: Engine) -> None:
        """engine: over the same target; it drafts from the text alone."""
        self.name = RETRIEVAL
        self.engine = make_engine("context", engine, Sources())
        self._qa: DocQA | None = None

    def read(self, document: LongDocument) -> None:
        """Index the part that was read."""
        part = replace(document.document, text=document.text, headings=(), pages=())
        self._qa = DocQA(PassageIndex.build([part]), engine=self.engine)

    def answer(self, task: Task, new_tokens: int) -> Result:
        """Ask the passages."""
        assert self._qa is not None
        begun = plain_ids(self.engine.tokenizer, task.begun)
        began = time.perf_counter()
        answer = self._qa.ask(
            task.question, max_new_tokens=len(begun) + new_tokens, resume_from=begun, refuse=False
        )
        return replace(_matches(answer, time.perf_counter() - began, len(begun)), same=False)


def _matches(answer: Answer, seconds: float, begun: int) -> Result:
    report, steps = answer.report, answer.generation.steps
    outcome = Outcome(
        answer.generation.tokens[begun:],
        report.forward_passes,
        seconds,
        report.milliseconds["prefill"] / 1000.0,
    )
    return Result(
        outcome,
        answer.text,
        report.decode_seconds,
        tuple(_fact(step) for step in steps if "prefill" not in step.milliseconds),
        dict(report.accepted_by_source),
        not kind_of_label(answer.label).startswith("exact-for"),
    )


def _fact(step: Step) -> DraftStep:
    levels = 1 + int(depths(step.tree.parents).max()) if len(step.tree) else 0
    spent = (round(step.milliseconds.get(name, 0.0), 3) for name in ("draft", "verify"))
    return DraftStep(len(step.tree), levels, len(accepted_of(step)), *spent)


class PeerVariant:
    """`generate` of transformers, greedy, on its own copy of the model, which reads once too.

    It goes on to the last of the new tokens: what ends our texts (stop strings, repetitions) does
    not end its own, so that the two are compared by the token.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = PEER
        self.model = copy.deepcopy(engine.model)
        self.tokenizer = engine.tokenizer
        self._cache: Any = None
        self._document: LongDocument | None = None

    @torch.inference_mode()
    def read(self, document: LongDocument) -> None:
        """Read the document, a piece at a time."""
        from transformers import DynamicCache

        self._document, self._cache = document, None
        cache = DynamicCache(config=self.model.config)
        ids = document.prefix.token_ids
        for first in range(0, len(ids), PIECE):
            piece = torch.tensor([ids[first : first + PIECE]], device=self.model.device)
            self.model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache = cache

    def answer(self, task: Task, new_tokens: int) -> Result:
        """Go on from a copy of the cache."""
        assert self._document is not None
        prompt = self._document.prompt(task.question).token_ids
        ids = (*prompt, *plain_ids(self.tokenizer, task.begun))
        clock = TokenClock()
        cache = copy.deepcopy(self._cache)
        mode = TransformersVariant(self.model, past_key_values=cache, streamer=clock)
        item = BenchItem(task.id, task.kind, ids, new_tokens, fixed=True)
        outcome = mode.run(item, new_tokens)
        seconds = clock.times[-1] - clock.times[1]
        outcome = replace(outcome, prefill=outcome.seconds - seconds)
        return Result(outcome, self.tokenizer.decode(outcome.tokens), seconds)


def make_ways(names: Sequence[str], engine: Engine, draft_model: Any = None) -> list[Variant]:
    """Return the drafting ways by name, plain decoding first.

    names: drafters, joined by plus signs where they are fused, with `:N` for trees of N nodes in
    place of the budget. draft_model: for those that need one, or None. Raises UnknownNameError,
    InputError for a drafter without the model that it needs.
    """
    names = list(dict.fromkeys((PLAIN, *names)))
    check_variants([parse_drafter(name) for name in names])
    ways: list[Variant] = []
    for name in names:
        drafter, _, nodes = _split(name)
        wants = needs_model(drafter)
        if wants:
            _check_model(name, draft_model)
        instance = make_engine(drafter, engine, Sources(draft_model=draft_model if wants else None))
        if nodes:
            instance.budget = make_budget(int(nodes))
        ways.append(DraftingVariant(name, instance))
    return ways


def steered_ways(etas: Sequence[float], engine: Engine, draft_model: Any) -> list[Variant]:
    """Return ways whose law a draft model over retrieved chunks steers, see `Steering`.

    All that is there drafts for them. Raises InputError without a draft model.
    """
    ways: list[Variant] = []
    for eta in etas:
        _check_model(name := f"steered, eta {eta:g}", draft_model)
        drafters: list[Drafter] = [AutoDrafter(), Rapid(draft_model, mode="steered", eta=eta)]
        instance = Engine(engine.target, engine.tokenizer, drafters, None, "auto")
        ways.append(DraftingVariant(name, instance))
    return ways


def _check_model(name: str, draft_model: Any) -> None:
    if draft_model is None:
        raise InputError(
            f"{name} got no draft model; expected one. Give it with --draft-model, {SELF!r} for "
            "the target itself."
        )


def parse_drafter(name: str) -> str:
    """Return the drafters of a way, without the size of its trees."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str, str]:
    drafter, colon, nodes = name.rpartition(":")
    return (drafter, colon, nodes) if colon and nodes.isdecimal() else (name, "", "")
