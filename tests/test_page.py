from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ragspec.draft import DraftTree, Step
from ragspec.errors import InputError
from ragspec.pipelines.page import render, write_page
from ragspec.pipelines.runview import run_view
from ragspec.report import ReportBuilder
from ragspec.tracefile import Trace, TraceHeader, read_trace, write_trace
from tests.test_tracefile import Run

EVIL = "</span><script>alert('x')</script><img src=x onerror=alert(1)>"
WORDS = ["A ", "draft ", "is ", "checked ", EVIL, "\n", "by ", "the ", "target."]


class Elements(HTMLParser):
    """Collects the elements, their attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def sample_run() -> Run:
    jump = DraftTree.chain([1, 2, 3, 6], "context", origin=[(0, 4), (0, 5), (1, 9), (1, 10)])
    steps = [
        Step(DraftTree.empty(), (), (0,), {"prefill": 20.0}),
        Step(jump, (0, 1, 2), (1, 2, 3, 4), {"draft": 1.0, "verify": 6.0}),
        Step(DraftTree.chain([5, 6], "<b>model</b>"), (0, 1), (5, 6, 7), {"verify": 6.0}),
        Step(DraftTree.chain([0], "context"), (), (8,), {"verify": 6.0}),
    ]
    builder = ReportBuilder("exact", 3, 12)
    builder.prefill(20.0)
    for step in steps[1:]:
        builder.step(step)
    return Run(steps, builder.build([0, 1, 2, 3, 4, 5, 6, 7, 8], 0.05, "stop"))


def sample_trace(folder: Path, **extra: Any) -> Trace:
    path = folder / "trace.jsonl"
    documents = ["a.md", EVIL]
    write_trace(path, sample_run(), decode, model=EVIL, documents=documents, extra=extra)
    return read_trace(path)


def test_page_is_self_contained_and_runs_nothing(tmp_path: Path) -> None:
    citation = {"document": EVIL, "start": 0, "end": 9, "text": EVIL}
    page = render(run_view(sample_trace(tmp_path, question=EVIL, citations=[citation])))
    elements = Elements(page)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "b"}.difference({"b"})
    assert not [a for _, attrs in elements.found for a in attrs if a.startswith("on")]
    assert not [a for _, attrs in elements.found for a in attrs if a in ("src", "href")]
    assert "http" not in re.sub("http-equiv", "", page)
    policy = [meta.get("content") for meta in elements.named("meta") if "http-equiv" in meta]
    assert policy and "default-src 'none'" in str(policy[0]) and "script" not in str(policy[0])
    assert "<script" not in page and "<b>model" not in page
    assert EVIL in "".join(elements.text)


def test_comparison_is_shown(tmp_path: Path) -> None:
    compare: dict[str, Any] = {"seconds_plain": 2.0, "seconds": 0.5, "ratio": 4.0, "equal": False}
    compare["first_divergence"] = {"index": 7, "margin": 0.0003}
    page = render(run_view(sample_trace(tmp_path, compare=compare)))
    assert "part at token 7" in page and "0.0003 apart" in page and "4.00×" in page
    assert "width:100.00%" in page and "width:25.00%" in page


def test_empty_and_unfinished_traces_make_a_page() -> None:
    builder = ReportBuilder("approximate", None, 1)
    report = builder.build([], 0.0, "cancelled")
    page = render(run_view(Trace(TraceHeader(), (), (), report, complete=False)))
    assert "the trace is cut short" in page and "approximate" in page


def test_write_page_makes_the_file_and_names_its_errors(tmp_path: Path) -> None:
    sample_trace(tmp_path, question="Why?")
    out = tmp_path / "page.html"
    write_page(tmp_path / "trace.jsonl", out)
    assert "<h1>Why?</h1>" in out.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="nowhere"):
        write_page(tmp_path / "trace.jsonl", tmp_path / "nowhere" / "page.html")


def test_templates_are_packed_into_the_wheel(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]
    assert "*.j2" in data.get("ragspec.pipelines", [])
