import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.page.page import render_template, trace_page, write_page
from ragspec.reports.generation import report_of
from ragspec.reports.trace import Trace, read_trace, write_trace
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.ragspec.reports.test_trace import generation_of

EVIL = "</span><script>alert('x')</script><img src=x onerror=alert(1)>"
WORDS = ["A ", "draft ", "is ", "checked ", EVIL, "\n", "by ", "the ", "target."]


class Elements(HTMLParser):
    """Collects the elements, their attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.result: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.result.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.result if name == tag]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def sample_trace(folder: Path, **extra: Any) -> Trace:
    jump = DraftTree.chain([1, 2, 3, 6], "context", origin=[(0, 4), (0, 5), (1, 9), (1, 10)])
    steps = [
        Step(DraftTree.empty(), (), (0,), {"prefill": 20.0}),
        Step(jump, (0, 1, 2), (1, 2, 3, 4), {"draft": 1.0, "verify": 6.0}),
        Step(DraftTree.chain([5, 6], "<b>model</b>"), (0, 1), (5, 6, 7), {"verify": 6.0}),
        Step(DraftTree.chain([0], "context"), (), (8,), {"verify": 6.0}),
    ]
    run = generation_of(steps, decode, seed=3, prompt_tokens=12)
    path = folder / "trace.jsonl"
    write_trace(path, run, decode, model=EVIL, documents=["a.md", EVIL], extra=extra)
    return read_trace(path)


def policy_of(page: str) -> str:
    """Check that a page loads no file and has no inline handler; return its security policy."""
    elements = Elements(page)
    tags = {tag for tag, _ in elements.result}
    assert not tags & {"img", "link", "iframe", "object", "embed", "base", "form"}
    assert not [a for _, attrs in elements.result for a in attrs if a.startswith("on")]
    assert not [a for _, attrs in elements.result for a in attrs if a in ("src", "href")]
    assert "http" not in re.sub("http-equiv", "", page)
    policy = [str(meta["content"]) for meta in elements.named("meta") if "http-equiv" in meta]
    assert len(policy) == 1 and policy[0].startswith("default-src 'none';")
    assert "<b>model" not in page
    return policy[0]


def test_a_page_is_self_contained_and_allows_its_script_alone(tmp_path: Path) -> None:
    citation = {"document": EVIL, "start": 0, "end": 9, "text": EVIL}
    page = trace_page(sample_trace(tmp_path, question=EVIL, citations=[citation]))
    policy = policy_of(page)
    scripts = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == page.count("<script") == 1
    digest = b64encode(sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert not re.findall(r"unsafe-(?!inline)|script-src[^;]*unsafe", policy)
    assert not re.findall("innerHTML|outerHTML|insertAdjacent|eval|Function|document.write", page)
    assert EVIL not in scripts[0]
    assert EVIL in "".join(Elements(page).text)


def test_one_draft_is_visible_and_the_slider_selects_every_step(tmp_path: Path) -> None:
    elements = Elements(trace_page(sample_trace(tmp_path)))
    drafts = [each for each in elements.named("figure") if each.get("class") == "draft"]
    assert [each["data-step"] for each in drafts] == ["0", "1", "2", "3"]
    assert [each["data-step"] for each in drafts if "hidden" not in each] == ["1"]
    (slider,) = [each for each in elements.named("input") if each["type"] == "range"]
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "3", "1")
    columns = [each for each in elements.named("div") if each.get("class") == "column"]
    assert [each["data-step"] for each in columns[:4]] == ["0", "1", "2", "3"]
    script = render_template("steps.js.j2")
    names = {"#step", "#pill", "#drafts", ".draft", ".draft .token", ".steps .column"}
    names.add(".answer [data-step]")
    assert names == set(re.findall(r'(?:querySelector(?:All)?|closest)\("([^"]+)"\)', script))
    assert {str(each.get("id")) for _, each in elements.result} >= {"step", "pill", "drafts"}


def test_each_node_of_a_draft_has_a_token_and_a_tip(tmp_path: Path) -> None:
    elements = Elements(trace_page(sample_trace(tmp_path)))
    nodes = [each for each in elements.named("span") if "token" in str(each.get("class"))]
    assert len(nodes) == 4 + 7 + 4  # a root a step, the drafted nodes, the target's tokens
    assert all(node.get("aria-label") and "tabindex" in node for node in nodes)
    selected = [node for node in nodes if "kept" in str(node["class"])]
    assert len(selected) == 5
    tip = "“draft·” · context · a.md, token 4\nclaimed reach 1 · accepted"
    assert selected[0]["aria-label"] == tip
    assert "draft·" in elements.text


def test_a_run_without_drafts_needs_no_script() -> None:
    step = Step(DraftTree.empty(), (), (0,), {"verify": 6.0})
    page = trace_page(Trace((step,), (("A ",),), report_of([step], [0], 0.1, "stop")))
    assert "<script" not in page and 'class="draft"' not in page
    assert "script" not in policy_of(page)


def test_the_page_shows_the_comparison_with_plain_decoding(tmp_path: Path) -> None:
    compare: dict[str, Any] = {"seconds_plain": 2.0, "seconds": 0.5, "ratio": 4.0, "equal": False}
    compare["first_divergence"] = {"index": 7, "margin": 0.0003}
    page = trace_page(sample_trace(tmp_path, compare=compare))
    assert "part at token 7" in page and "0.0003 apart" in page and "4.00×" in page
    assert "width:100.00%" in page and "width:25.00%" in page


def test_an_empty_trace_makes_a_page() -> None:
    page = trace_page(Trace((), (), report_of([], [], 0.0, "cancelled", label="approximate")))
    assert "cancelled" in page and "approximate" in page and "No forward pass was run" in page
    assert "Tokens of each step" not in page


def test_write_page_writes_the_file_and_refuses_a_missing_folder(tmp_path: Path) -> None:
    sample_trace(tmp_path, question="Why?")
    out = tmp_path / "page.html"
    write_page(tmp_path / "trace.jsonl", out)
    page = out.read_text(encoding="utf-8")
    assert "<h1>Why?</h1>" in page and page.count('<figure class="draft"') == 4
    with pytest.raises(InputError, match="nowhere"):
        write_page(tmp_path / "trace.jsonl", tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize(
    "change",
    [
        *({"compare": each} for each in ("x", {"ratio": 2}, {"ratio": "x"})),
        *({"citations": each} for each in (1, ["x"])),
        *({"report": each} for each in ({"seconds": "x"}, {"label": 1})),
        {"report": {"milliseconds": []}},
    ],
)
def test_a_trace_with_wrong_types_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    sample_trace(tmp_path)
    path, out = tmp_path / "trace.jsonl", tmp_path / "page.html"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[-1]["report"] |= change.pop("report", {})
    lines[0] |= change
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    with pytest.raises(InputError, match=r"trace\.jsonl' is damaged"):
        write_page(path, out)
    assert not out.exists()
