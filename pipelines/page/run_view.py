"""The values of the page of one run, and the colours of sources, the same on every page.

The eight colours are distinguishable for red-, green- and blue-blind readers too, and mostly by
lightness alone. A source without a preferred colour takes a free one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from types import MappingProxyType
from zlib import crc32

from ragspec.errors import pluralize
from ragspec.registry import entries
from ragspec.reports.generation import accepted_of, count_sources, sources_of
from ragspec.reports.report import ROUNDED, kind_of_label
from ragspec.reports.trace import Trace
from ragspec.rules.base import EXACT_FOR_LABEL, Step
from ragspec.trees.draft_tree import PREDICTION

TARGET = "target model"
COLOURS = 8
MOST_NUMBERS = 12  # columns of a chart with their number below
# Sources that are no methods: texts, and levels of methods.
OTHERS: Mapping[str, int] = MappingProxyType(
    {"prediction": 7, "corpus": 1, "history": 4, "answers": 4, "statistics": 6, "layout": 6}
)
MEANINGS = {
    "exact": "token for token the text that plain decoding gives with the same seed",
    "exact up to rounding": "that of plain decoding, save where two choices are a rounding apart",
    "exact-for up to rounding": "the distribution of plain decoding up to rounding; another sample",
    "exact-for": "the distribution of plain decoding; another sample from it",
    "bounded": "close to the target's distribution, within the stated distance",
    "approximate": "the text may differ from what the target alone would write",
}


def preferred() -> Mapping[str, int]:
    """Return the preferred colour of each name; the first of names that share one has priority."""
    methods = {name: each.method for name, each in entries("drafter")}
    record = {name: each.colour for name, each in methods.items() if each.colour is not None}
    listed = {name: record[name] for name in record if methods[name].listed}
    return MappingProxyType({**listed, **OTHERS, **record})


def colours_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the colour class of every source that drafted, the most accepted first."""
    drafted, accepted = count_sources(steps)
    slots = slots_of(drafted)
    ranked = sorted(drafted, key=lambda name: (-accepted[name], -drafted[name], name))
    return {name: f"s{slots[name]}" for name in ranked}


