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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ragspec.acceptance.base import Step
from ragspec.budget.policy import make_budget
from ragspec.drafters.method import Sources
from ragspec.errors import InputError
from ragspec.pipelines.bench.long_tasks import Task
from ragspec.pipelines.bench.modes import (
    HFMode,
    Outcome,
    TokenClock,
    check_modes,
    make_engine,
    needs_model,
)
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.docqa.docqa import Answer, DocQA
from ragspec.pipelines.docqa.prompt import plain_ids
from ragspec.pipelines.long.document import LongDocument
from ragspec.reports.sources import kept_of
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.trees.operations import depths

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

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
class Found:
    """What a way made of a task. seconds: of decoding; by_source: accepted tokens by drafter."""

    outcome: Outcome
    text: str
    seconds: float
    steps: tuple[DraftStep, ...] = ()
    by_source: dict[str, int] = field(default_factory=dict)

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


class Way(Protocol):
    """One way of answering; `read` comes before the tasks over a document."""

    name: str

    def read(self, document: LongDocument) -> None:
        """Make ready for questions over a document that is read."""
        ...

    def answer(self, task: Task, new_tokens: int) -> Found:
        """Return what the way makes of a task, greedily."""
        ...


class DraftingWay:
    """An engine of this project over the kept document."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._document: LongDocument | None = None

    def read(self, document: LongDocument) -> None:
        """Take what was read; nothing is read again."""
        self._document = document.over(self.engine)

    def answer(self, task: Task, new_tokens: int) -> Found:
        """Ask the document."""
        assert self._document is not None
        begun = plain_ids(self.engine.tokenizer, task.begun)
        began = time.perf_counter()
        answer = self._document.ask(
            task.question, max_new_tokens=len(begun) + new_tokens, written=begun
        )
        return _found(answer, time.perf_counter() - began, len(begun))


class RetrievalWay:
    """Retrieval alone: the passages of the document that a question finds, and nothing else."""

    def __init__(self, engine: Engine) -> None:
        self.name = RETRIEVAL
        self.engine = engine
        self._qa: DocQA | None = None

    def read(self, document: LongDocument) -> None:
        """Index the part that was read."""
        part = replace(document.document, text=document.text, headings=(), pages=())
        self._qa = DocQA(PassageIndex.build([part]), engine=self.engine)

    def answer(self, task: Task, new_tokens: int) -> Found:
        """Ask the passages."""
        assert self._qa is not None
        begun = plain_ids(self.engine.tokenizer, task.begun)
        began = time.perf_counter()
        answer = self._qa.ask(
            task.question, max_new_tokens=len(begun) + new_tokens, written=begun, refuse=False
        )
        return _found(answer, time.perf_counter() - began, len(begun))


def _found(answer: Answer, seconds: float, begun: int) -> Found:
    report, steps = answer.report, answer.generation.steps
    outcome = Outcome(
        answer.generation.tokens[begun:],
        report.forward_passes,
        seconds,
        [len(step.tokens) for step in steps],
        report.milliseconds["prefill"] / 1000.0,
    )
    return Found(
        outcome,
        answer.text,
        report.decode_seconds,
        tuple(_fact(step) for step in steps if "prefill" not in step.milliseconds),
        dict(report.accepted_by_source),
    )


def _fact(step: Step) -> DraftStep:
    levels = 1 + int(depths(step.tree.parents).max()) if len(step.tree) else 0
    spent = (round(step.milliseconds.get(name, 0.0), 3) for name in ("draft", "verify"))
    return DraftStep(len(step.tree), levels, len(kept_of(step)), *spent)


class PeerWay:
    """`generate` of transformers, greedy, on its own copy of the model, which reads once too.

    It goes on to the last of the new tokens: what ends our texts (stop strings, repetitions) does
    not end its own, so that the two are compared by the token.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.name = PEER
        self.model = model
        self.tokenizer = tokenizer
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

    def answer(self, task: Task, new_tokens: int) -> Found:
        """Go on from a copy of the cache."""
        assert self._document is not None
        prompt = self._document.prompt(task.question).token_ids
        ids = (*prompt, *plain_ids(self.tokenizer, task.begun))
        clock = TokenClock()
        mode = HFMode(
            *(PEER, self.model),
            past_key_values=copy.deepcopy(self._cache),
            streamer=clock,
        )
        item = BenchItem(task.id, task.kind, ids, new_tokens, fixed=True)
        outcome = mode.run(item, new_tokens)
        seconds = clock.times[-1] - clock.times[1]
        outcome = replace(outcome, prefill=outcome.seconds - seconds)
        return Found(outcome, self.tokenizer.decode(outcome.tokens), seconds)


def make_ways(
    names: Sequence[str], engine: Engine, draft_model: Any, peer: bool, retrieval: bool
) -> list[Way]:
    """Return the ways by name, plain decoding first.

    names: drafters, joined by plus signs where they are fused, with `:N` for trees of N nodes in
    place of the budget. draft_model: for those that need one, or None. Raises UnknownNameError,
    InputError for a drafter without the model that it needs.
    """
    names = list(dict.fromkeys((PLAIN, *names)))
    check_modes([drafter_of(name) for name in names])
    ways: list[Way] = []
    for name in names:
        drafter, _, nodes = _split(name)
        wants = needs_model(drafter)
        if wants and draft_model is None:
            raise InputError(
                f"{name} got no draft model; expected one. Give it with --draft-model, "
                f"{SELF!r} for the target itself."
            )
        made = make_engine(drafter, engine, Sources(draft_model=draft_model if wants else None))
        if nodes:
            made.budget = make_budget(int(nodes))
        ways.append(DraftingWay(name, made))
    if peer:
        ways.append(PeerWay(copy.deepcopy(engine.model), engine.tokenizer))
    if retrieval:
        ways.append(RetrievalWay(make_engine("context", engine, Sources())))
    return ways


def drafter_of(name: str) -> str:
    """Return the drafters of a way, without the size of its trees."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str, str]:
    drafter, colon, nodes = name.rpartition(":")
    return (drafter, colon, nodes) if colon and nodes.isdecimal() else (name, "", "")
