"""The figures of one generation, of its searches, and of a text written in several calls.

The acceptance figures have vLLM's names and definitions (per-request acceptance metrics of its
speculative decoding). A step is one draft and one verification. The bonus token counts in the mean
length alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from ragspec.errors import InputError, pluralize


@dataclass(frozen=True, slots=True)
class Event:
    """One action of speculative retrieval.

    Attributes:
        what: "write" (a stride), "guess", "search", or "ahead" (a stride written during a search).
        start: Milliseconds since the text began.
        queries, accepted: Queries of a search, and whether a stride stayed in the text.
    """

    what: str
    start: float
    milliseconds: float
    queries: int = 1
    accepted: bool = True


@dataclass(slots=True)
class Retrieval:
    """The searches of one text by speculative retrieval.

    Attributes:
        calls, queries: Searches, and the queries in them.
        rounds, gated: Checks, and those in which every stride was checked before the next.
        strides, wasted: Strides of the text, and discarded ones.
        hits, rollbacks: Correct guesses, and rounds that ended at a wrong one.
        stride_ms, search_ms: Medians of recent times: of a stride (a), and of a search (b) by its
            number of queries.
        chance: Probability of a correct guess.
        changed: Queries that had another answer when they were repeated, for this text or earlier
            ones. The text is then `approximate`.
    """

    calls: int = 0
    queries: int = 0
    rounds: int = 0
    strides: int = 0
    hits: int = 0
    rollbacks: int = 0
    wasted: int = 0
    stride_ms: float = 0.0
    search_ms: dict[int, float] = field(default_factory=dict)
    chance: float = 0.0
    gated: int = 0
    changed: int = 0
    events: list[Event] = field(default_factory=list)

    def summary(self) -> str:
        """Return one sentence to read."""
        guessed = self.hits + self.rollbacks
        right = f", {self.hits} of {pluralize(guessed, 'guess')} right" if guessed else ""
        back = f", {self.wasted} taken back" if self.wasted else ""
        return (
            f"Looked up {pluralize(self.queries, 'query')} in {pluralize(self.calls, 'search')} "
            f"over {pluralize(self.strides, 'stride')}{right}{back}."
        ) + (" Repeated queries had other answers." if self.changed else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one generated sequence; counts are tokens, `milliseconds` wall clock.

    Attributes:
        forwards: Target forward passes of decoding.
        prefill_forwards, prefill_tokens: Forward passes over the prompt, and the output tokens that
            they gave.
        cached_tokens: Prompt tokens that an earlier call had read.
        per_step_drafted, per_step_accepted: Tokens proposed and accepted in each step.
        drafted_by_source, accepted_by_source: The same by the name of the drafter, over all steps.
        faults: Failures by drafter.
        accepted_prediction_tokens, rejected_prediction_tokens: Tokens drafted from a predicted
            output that stand in the text, or do not (OpenAI's names).
        seconds, decode_seconds: Time of the whole run, and without retrieval and prefill.
        distinct_4: Share of distinct 4-grams.
        loop_share: Share of tokens inside a loop.
        budget, budget_sizes: Name of the policy, and the number of steps by tree size.
        reason: Why speculation gave no token; None if it gave some.
        rested: For each skipped source, for how many steps and why.
        tv_excess: Mean total variation per token that a relaxed rule may have added; 0 under exact
            rules, None if the rule does not measure it.
        drift: Mean total variation per token between the target's own distribution and the one of
            a transform; None if it is not measured.
        static: Mode of the steps of fixed shape, or "off", or "off: " and the reason.
        runtime: What ran forwards: "torch" or "onnx".
        weights: What the model's weights are stored in, such as "float32" or "int8". Labels speak
            of the model as it is stored.
        kv_bytes: Size of keys and values after the answer of a long document, else None.
        retrieval: Searches of a text that retrieves while it is written, else None.
    """

    tokens: int
    prompt_tokens: int
    forwards: int
    prefill_forwards: int
    steps: int
    per_step_drafted: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    milliseconds: dict[str, float]
    seconds: float
    decode_seconds: float
    label: str
    seed: int | None
    finish_reason: str
    distinct_4: float
    loop_share: float
    budget: str = "none"
    budget_sizes: dict[int, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    rested: dict[str, str] = field(default_factory=dict)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    tv_excess: float | None = None
    prefill_tokens: int = 1
    cached_tokens: int = 0
    retrieval: Retrieval | None = None
    drift: float | None = None
    kv_bytes: int | None = None
    static: str = "off"
    runtime: str = "torch"
    weights: str = ""

    @property
    def drafted(self) -> int:
        """Tokens that were proposed (vLLM: num_draft_tokens)."""
        return sum(self.per_step_drafted)

    @property
    def accepted(self) -> int:
        """Proposed tokens that stand in the output (vLLM: num_accepted_draft_tokens)."""
        return sum(self.per_step_accepted)

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / steps, vLLM's mean_acceptance_length; 0 without steps."""
        return 1.0 + self.accepted / self.steps if self.steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def draft_cost(self) -> float | None:
        """Draft time per token over verify time per forward (c in the papers); None without any."""
        if not (self.drafted and self.forwards and self.milliseconds.get("verify")):
            return None
        proposed = self.milliseconds.get("draft", 0.0) / self.drafted
        return proposed * self.forwards / self.milliseconds["verify"]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of steps by accepted tokens: entry k counts the steps that accepted k."""
        return [*map(int, np.bincount(np.asarray(self.per_step_accepted, np.int64)))]

    @property
    def forward_passes(self) -> int:
        """All target forward passes, those over the prompt included."""
        return self.forwards + self.prefill_forwards

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, without the time and the tokens of the prefill."""
        decoded = max(self.tokens - self.prefill_tokens, 0)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens over all target forward passes; 0 without any."""
        return self.tokens / self.forward_passes if self.forward_passes else 0.0

    def with_retrieval(self, milliseconds: float) -> Self:
        """Return this report with the milliseconds of the search before the generation."""
        stages = {**self.milliseconds, "retrieve": milliseconds}
        more = milliseconds - self.milliseconds.get("retrieve", 0.0)
        return replace(self, milliseconds=stages, seconds=self.seconds + more / 1000)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types, with vLLM's schema under `speculative_decoding`."""
        names = [item.name for item in fields(self) if not item.name.startswith("per_step_")]
        names += [name for name, each in vars(Report).items() if isinstance(each, property)]
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        facts["budget_sizes"] = {str(size): n for size, n in sorted(self.budget_sizes.items())}
        facts["milliseconds"] = {k: round(v, 4) for k, v in self.milliseconds.items()}
        if (searches := self.retrieval) is not None:
            times = {str(count): each for count, each in searches.search_ms.items()}
            facts["retrieval"] = asdict(searches) | {"search_ms": times}
        facts["speculative_decoding"] = {
            "mean_acceptance_length": self.mean_accepted_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "per_step_accepted": list(self.per_step_accepted),
            "per_step_drafted": list(self.per_step_drafted),
        }
        return facts

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that `to_dict` wrote; raise InputError if a field is missing or bad."""
        from pydantic import TypeAdapter, ValidationError

        steps = {"per_step_drafted": (), "per_step_accepted": ()}
        facts = {**steps, **data.get("speculative_decoding", {}), **data}
        try:
            return TypeAdapter(cls).validate_python(facts)
        except ValidationError as error:
            raise InputError(
                f"not a whole report ({error}); expected what Report.to_dict wrote. Write it again."
            ) from error

    def summary(self) -> str:
        """Return one paragraph to read."""
        speed = f", {self.tokens_per_second:.0f} tokens/s while decoding" if self.steps else ""
        sources = ", ".join(f"{name} {n}" for name, n in self.accepted_by_source.items())
        spent = ", ".join(f"{k} {v:.0f}" for k, v in self.milliseconds.items() if v >= 0.5)
        failed = ", ".join(f"{name} {n}" for name, n in self.faults.items())
        stored = f" for weights in {self.weights}" if self.weights.startswith("int") else ""
        rested = "; ".join(f"{name} for {why}" for name, why in self.rested.items())
        sentences = {
            f"{pluralize(self.tokens, 'token')} in {pluralize(self.forward_passes, 'forward pass')}"
            f" ({self.tokens_per_forward:.2f} a pass), {self.seconds:.2f} s{speed}, "
            f"label {self.label}{stored}.": True,
            f"{self.accepted} of {pluralize(self.drafted, 'drafted token')} accepted "
            f"({self.draft_acceptance_rate:.0%}): {sources or 'none'}.": self.drafted,
            self.retrieval.summary() if self.retrieval else "": self.retrieval,
            f"Milliseconds: {spent}.": spent,
            f"Relaxed by {self.tv_excess or 0:.3f} total variation a token.": self.tv_excess,
            f"Steering drifts by {self.drift or 0:.3f} total variation a token.": self.drift,
            f"{self.loop_share:.0%} of the output repeats itself.": self.loop_share > 0.2,
            f"Drafters that failed: {failed}.": failed,
            f"Not used: {rested}.": rested,
            f"No gain from speculation: {self.reason}.": self.reason,
        }
        return " ".join(sentence for sentence, applies in sentences.items() if applies)


# Numbers, and mappings to numbers, that add up over the calls of one text.
_ADDED = ["tokens", "prefill_tokens", "forwards", "prefill_forwards", "steps", "decode_seconds"]
_ADDED += ["accepted_prediction_tokens", "rejected_prediction_tokens"]
_MERGED = ("drafted_by_source", "accepted_by_source", "milliseconds", "budget_sizes", "faults")


def joined(
    reports: Sequence[Report], tokens: Sequence[int], seconds: float, retrieval: Retrieval | None
) -> Report:
    """Return the report of a text from the reports of the calls that wrote it.

    Args:
        reports: One for each call, in order; at least one.
        tokens: The whole text.
        seconds: Wall time of the whole text, pauses included.
        retrieval: The searches between the calls, which may have written tokens twice, or None.
    """
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in _ADDED}
    for name in _MERGED:
        total: Counter[Any] = Counter()
        for report in reports:
            total.update(getattr(report, name))  # adds
        sums[name] = dict(total)
    if retrieval is not None:
        searches = (each for each in retrieval.events if each.what in ("search", "guess"))
        sums["milliseconds"]["retrieve"] = sum(each.milliseconds for each in searches)
        sums |= {"tokens": len(tokens), "retrieval": retrieval}
    for name in ("tv_excess", "drift"):  # means by token, None if a part did not measure it
        figures = [getattr(report, name) for report in reports]
        weighted = (f * r.tokens for f, r in zip(figures, reports, strict=True) if f is not None)
        sums[name] = None if None in figures else float(sum(weighted)) / max(1, len(tokens))
    return replace(
        reports[-1],
        **sums,
        prompt_tokens=reports[0].prompt_tokens,
        cached_tokens=reports[0].cached_tokens,
        per_step_drafted=tuple(n for report in reports for n in report.per_step_drafted),
        per_step_accepted=tuple(n for report in reports for n in report.per_step_accepted),
        seconds=seconds,
        distinct_4=distinct_share(tokens, 4),
        loop_share=loop_share(tokens),
        reason=None if any(report.accepted for report in reports) else reports[-1].reason,
    )


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of distinct n-grams among all n-grams; 1 for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_share(tokens: Sequence[int], longest: int = 32, repeats: int = 3) -> float:
    """Return the share of tokens that lie inside a loop.

    A loop is a cycle of at most `longest` tokens, at least `repeats` times in a row. The tokens of
    all its rounds count, including a last unfinished round.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    inside = np.zeros(len(ids), dtype=np.bool_)
    for period in range(1, min(longest, len(ids) // repeats) + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for start, stop in edges[edges[:, 1] - edges[:, 0] >= period * (repeats - 1)].tolist():
            inside[start : stop + period] = True
    return float(inside.mean()) if len(ids) else 0.0


ROUNDED = " up to rounding"


def label_of(rule: str, rounded: bool, distribution: str | None = None) -> str:
    """Return a rule's label over a named distribution, None for the target's own.

    The label of an exact rule ends with "up to rounding" if numbers are rounded.
    """
    rule = f"exact-for({distribution})" if distribution is not None and rule == "exact" else rule
    return rule + ROUNDED if rounded and rule.startswith("exact") else rule


def kind_of_label(label: str) -> str:
    """Return the label without distribution or bound: "exact", "exact up to rounding", .."""
    return label.partition("(")[0] + (ROUNDED if "(" in label and label.endswith(ROUNDED) else "")
