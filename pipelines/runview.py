"""What a page shows of one run: plain strings and numbers, computed from its trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.draft import Step
from ragspec.tracefile import Trace

TARGET = "target model"
COLOURS = 6
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_BOTTOM = 960, 168, 34, 22
MEANINGS = {
    "exact": "token for token the text that plain decoding gives with the same seed",
    "exact-for": "the same law of outputs as plain decoding; another sample from it",
    "bounded": "close to the target's law, within the stated distance",
    "approximate": "the text may differ from what the target alone would write",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the answer that one source gave in one step; `lead` is the space before it."""

    lead: str
    text: str
    css: str
    tip: str

    @classmethod
    def of(cls, text: str, css: str, tip: str) -> Span:
        """Return the span of `text`, its leading space kept apart so that it gets no colour."""
        rest = text.lstrip()
        return cls(text[: len(text) - len(rest)], rest, css, tip)


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of a chart, in the chart's units, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    css: str
    tip: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Tokens per step as bars; `mean` is the height of the line of the mean."""

    bars: list[Bar]
    rows: list[Tick]
    columns: list[Tick]
    mean: float
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT
    left: int = CHART_LEFT
    bottom: int = CHART_BOTTOM


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a stacked bar, or one row of a table: a name, an amount, its percentage."""

    name: str
    css: str
    amount: float
    percent: float
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunView:
    """All that the template needs of one run."""

    title: str
    label: str
    meaning: str
    figures: list[tuple[str, str]]
    spans: list[Span]
    legend: list[tuple[str, str]]
    chart: Chart
    stages: list[Share]
    whole_ms: float
    sources: list[Share]
    documents: list[Share]
    citations: list[dict[str, Any]]
    compare: dict[str, Any] | None
    steps: list[tuple[int, int, int, str, str]]
    note: str | None
    facts: list[tuple[str, str]] = field(default_factory=list)


def run_view(trace: Trace) -> RunView:
    """Return what the page shows of a trace."""
    report, header = trace.report, trace.header
    colours = colours_of(trace.steps)
    spent = {name: ms for name, ms in report.milliseconds.items() if ms > 0}
    whole = max(report.seconds * 1000, sum(spent.values()), 1e-9)
    if whole - sum(spent.values()) > 0.005 * whole:
        spent["other"] = whole - sum(spent.values())
    return RunView(
        title=str(header.extra.get("question") or header.extra.get("prompt") or "Generation"),
        label=report.label,
        meaning=MEANINGS.get(report.label.split("(")[0], ""),
        figures=_figures(trace),
        spans=list(_spans(trace, colours)),
        legend=[*((name, css) for name, css in colours.items()), (TARGET, "own")],
        chart=_chart(trace.steps, colours),
        stages=[Share(n, f"t-{n}", ms, 100 * ms / whole) for n, ms in spent.items()],
        whole_ms=whole,
        sources=_sources(trace, colours),
        documents=_documents(trace),
        citations=list(header.extra.get("citations") or ()),
        compare=header.extra.get("compare"),
        steps=_steps(trace),
        note=report.reason,
        facts=_facts(trace),
    )


