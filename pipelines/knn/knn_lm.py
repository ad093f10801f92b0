"""A kNN language model: target and datastore choose every token together.

Khandelwal et al. 2020 (arXiv 1911.00172): the distribution of the next token is a mixture of the
target's distribution and of the tokens that followed the most similar contexts in the datastore.

Speculation hides the time of these searches. RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, section
3 and figure 3): tokens are chosen with the neighbours in a cache, then one search of all their
contexts finds the true neighbours. A token stays if the search gives the same one. The first wrong
token is replaced, and the tokens behind it are discarded. Neighbours never change the context, so
the target's state at the wrong token serves for its replacement. The text is that of a search
before every token.

Deviations: drafts continue below guesses, so one forward may give several of them; if guessing does
not pay by `StrideSchedule`, tokens wait for their searches within one call of the engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ragspec.engine.engine import Engine
from ragspec.engine.request import Options, Request, check_options, expect_engine, expect_function
from ragspec.errors import InputError
from ragspec.pipelines.answering.strides import IN_CALLS, FinalText
from ragspec.reports.generation import Generation
from ragspec.reports.report import Event, Retrieval, joined
from ragspec.retrievers.knn.datastore import Datastore
from ragspec.retrievers.knn.distributions import Guessing, Knn, NeighbourCache, Searching
from ragspec.retrievers.speculation.os3 import StridePlan, StrideSchedule
from ragspec.rules.base import Step
from ragspec.sampling.distribution import logprob_of
from ragspec.sampling.settings import Sampling, TokenLogprob, is_number, seeded, whole
from ragspec.sampling.text_output import TextOutput
from ragspec.trees.draft_tree import DraftTree

K, WEIGHT = 32, 0.25
# On the starter model 10 was best for 60,000 keys; if variances are equal, 18 for a million.
SPREAD = 15.0
FURTHER = 0.1  # cost of each further query of a search, about, as a share of a single query
WAITED = 32  # tokens of a call in which each waits for its search; a call costs 5 % of 16


class KnnLM:
    """Continues texts with an engine's model and a datastore of that model.

    The constructor prepares the keys for searches, which takes seconds for a million. Measured
    times and the success of guesses carry over to the next text.

    Args:
        k: Number of neighbours.
        weight: Their weight in the mixture, 0 to 1.
        temperature: Temperature of squared distances; None for a 15th of the variance of the keys.
            At the paper's 1 the nearest neighbour often gets the whole weight.
        speculate: "auto", "off", or the number of tokens written on guesses before they are
            checked. It never changes the text, whose label is `exact-for(knn)`.

    Raises:
        InputError, StoreError: The datastore is of another model or tokenizer, or an argument is
            out of range.
    """

    def __init__(
        self,
        engine: Engine,
        store: Datastore,
        *,
        k: int = K,
        weight: float = WEIGHT,
        temperature: float | None = None,
        speculate: str | int = "auto",
    ) -> None:
        expect_engine(engine, bare=True)
        if not isinstance(store, Datastore):
            raise InputError(f"got {store!r} as the store; expected a Datastore. Open it first.")
        if engine.rule.label != "exact":
            raise InputError(
                f"the engine's rule is {engine.rule.name!r}; expected 'walk', under which a text "
                "does not depend on its drafts."
            )
        if not 1 <= (whole(k) or 0) <= len(store):
            raise InputError(f"k is {k!r}; expected 1 to {len(store):,}, the datastore's keys.")
        if not (is_number(weight) and 0.0 <= weight <= 1.0):
            raise InputError(f"weight is {weight!r}; expected 0 to 1.")
        if temperature is not None and not (is_number(temperature) and temperature > 0.0):
            raise InputError(f"temperature is {temperature!r}; expected above 0, or None.")
        store.check(engine)
        if temperature is None:  # three digits, so that the rounding of a machine does not matter
            temperature = float(f"{store.near.variance / SPREAD:.3g}") or 1.0
        self.engine = engine
        self.knn = Knn(store, k, weight, temperature)
        self.speculate = speculate
        self.schedule = StrideSchedule.named(speculate, overlap=False)
        self.schedule.search.further = FURTHER

    def generate(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continue one prompt; `report.retrieval` has the searches.

        Args:
            prompt: Text, chat messages or token ids.
            stream: Called with text that is final. An interrupt then ends the text and keeps it.
            options: Further arguments of `Engine.generate`.

        Raises:
            InputError: There are several prompts, n is above 1, or `KnnLM` sets the option itself.
            PromptTooLongError: The prompt does not fit the context.
        """
        check_options(options, ("transform", *IN_CALLS), "KnnLM")
        expect_function(stream, "stream")
        sampling = seeded(sampling, "KnnLM.generate()")
        requests, single = self.engine.prepare(prompt, sampling, cast(Options, options))
        if not single:
            raise InputError(f"got {len(requests)} prompts; expected one text at a time.")
        if stream is not None and self.engine.tokenizer is None:
            raise InputError("stream= takes text but the engine has no tokenizer; pass one")
        final = FinalText(stream, self.engine.tokenizer, requests[0].stop.strings)
        text = KnnText(self, requests[0], sampling, options, final)
        try:
            with self.engine.scheduler.hold():
                generation = text.run()
        except KeyboardInterrupt:
            if stream is None or not text.known:
                raise
            generation = text.cancelled()
        self.engine.notify(generation)
        return generation