def slots_of(sources: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's colour; up to eight names have distinct ones."""
    names, liked = dict.fromkeys(sources), preferred()
    slots: dict[str, int] = {}
    for name in (*filter(names.__contains__, liked), *sorted(names.keys() - liked.keys())):
        first = liked.get(name, crc32(name.encode("utf-8", "replace")) % COLOURS)
        free = ((first + i) % COLOURS for i in range(COLOURS))
        slots[name] = next((slot for slot in free if slot not in slots.values()), first)
    return slots


@dataclass(frozen=True, slots=True)
class StepColumn:
    """The tokens of one step: colour class and number of each part, the lowest first."""

    number: int
    parts: list[tuple[str, int]]
    tip: str


@dataclass(frozen=True, slots=True)
class StepChart:
    """The tokens that each step emitted: the most, and the mean."""

    columns: list[StepColumn]
    most: int
    mean: float

    @property
    def every(self) -> int:
        """A round number; the columns whose number it divides have it below."""
        steps = (base * int(10**power) for power in count() for base in (1, 2, 5))
        return next(step for step in steps if len(self.columns) <= step * MOST_NUMBERS)


def first_number(steps: Sequence[Step]) -> int:
    """Return the number of the first step: 0 if it is the prefill, which has no draft."""
    return 0 if steps and "prefill" in steps[0].milliseconds else 1


def step_chart(steps: Sequence[Step], colours: Mapping[str, str]) -> StepChart:
    """Return the tokens that each step emitted, by source."""
    columns: list[StepColumn] = []
    for number, step in enumerate(steps, first_number(steps)):
        names, accepted = sources_of(step), accepted_of(step)
        counts = Counter(names[node] for node in accepted)
        counts[TARGET] = len(step.tokens) - len(accepted)
        ordered = [name for name in dict.fromkeys((*colours, TARGET)) if counts[name]]
        parts = [(colours.get(name, "own"), counts[name]) for name in ordered]
        what = ", ".join(f"{counts[name]} of {name}" for name in ordered) or "no token"
        tip = f"step {number}: {what}; {len(step.tree)} drafted"
        columns.append(StepColumn(number, parts, tip))
    lengths = [len(step.tokens) for step in steps]
    return StepChart(columns, max([1, *lengths]), sum(lengths) / max(len(steps), 1))


def where(names: Sequence[str], origin: Sequence[int], length: int = 1) -> str:
    """Return the document and tokens that drafted tokens were copied from, "" if unknown."""
    document, offset = origin
    to = f"–{offset + length - 1}" if length > 1 else ""
    if document == PREDICTION and offset >= 0:  # below 0 is the end of the prompt
        return f" · token {offset}{to}"
    if document < 0:
        return ""
    name = names[document] if document < len(names) else f"document {document}"
    return f" · {name}, token {offset}{to}"


def meaning_of(label: str) -> str:
    """Return the meaning of a label in words for people."""
    kind = kind_of_label(label)
    if kind.startswith("exact-for") and EXACT_FOR_LABEL not in label:
        distribution = label.removeprefix("exact-for(").partition(")")[0]
        but = ", save where two choices are a rounding apart" if kind.endswith(ROUNDED) else ""
        return (
            f"token for token what plain decoding by the distribution {distribution!r} gives with "
            f"its seed{but}"
        )
    return MEANINGS.get(kind, "")


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the answer from one source in one step."""

    text: str
    css: str
    tip: str
    step: int


def _spans(trace: Trace, colours: dict[str, str]) -> Iterator[Span]:
    """Yield the runs of tokens that one source drafted in one step without a jump in a document."""
    names = trace.documents
    first = first_number(trace.steps)
    for number, (step, texts) in enumerate(zip(trace.steps, trace.texts, strict=True), first):
        sources, path = sources_of(step), accepted_of(step)
        accepted = f"{pluralize(len(path), 'drafted token')} accepted"
        jumps = [i for i, pair in enumerate(pairwise(path), 1) if not _continues(step, *pair)]
        for begin, end in pairwise([0, *jumps, len(path)] if path else ()):
            source = sources[path[begin]]
            place = where(names, step.tree.origin[path[begin]].tolist(), end - begin)
            tip = f"{source}{place}\nstep {number}: {accepted}"
            yield Span("".join(texts[begin:end]), colours[source], tip, number)
        if added := "".join(texts[len(path) :]):
            yield Span(added, "own", f"{TARGET}\nstep {number}", number)


def _continues(step: Step, before: int, node: int) -> bool:
    tree = step.tree
    if tree.source[before] != tree.source[node]:
        return False
    (document, offset), (next_document, next_offset) = tree.origin[[before, node]].tolist()
    return bool(document == next_document and (document < 0 or offset + 1 == next_offset))


class RunView:
    """The values of the page template for one run.

    Attributes:
        drafters: Names and colour classes of all sources that drafted, and of the target.
        drafted, accepted: The tokens of each source; those of the target count as accepted.
        legend: The sources of the text among `drafters`.
        documents: Names of documents, and the tokens copied from each.
        stages: Milliseconds of each stage, `whole_ms` in all.
    """

    def __init__(self, trace: Trace) -> None:
        report, steps = trace.report, trace.steps
        self.trace = trace
        self.title = str(trace.extra.get("question") or trace.extra.get("prompt") or "Generation")
        self.meaning = meaning_of(report.label)
        colours = colours_of(steps)
        self.spans = list(_spans(trace, colours))
        self.chart = step_chart(steps, colours)
        self.drafters = [*colours.items(), (TARGET, "own")]
        self.drafted, self.accepted = count_sources(steps)
        self.legend = [each for each in self.drafters if self.accepted[each[0]] or each[1] == "own"]
        self.accepted[TARGET] = report.tokens - self.accepted.total()
        copied = Counter(int(step.tree.origin[i][0]) for step in steps for i in accepted_of(step))
        names = dict(enumerate(trace.documents))
        self.documents = [
            (names.get(i, f"document {i}"), count) for i, count in copied.most_common() if i >= 0
        ]
        self.stages = {name: ms for name, ms in report.milliseconds.items() if ms > 0}
        spent = sum(self.stages.values())
        self.whole_ms = max(report.seconds * 1000, spent, 1e-9)
        if self.whole_ms - spent > 0.005 * self.whole_ms:
            self.stages["other"] = self.whole_ms - spent
