"""The contents of the page of one run: strings and numbers, computed from its trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ragspec.errors import pluralize
from ragspec.pipelines.page.charts import TARGET, colours_of, first_number, step_chart
from ragspec.pipelines.page.tree_view import where
from ragspec.reports.generation import accepted_of, count_sources, sources_of
from ragspec.reports.report import ROUNDED, kind_of_label
from ragspec.reports.trace import Trace
from ragspec.rules.base import EXACT_FOR_LABEL, Step

MEANINGS = {
    "exact": "token for token the text that plain decoding gives with the same seed",
    "exact up to rounding": "that of plain decoding, save where two choices are a rounding apart",
    "exact-for up to rounding": "the distribution of plain decoding up to rounding; another sample",
    "exact-for": "the distribution of plain decoding; another sample from it",
    "bounded": "close to the target's distribution, within the stated distance",
    "approximate": "the text may differ from what the target alone would write",
}


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
        begin = 0
        for i in range(1, len(path) + 1):
            if i < len(path) and _continues(step, path[i - 1], path[i]):
                continue
            source = sources[path[begin]]
            place = where(names, step.tree.origin[path[begin]].tolist(), i - begin)
            accepted = f"{pluralize(len(path), 'drafted token')} accepted"
            tip = f"{source}{place}\nstep {number}: {accepted}"
            yield Span("".join(texts[begin:i]), colours[source], tip, number)
            begin = i
        added = "".join(texts[len(path) :])
        if added:
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
