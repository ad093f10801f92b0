"""Every page in a real browser on a narrow screen: nothing overflows, is tiny, or fails."""

import html
import importlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.bench.answers import AnswerRow, summary
from ragspec.pipelines.page.page import render_template, trace_page
from ragspec.reports.report import Event, Retrieval
from tests.pipelines.page.test_page import sample_trace

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
LONG = "a-category_with-a-long.name:of:one/word" * 2
ARABIC = "ما اسم المدينة."
PROBE = """
const failures = [], root = document.documentElement;
addEventListener("error", (event) => failures.push(event.message));
addEventListener("securitypolicyviolation", (event) => failures.push(event.violatedDirective));
addEventListener("load", () => setTimeout(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const parts = ".column, .answer [data-step], .draft .token, #step";
  for (const each of document.querySelectorAll(parts))
    for (const kind of ["pointerover", "input", "click"])
      each.dispatchEvent(new Event(kind, { bubbles: true }));
  if (innerWidth !== 400 || root.scrollWidth > 400)
    failures.push(`${root.scrollWidth} of ${innerWidth} wide`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.getClientRects().length) continue;
    const scale = element.ownerSVGElement ? element.getScreenCTM().a : 1;
    const size = scale * parseFloat(getComputedStyle(element).fontSize);
    if (size < 11) failures.push(`${size} px: ${text}`);
    const range = document.createRange(), node = texts.currentNode;
    const begin = node.data.indexOf(text);
    const [first, last] = [begin, begin + text.length - 1].map((at) => {
      range.setStart(node, at); range.setEnd(node, at + 1); return range.getBoundingClientRect();
    });
    if (/^[\u0590-\u08ff]/.test(text) && last.left > first.left && last.top === first.top)
      failures.push(`ends at the right: ${text}`);
  }
  parent.postMessage(failures, "*");
}));
"""
# A window of the browser is at least 500 pixels wide.
FRAME = """<iframe src="page.html" width="400" height="900" style="border: 0"></iframe><script>
addEventListener("message", (event) => document.body.dataset.failures = JSON.stringify(event.data));
</script>"""


def failures_of(page: str, folder: Path) -> list[str]:
    """Return the failures on a page of 400 pixels; the policy is changed to allow the probe."""
    digest = b64encode(sha256(PROBE.encode()).digest()).decode()
    before, after = ("script-src ", " ") if "script-src " in page else ("base-uri ", "; base-uri ")
    page = page.replace(before, f"script-src 'sha256-{digest}'{after}", 1)
    page = page.replace("<title>", f"<script>{PROBE}</script><title>", 1)
    (folder / "page.html").write_text(page, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--dump-dom", (folder / "frame.html").as_uri()]
    dump = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()
    (failures,) = re.findall('data-failures="(.*?)"', dump)
    result: list[str] = json.loads(html.unescape(failures))
    return result


def trace(folder: Path) -> str:
    compare = {"seconds_plain": 2.0, "seconds": 0.5, "ratio": 4.0, "equal": True}
    citation = {"document": LONG, "start": 0, "end": 9, "text": LONG}
    quoted = citation | {"text": ARABIC}
    parsed = sample_trace(folder, question=LONG, citations=[citation, quoted], compare=compare)
    events = [Event("write", 0.0, 9.0), Event("search", 9.0, 3.0)]
    parsed = replace(parsed, report=replace(parsed.report, retrieval=Retrieval(events=events)))
    return trace_page(parsed)


def arabic(folder: Path) -> str:
    """Return a page whose question and answer are written from right to left."""
    parsed = sample_trace(folder, question=ARABIC)
    texts = (*(("",) * len(each) for each in parsed.texts[:-1]), (ARABIC,))
    return trace_page(replace(parsed, texts=texts))


def answers(count: int) -> str:
    """Return the page of `bench answers` over `count` questions."""
    known = ("passages", "sentences", "right", "refused")
    rest: dict[str, Any] = {"support": "unsupported", "seconds": 1.0, "tokens": 9, "per_forward": 1}
    rows = [
        AnswerRow(
            question=text, answer=text, answers=(text,) * number, texts=(text, ARABIC), **more
        )
        for number, text in enumerate((LONG * 3, ARABIC, "Why?"))
        for more in (rest | dict.fromkeys(known, True), rest | dict.fromkeys(known, False))
    ][:count]
    facts = {"model": LONG, "questions": LONG}
    return render_template("answers.html.j2", facts=facts, figures=summary(rows), rows=rows)


def benchmarks(name: str) -> str:
    """Return a page of the benchmarks with charts of every kind."""
    charts, scatter, pages, couplings = (
        importlib.import_module(f"evaluation.{each}")
        for each in ("line_charts", "scatter", "pages", "couplings")
    )
    points = [charts.Point(length, 1.0 + length / 9000, 9) for length in (2000, 4000, 8000, 32000)]
    lines = charts.line_chart({LONG[:24]: points}, {LONG[:24]: "s1"}, width=440, height=210)
    place = scatter.QualityPoint(LONG, LONG, 1.5, 2.0, 1.0, 3.0)
    grid = couplings.grid([["accepted"] * 4] * 4, [[0.5] * 4] * 4)
    part = {"title": LONG, "hint": LONG, "speed": lines, "small": [(LONG, lines)] * 2}
    panel = {"name": LONG, "note": LONG, "picture": "data:,", "map": "data:,", "grid": grid}
    values: dict[str, Any] = {"summary": LONG, "shown_text": LONG, "over": LONG, "pictures": True}
    values |= {"parts": [part], "panels": [panel] * 3, "by_row": lines, "by_step": lines}
    values |= {"columns": ["variant", ">seconds"] * 6, "rows": [[LONG, "1.0"] * 6]}
    values["tables"] = [(LONG, values["rows"])]
    values["quality"] = scatter.scatter([place], {LONG: "s1"}, (1.0, 2.0))
    values["meanings"] = [(LONG, "s1")]
    page: str = pages.render_template(name, **values)
    return page


PAGES: dict[str, Callable[[Path], str]] = {
    "trace": trace,
    "arabic": arabic,
    "answers": lambda folder: answers(6),
    "no answers": lambda folder: answers(0),
    "images": lambda folder: benchmarks("images.html.j2"),
    "latents": lambda folder: benchmarks("latents.html.j2"),
    "lengths": lambda folder: benchmarks("lengths.html.j2"),
}


@pytest.mark.parametrize("name", PAGES)
def test_on_a_narrow_screen_nothing_overflows_is_tiny_or_fails(
    name: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    assert failures_of(PAGES[name](tmp_path), tmp_path) == []


def test_the_probe_detects_failures(tmp_path: Path) -> None:
    wrong = '<p style="font-size: 10px; width: 900px">small</p>'
    page = trace(tmp_path).replace("</main>", wrong + "<script>nothing()</script></main>")
    assert len(failures_of(page, tmp_path)) == 3