def colours_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the class of colour of every source that kept a token, the most useful first."""
    kept: Counter[str] = Counter()
    for step in steps:
        names, source = step.tree.sources, step.tree.source
        kept.update(names[source[node]] for node in step.path)
    return {name: f"s{i % COLOURS}" for i, (name, _) in enumerate(kept.most_common())}


def first_number(steps: Sequence[Step]) -> int:
    """Return the number of the first step: 0 where it is the prefill, which drafts nothing."""
    return 0 if steps and "prefill" in steps[0].milliseconds else 1


def _figures(trace: Trace) -> list[tuple[str, str]]:
    report = trace.report
    figures = [
        ("tokens", f"{report.tokens}"),
        ("forward passes", f"{report.forwards}"),
        ("tokens a step", f"{report.mean_accepted_length:.2f}"),
        ("drafts accepted", f"{report.draft_acceptance_rate:.0%}"),
        ("seconds", f"{report.seconds:.2f}"),
        ("tokens / s", f"{report.tokens_per_second:.0f}"),
    ]
    ratio = (trace.header.extra.get("compare") or {}).get("ratio")
    return [*figures, ("speed-up", f"{ratio:.2f}×")] if ratio else figures


def _facts(trace: Trace) -> list[tuple[str, str]]:
    report, header = trace.report, trace.header
    sizes = ", ".join(f"{size} × {n}" for size, n in sorted(report.budget_sizes.items()))
    facts = [
        ("model", header.model or "not named"),
        ("seed", "none" if report.seed is None else str(report.seed)),
        ("prompt", f"{report.prompt_tokens} tokens"),
        ("ended by", report.finish_reason if trace.complete else "the trace is cut short"),
        ("budget", f"{report.budget} (nodes × steps: {sizes})"),
        ("distinct 4-grams", f"{report.distinct_4:.0%}"),
        ("inside loops", f"{report.loop_share:.0%}"),
    ]
    failed = ", ".join(f"{name} {n}" for name, n in report.faults.items())
    return [*facts, ("drafters that failed", failed)] if failed else facts


def _spans(trace: Trace, colours: dict[str, str]) -> Iterator[Span]:
    """Join the tokens that one source gave in one step without a jump in its document."""
    names = trace.header.documents
    first = first_number(trace.steps)
    for number, (step, texts) in enumerate(zip(trace.steps, trace.texts, strict=True), first):
        tree, path = step.tree, step.path[: len(step.tokens)]
        begin = 0
        for i in range(1, len(path) + 1):
            if i < len(path) and _continues(step, path[i - 1], path[i]):
                continue
            source = tree.sources[tree.source[path[begin]]]
            where = _where(names, tree.origin[path[begin]].tolist(), i - begin)
            tip = f"{source}{where}\nstep {number}: {len(path)} drafted tokens accepted"
            yield Span.of("".join(texts[begin:i]), colours[source], tip)
            begin = i
        own = "".join(texts[len(path) :])
        if own:
            yield Span.of(own, "own", f"{TARGET}\nstep {number}")


def _continues(step: Step, before: int, node: int) -> bool:
    tree = step.tree
    if tree.source[before] != tree.source[node]:
        return False
    (document, offset), (next_document, next_offset) = tree.origin[[before, node]].tolist()
    if document < 0 or next_document < 0:
        return bool(document == next_document)
    return bool(document == next_document and offset + 1 == next_offset)


def _where(names: Sequence[str], origin: Sequence[int], length: int) -> str:
    document, offset = origin
    if document < 0:
        return ""
    name = names[document] if document < len(names) else f"document {document}"
    to = f"–{offset + length - 1}" if length > 1 else ""
    return f" · {name}, token {offset}{to}"


def _chart(steps: Sequence[Step], colours: dict[str, str]) -> Chart:
    longest = max((len(step.tokens) for step in steps), default=1)
    slot = (CHART_WIDTH - CHART_LEFT) / max(len(steps), 24)
    width = max(slot - min(3.0, slot / 4), 0.5)
    unit = (CHART_HEIGHT - CHART_BOTTOM - 8) / longest
    base = CHART_HEIGHT - CHART_BOTTOM
    bars: list[Bar] = []
    first = first_number(steps)
    for place, step in enumerate(steps):
        x, top, kept = CHART_LEFT + place * slot, float(base), step.path[: len(step.tokens)]
        parts = Counter(step.tree.sources[step.tree.source[node]] for node in kept)
        pieces = [(colours[name], name, n) for name, n in parts.items()]
        pieces.append(("own", TARGET, len(step.tokens) - len(kept)))
        for css, name, n in pieces:
            top -= n * unit
            tip = f"step {first + place}: {n} of {name}, {len(step.tree)} drafted"
            bars.append(Bar(round(x, 2), round(top, 2), round(width, 2), n * unit, css, tip))
    plain = [step for step in steps if "prefill" not in step.milliseconds]
    mean = sum(len(step.tokens) for step in plain) / max(len(plain), 1)
    rows = [Tick(round(base - n * unit, 2), str(n)) for n in _ticks(longest, 5)]
    columns = [
        Tick(round(CHART_LEFT + (n - first + 0.5) * slot, 2), str(n))
        for n in _ticks(len(steps) - 1 + first, 12)
    ]
    return Chart(bars, rows, columns, round(base - mean * unit, 2))


def _ticks(largest: int, most: int) -> list[int]:
    """Return at most `most` round numbers from 1 or the step up to `largest`."""
    if largest < 1:
        return []
    steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
    step = next(step for step in steps if largest / step <= most)
    return list(range(step, largest + 1, step))


def _sources(trace: Trace, colours: dict[str, str]) -> list[Share]:
    report = trace.report
    names = sorted(report.drafted_by_source, key=lambda n: -report.accepted_by_source.get(n, 0))
    rows = []
    for name in names:
        kept, drafted = report.accepted_by_source.get(name, 0), report.drafted_by_source[name]
        more = (str(drafted), f"{kept / drafted:.0%}")
        share = 100 * kept / max(report.tokens, 1)
        rows.append(Share(name, colours.get(name, "none"), kept, share, more))
    own = report.tokens - report.accepted
    return [*rows, Share(TARGET, "own", own, 100 * own / max(report.tokens, 1), ("", ""))]


def _documents(trace: Trace) -> list[Share]:
    counts: Counter[int] = Counter()
    for step in trace.steps:
        kept = step.path[: len(step.tokens)]
        counts.update(int(step.tree.origin[node][0]) for node in kept)
    names, tokens = trace.header.documents, max(trace.report.tokens, 1)
    return [
        Share(names[i] if i < len(names) else f"document {i}", "", n, 100 * n / tokens)
        for i, n in counts.most_common()
        if i >= 0
    ]


def _steps(trace: Trace) -> list[tuple[int, int, int, str, str]]:
    rows = []
    first = first_number(trace.steps)
    for number, (step, texts) in enumerate(zip(trace.steps, trace.texts, strict=True), first):
        spent = " · ".join(f"{k} {v:.1f}" for k, v in step.milliseconds.items())
        kept = min(len(step.path), len(step.tokens))
        rows.append((number, len(step.tree), kept, "".join(texts), spent))
    return rows
