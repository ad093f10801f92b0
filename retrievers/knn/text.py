"""A text of a kNN language model, written on guesses of what its searches would find.

RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, section 3 and figure 3): tokens are chosen by the
neighbours that a cache holds, then one search of all their contexts tells the true ones. What was
found never changes the context, so that the target's states of a wrong token's place serve its
right one: a token stays where it is the one that the search gives, the first wrong one is replaced,
and what followed it goes. The text is that of a search before every token.

Where we deviate: drafts go on below guesses, one forward may give several of them; and where
guessing does not pay by `StrideSchedule`, tokens wait for their searches within one call of the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ragspec.engine.output import Generation
from ragspec.reports.report import Event, Retrieval, joined
from ragspec.retrievers.knn.distributions import Guessing, Knn, KnnQuery, NeighbourCache, Searching
from ragspec.retrievers.speculation.schedule import StridePlan, StrideSchedule
from ragspec.rules.base import Step
from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.transform import Transform
from ragspec.trees.draft_tree import DraftTree

WAITED = 32  # tokens of a call in which every one waits for its search; a call costs 5 % of 16

# Goes on after tokens of the text until it ends, or for so many more where there is a number.
Write = Callable[[Sequence[int], int | None, Transform], Generation]


@dataclass(slots=True)
class KnnText:
    """One text on its way.

    prompt: token ids. top: alternatives to keep with each log-probability, None for none at all.
    on_accept: called with the tokens that stay, and with what the last call gave where the text has
    ended. waits: every token waits for its search. whole: it may do so in a single call, as nobody
    reads along.
    """

    write: Write
    knn: Knn
    prompt: Sequence[int]
    schedule: StrideSchedule
    top: int | None = None
    on_accept: Callable[[Sequence[int], Generation | None], None] = lambda tokens, last: None
    waits: bool = False
    whole: bool = False
    report: Retrieval = field(default_factory=Retrieval)
    tokens: list[int] = field(default_factory=list)
    calls: list[Generation] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _scored: list[TokenLogprob] = field(default_factory=list)
    _cache: NeighbourCache | None = None
    _waited: float = 0.0
    _replaced: int = 0  # tokens at the end that no call of the engine has seen yet
    _began: float = field(default_factory=time.perf_counter)

    def run(self) -> Generation:
        """Write the text to its end. Raises what the engine raises."""
        ended = False
        while not ended:
            plan = self.schedule.next()
            # The first token always: its distribution says whether a place may be asked twice.
            waits = self.waits or not self.calls or not plan.guesses
            ended = self._wait() if waits else self._guess(plan)
            self.on_accept(self.known, self.calls[-1] if ended else None)
        return self.result()

    @property
    def known(self) -> list[int]:
        """The tokens after which it is known whether the text goes on."""
        return self.tokens[: len(self.tokens) - self._replaced]

    def cut(self) -> bool:
        """Keep what was known, after an interrupt; returns whether there is any."""
        self.tokens = self.known
        self._steps = _first(self._steps, len(self.tokens))
        return bool(self.tokens)

    def result(self) -> Generation:
        """Return the text as far as it will not be taken back; at least one call was made."""
        last, tokens = self.calls[-1], list(self.tokens)
        report, schedule = self.report, self.schedule
        report.strides = len(tokens)
        report.stride_ms, report.chance = schedule.stride_ms, schedule.chance
        report.search_ms = schedule.search.to_dict()
        seconds = time.perf_counter() - self._began
        whole = joined([call.report for call in self.calls], tokens, seconds)
        spent = dict(whole.milliseconds)
        searched = sum(e.milliseconds for e in report.events if e.what == "search")
        spent["retrieve"] = searched
        spent["verify"] = max(0.0, spent.get("verify", 0.0) - self._waited)
        decoding = seconds - spent.get("prefill", 0.0) / 1000.0
        whole = replace(
            whole,
            tokens=len(tokens),
            milliseconds=spent,
            decode_seconds=max(0.0, decoding),
            retrieval=report,
        )
        scored = self._scored[: len(tokens)] if self.top is not None else None
        return replace(last, tokens=tokens, report=whole, steps=self._steps, logprobs=scored)

    def _wait(self) -> bool:
        """Write some tokens, every one after a search; return whether the text has ended."""
        distribution = Searching(self.knn, None if self.waits else self._open_cache())
        began = time.perf_counter()
        # The first token alone: its call reads the prompt, which says nothing of the others.
        stop_after: int | None = WAITED if self.tokens else 1
        if self.whole and self.waits:
            stop_after = None
        call = self.write(self.tokens, stop_after, distribution)
        took = self._note("write", began)
        new = call.tokens[len(self.tokens) :]
        for start, queries, milliseconds in distribution.times:
            self._count_search(queries, start, milliseconds)
            self._waited += milliseconds
            self.schedule.search.learn(queries, milliseconds)
        if self.tokens and new:
            searching = sum(milliseconds for *_, milliseconds in distribution.times)
            self.schedule.strides.append(max(took - searching, 1e-3) / len(new))
        if distribution.distribution is not None and distribution.distribution.lazy:
            self.waits = True
        self._take(call, new, call.steps, call.logprobs or ())
        self.report.gated += 1
        self.report.rounds += 1
        return call.finish_reason != "paused"

    def _guess(self, plan: StridePlan) -> bool:
        """Write some tokens on guesses and check them; return whether the text has ended."""
        distribution = Guessing(self.knn, self._open_cache())
        began = time.perf_counter()
        call = self.write(self.tokens, plan.strides, distribution)
        took = self._note("write", began)
        new = call.tokens[len(self.tokens) :]
        if not new:  # it ended with the token that took a wrong one's place
            self._take(call, (), (), ())
            return True
        self.schedule.strides.append(took / len(new))
        right, truth = self._check(distribution, new)
        ended = call.finish_reason != "paused" and truth is None
        selected = new if truth is None else [*new[:right], truth]
        steps = _first(call.steps, right)
        if truth is not None:
            steps.append(Step(DraftTree.empty(), (), (truth,)))
            self.report.wasted += len(new) - right
            if not right:
                self.report.events[-2] = replace(self.report.events[-2], accepted=False)
        self._take(call, selected, steps, ())
        self._replaced = int(truth is not None)
        self.schedule.learn_guesses(right, truth is not None)
        self.report.hits += right
        self.report.rollbacks += truth is not None
        self.report.rounds += 1
        return ended

    def _check(self, distribution: Guessing, new: Sequence[int]) -> tuple[int, int | None]:
        """Search for the contexts of new tokens; return how many are right, and what comes next.

        That is the true token in the place of the first wrong one, None where none is wrong.
        """
        began = time.perf_counter()
        request = distribution.queries[: len(new)]
        result = self.knn.search(np.stack([place.state for place in request]))
        assert distribution.distribution is not None
        right, truth = 0, None
        for place, near, token in zip(request, result, new, strict=True):
            true = self._select(
                distribution.distribution,
                self.knn.logits(place.logits, near),
                place,
                [*self.tokens, *new[:right]],
                scored=True,
            )
            distribution.cache.add(near)
            if true != token:
                truth = true
                break
            right += 1
        took = 1000.0 * (time.perf_counter() - began)
        self._count_search(len(new), began, took)
        self.schedule.search.learn(len(new), took)
        return right, truth

    def _select(
        self,
        distribution: TokenDistribution,
        logits: Tensor,
        place: KnnQuery,
        before: Sequence[int],
        *,
        scored: bool = False,
    ) -> int:
        """Return the token that mixed logits give after the tokens before."""
        scores = distribution.process(logits, [*self.prompt, *before], [[]])
        token = int(distribution.select(scores, [place.index]))
        if scored and self.top is not None:
            self._scored.append(logprob_of(scores[0], token, self.top))
        return token

    def _take(
        self,
        call: Generation,
        selected: Sequence[int],
        steps: Sequence[Step],
        scored: Sequence[TokenLogprob],
    ) -> None:
        """Make tokens part of the text."""
        self.calls.append(call)
        self._replaced = 0
        self.tokens += selected
        self._steps += steps
        self._scored += scored

    def _open_cache(self) -> NeighbourCache:
        if self._cache is None:
            self._cache = NeighbourCache(self.knn.store)
        return self._cache

    def _count_search(self, queries: int, began: float, milliseconds: float) -> None:
        start = 1000.0 * (began - self._began)
        self.report.events.append(Event("search", start, milliseconds, queries))
        self.report.calls += 1
        self.report.queries += queries

    def _note(self, what: str, began: float) -> float:
        """Note what was done since; returns its milliseconds."""
        milliseconds = 1000.0 * (time.perf_counter() - began)
        self.report.events.append(Event(what, 1000.0 * (began - self._began), milliseconds))
        return milliseconds


def _first(steps: Sequence[Step], count: int) -> list[Step]:
    """Return the steps of the first tokens, the last one cut short."""
    selected: list[Step] = []
    for step in steps:
        if count <= 0:
            break
        some = step.tokens[:count]
        selected.append(replace(step, tokens=some, path=step.path[: len(some)]))
        count -= len(some)
    return selected
