"""One call of the engine: its rows made ready, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragspec.draft import DraftContext, DraftRequest, SourceText
from ragspec.drafting import with_prediction
from ragspec.law import TokenLaw
from ragspec.loop import Row
from ragspec.noise import NoiseStream, fresh_seed
from ragspec.output import Generation
from ragspec.processors import HFCallable
from ragspec.report import ReportBuilder
from ragspec.sampling import Sampling
from ragspec.stops import StopRule
from ragspec.taps import needs_hidden
from ragspec.tops import reads_prompts, wanted

if TYPE_CHECKING:
    from ragspec.engine import Engine

MOST_NODES = 64


@dataclass(slots=True)
class RowSettings:
    """What all rows of one call share.

    logprobs: None, or the number of alternatives to keep. extra: transformers processors. spans,
    texts: see `DraftRequest`. predictions: one for each prompt of the call, or none at all.
    """

    sampling: Sampling
    stop: StopRule
    logprobs: int | None = None
    extra: Sequence[HFCallable] = ()
    spans: Sequence[tuple[int, int, int, int]] = ()
    texts: Sequence[SourceText] = ()
    predictions: Sequence[SourceText | None] = ()

    def texts_of(self, prompt: int) -> tuple[SourceText, ...]:
        """Return the texts of prompt number `prompt`, its prediction last."""
        predicted = self.predictions[prompt] if self.predictions else None
        return (*self.texts, predicted) if predicted is not None else tuple(self.texts)


class Run:
    """The rows of some prompts, n of them each, and the results once they are done.

    first: the number of the first prompt in the whole call, which picks its seed.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[list[int]], settings: RowSettings, first: int
    ) -> None:
        self.began = time.perf_counter()
        self.engine = engine
        self.settings = settings
        self.prompts = prompts
        self.drafter = engine.drafter
        if self.drafter is not None and any(settings.predictions):
            self.drafter = with_prediction(self.drafter, engine.rule)
        self.spare = MOST_NODES if self.drafter is not None else 1
        self.prompt_of_row: list[int] = []
        self.rows: list[Row] = []
        self.seconds = 0.0
        batch = len(prompts) * settings.sampling.n
        cost = engine.cost
        self._cost = cost if cost is None or batch == 1 else cost.batched(batch)
        for number, prompt in enumerate(prompts):
            seed = settings.sampling.seed_of(first + number)
            seed = fresh_seed() if seed is None else seed
            for sample in range(settings.sampling.n):
                self.prompt_of_row.append(number)
                texts = settings.texts_of(first + number)
                self.rows.append(self._row(prompt, seed, sample, texts))

    @property
    def prompts_count(self) -> int:
        """The number of distinct prompts, which is the number of rows to prefill."""
        return len(self.prompts)

    def close(self, seconds: float) -> None:
        """Note the wall time; rows that did not end were cancelled."""
        self.seconds = seconds
        for row in self.rows:
            if row.stop.reason is None:
                row.stop.reason = "cancelled"

    def results(self) -> list[list[Generation]]:
        """Return the generations, one list for each prompt."""
        results: list[list[Generation]] = [[] for _ in self.prompts]
        for row, prompt in zip(self.rows, self.prompt_of_row, strict=True):
            results[prompt].append(self.result(row, self.prompts[prompt]))
        return results

    def result(self, row: Row, prompt: list[int]) -> Generation:
        """Return what became of one row."""
        tokens = row.context.tokens[row.context.prompt_length :]
        seconds = (row.finished - row.started) if row.finished else self.seconds
        budget, drafter = row.budget, row.drafter
        report = row.report.build(
            tokens,
            seconds,
            row.stop.reason or "cancelled",
            budget=self.engine.budget.name if budget is not None else "none",
            faults=getattr(drafter, "faults", None),
            reason=budget.reason if budget is not None else None,
        )
        return Generation(
            text=self._text(row, tokens),
            tokens=tokens,
            finish_reason=row.stop.reason or "cancelled",
            label=report.label,
            report=report,
            prompt_tokens=prompt,
            logprobs=row.scored if row.logprobs is not None else None,
            steps=row.steps,
            sample=row.law.noise.sample,
        )

    def _text(self, row: Row, tokens: Sequence[int]) -> str:
        if self.engine.tokenizer is None:
            return ""
        text = str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))
        if row.stop.cut is None:
            return text
        found = [text.find(string) for string in self.settings.stop.strings]
        return text[: min((place for place in found if place >= 0), default=row.stop.cut)]

    def _row(self, prompt: list[int], seed: int, sample: int, texts: tuple[SourceText, ...]) -> Row:
        engine, settings = self.engine, self.settings
        noise = NoiseStream(seed, sample)
        law = TokenLaw(
            settings.sampling, noise, len(prompt), sorted(settings.stop.ends), settings.extra
        )
        row = Row(
            context=DraftContext(list(prompt), len(prompt), settings.stop.max_new_tokens),
            law=law,
            stop=settings.stop.open(engine.tokenizer, prompt),
            report=ReportBuilder(engine.rule.label, seed, len(prompt)),
            logprobs=settings.logprobs,
            pending=list(prompt),
            started=self.began,
        )
        if self.drafter is not None:
            request = DraftRequest(
                prompt=tuple(prompt),
                vocab_size=engine.target.vocab_size,
                spans=tuple(settings.spans),
                texts=texts,
                law=law,
                device=engine.target.device,
            )
            row.drafter = self.drafter.open(request)
            row.top = wanted([self.drafter])
            row.reads_prompt = reads_prompts([self.drafter])
            row.hidden = needs_hidden([self.drafter])
            row.budget = engine.budget.open(self._cost)
            row.context.adviser = getattr(row.budget, "adviser", None)
        return row