class KnnText:
    """One text in progress; `final` may stream it."""

    def __init__(
        self,
        lm: KnnLM,
        request: Request,
        sampling: Sampling,
        options: dict[str, Any],
        final: FinalText,
    ) -> None:
        self.engine, self.knn, self.schedule = lm.engine.without_callbacks(), lm.knn, lm.schedule
        self.prompt, self.top = list(request.prompt), request.logprobs
        self.sampling, self.options, self.final = sampling, options, final
        self.waits = lm.speculate == "off"  # every token waits for its search
        self.report = Retrieval()
        self.tokens: list[int] = []
        self.calls: list[Generation] = []
        self._steps: list[Step] = []
        self._scored: list[TokenLogprob] = []
        self._cache = NeighbourCache(lm.knn.store)
        self._waited = 0.0
        self._replaced = 0  # tokens at the end that the engine has not read yet
        self._began = time.perf_counter()

    def run(self) -> Generation:
        """Write the text to its end. Errors of the engine pass through."""
        ended, accepted = False, 0
        while not ended:
            plan = self.schedule.next()
            # The first token always waits: it shows whether a processor has a memory (`lazy`).
            waits = self.waits or not self.calls or not plan.guesses
            ended = self._wait() if waits else self._guess(plan)
            known = self.known
            self.final.push(self.prompt, known[accepted:], ends=ended)
            accepted = len(known)
        return self.result()

    @property
    def known(self) -> list[int]:
        """The tokens up to the last one that the engine has read: the text may end with it."""
        return self.tokens[: len(self.tokens) - self._replaced]

    def cancelled(self) -> Generation:
        """Return the text up to the last token that the engine has read, after an interrupt."""
        self.tokens = self.known
        self._steps = _first(self._steps, len(self.tokens))
        partial = self.result()
        output = TextOutput(self.engine.tokenizer, partial.prompt_tokens)
        output.push(partial.tokens)
        return replace(partial, text=output.text).cancelled()

    def result(self) -> Generation:
        """Return the final text so far, once the engine was called."""
        last, tokens = self.calls[-1], list(self.tokens)
        self.schedule.report(self.report, len(tokens))
        seconds = time.perf_counter() - self._began
        whole = joined([call.report for call in self.calls], tokens, seconds, self.report)
        spent = whole.milliseconds
        spent["verify"] = max(0.0, spent.get("verify", 0.0) - self._waited)
        decoding = seconds - spent.get("prefill", 0.0) / 1000.0
        whole = replace(whole, decode_seconds=max(0.0, decoding))
        scored = self._scored[: len(tokens)] if self.top is not None else None
        return replace(last, tokens=tokens, report=whole, steps=self._steps, logprobs=scored)

    def _write(
        self, stop_after: int | None, transform: Guessing | Searching
    ) -> tuple[Generation, list[int], float]:
        """Continue the text to the end or for some tokens; return the call, these, and its time."""
        began = time.perf_counter()
        pause = {"resume_from": self.tokens, "stop_after": stop_after, "transform": transform}
        options = {**self.options, **pause}
        if isinstance(transform, Guessing):
            options["logprobs"] = None  # they come from the checked distribution
        call: Generation = self.engine.generate(self.prompt, self.sampling, **options)
        self.calls.append(call)
        self._replaced = 0
        self.report.rounds += 1
        took = 1000.0 * (time.perf_counter() - began)
        self.report.events.append(Event("write", 1000.0 * (began - self._began), took))
        return call, call.tokens[len(self.tokens) :], took

    def _wait(self) -> bool:
        """Write some tokens, each after a search; return whether the text has ended."""
        transform = Searching(self.knn, None if self.waits else self._cache)
        # The first token alone: its call reads the prompt, so its time says nothing of the others.
        whole = self.waits and self.final.stream is None
        stop_after = None if whole else WAITED if self.tokens else 1
        call, new, took = self._write(stop_after, transform)
        searching = 0.0
        for start, queries, milliseconds in transform.times:
            self._count_search(queries, start, milliseconds)
            searching += milliseconds
        self._waited += searching
        if self.tokens and new:
            self.schedule.strides.append(max(took - searching, 1e-3) / len(new))
        if transform.distribution is not None and transform.distribution.lazy:
            self.waits = True
        self._scored += call.logprobs or ()
        self.tokens += new
        self._steps += call.steps
        self.report.gated += 1
        return call.finish_reason != "paused"

    def _guess(self, plan: StridePlan) -> bool:
        """Write some tokens with guesses and check them; return whether the text has ended."""
        transform = Guessing(self.knn, self._cache)
        call, new, took = self._write(plan.strides, transform)
        if not new:  # the text ended with the token that replaced a wrong one
            return True
        self.schedule.strides.append(took / len(new))
        right, truth = self._check(transform, new)
        ended = call.finish_reason != "paused" and truth is None
        self.tokens += new[:right]
        self._steps += _first(call.steps, right)
        if truth is not None:
            self.tokens.append(truth)
            self._steps.append(Step(DraftTree.empty(), (), (truth,)))
            self.report.wasted += len(new) - right
            if not right:
                self.report.events[-2] = replace(self.report.events[-2], accepted=False)
        self._replaced = int(truth is not None)
        self.schedule.learn_guesses(right, truth is not None)
        self.report.hits += right
        self.report.rollbacks += truth is not None
        return ended

    def _check(self, transform: Guessing, new: Sequence[int]) -> tuple[int, int | None]:
        """Search for the contexts of new tokens; return how many are right, and the next token.

        The next token replaces the first wrong one; it is None if all are right.
        """
        began = time.perf_counter()
        queries = transform.queries[: len(new)]
        states = np.stack([query.state for query in queries])
        searched = self.knn.store.near.search(states, self.knn.k)
        distribution = transform.distribution
        assert distribution is not None
        right, truth = 0, None
        for query, near, token in zip(queries, searched, new, strict=True):
            logits = self.knn.logits(query.logits, near)
            scores = distribution.process(logits, [*self.prompt, *self.tokens, *new[:right]], [[]])
            true = int(distribution.select(scores, [query.index]))
            if self.top is not None:
                self._scored.append(logprob_of(scores[0], true, self.top))
            self._cache.add(near)
            if true != token:
                truth = true
                break
            right += 1
        self._count_search(len(new), began, 1000.0 * (time.perf_counter() - began))
        return right, truth

    def _count_search(self, queries: int, began: float, milliseconds: float) -> None:
        start = 1000.0 * (began - self._began)
        self.report.events.append(Event("search", start, milliseconds, queries))
        self.report.calls += 1
        self.report.queries += queries
        self.schedule.search.learn(queries, milliseconds)


def _first(steps: Sequence[Step], count: int) -> list[Step]:
    """Return the steps of the first tokens, the last one cut short."""
    first: list[Step] = []
    for step in steps:
        if count <= 0:
            break
        some = step.tokens[:count]
        first.append(replace(step, tokens=some, path=step.path[: len(some)]))
        count -= len(some)
    return first
