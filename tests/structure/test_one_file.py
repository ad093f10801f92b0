"""A new method is one file and one line of the registry: a toy of each kind."""

import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ragspec import Engine, registry
from ragspec.bridge import Speculation
from ragspec.drafters.method import Sources, build
from ragspec.errors import InputError, MissingExtraError
from ragspec.pipelines import Answer, build_prompt
from ragspec.pipelines.answering.answerer import Answerer, Question
from ragspec.pipelines.bench.cli import TextBenchOptions
from ragspec.pipelines.bench.images import parse_variant
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.console.options import PlaceOptions, StoreOptions
from ragspec.pipelines.methods import compose, method_rows
from ragspec.pipelines.page.run_view import slots_of
from ragspec.retrievers.search.fusion import as_retriever
from ragspec.visual.checks import relaxed
from ragspec.visual.rules.by_name import make_rule
from tests.structure.wheel import ROOT
from tests.support import tiny, tiny_images
from tests.support.codes import codebook

GUIDE = ROOT / "CONTRIBUTING.md"
DRAFTER = """
from ragspec.drafters.base import Drafter, DraftSession
from ragspec.drafters.method import Method
from ragspec.trees.draft_tree import DraftTree

class Toy(Drafter, DraftSession):
    name = "toy"
    method = Method("the last token, repeated", "none", colour=6)

    def open(self, request):
        return self

    def propose(self, context, budget):
        return DraftTree.chain(context.tokens[-1:] * min(budget, context.remaining), self.name)
"""

RULE = """
from ragspec.rules.walk import Walk

class Nearly(Walk):
    name, label, relaxed_by = "nearly", "approximate", "slack"

    def __init__(self, slack=1.0):
        self.slack = slack
"""


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the file of each and add its line to the registry."""
    lines = {"drafter": ("toy", DRAFTER, "Toy"), "rule": ("nearly", RULE, "Nearly")}
    tables: dict[str, Any] = dict(registry.NAMES)
    for kind, (name, code, what) in lines.items():
        (tmp_path / f"{name}_of_a_user.py").write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"{name}_of_a_user", raising=False)
        tables[kind] = {**registry.NAMES[kind], name: f"{name}_of_a_user:{what}"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "NAMES", MappingProxyType(tables))


def test_a_registered_drafter_drafts_and_is_listed() -> None:
    model = tiny.model("llama")
    engine = Engine(model, drafter="toy", budget=4)
    result = engine.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True)
    plain = Engine(model, drafter=None).generate([5, 6, 7], max_new_tokens=12, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert result.report.drafted_by_source["toy"] > 0
    assert registry.resolve("drafter", "toy").method.paper == "none"
    assert [each.name for each in compose("toy", Sources())] == ["toy"]
    assert [each.name for each in build("toy", Sources())] == ["toy"]
    assert TextBenchOptions(PlaceOptions(), StoreOptions(), variants="toy").variants == "toy"
    assert "the last token, repeated" in {cell for row in method_rows() for cell in row}
    assert slots_of(["toy"]) == {"toy": 6}
    assert Speculation(drafter="toy").drafter == "toy"


def test_a_registered_rule_takes_its_settings() -> None:
    rule: Any = make_rule("nearly", codebook(64), slack=2.0)
    assert (rule.name, rule.slack) == ("nearly", 2.0)
    assert relaxed()["nearly"] == "slack"
    assert parse_variant("nearly@0.5") == ("nearly@0.5", "nearly", {"slack": 0.5}, None)
    with pytest.raises(InputError, match="'nearly' has no delta; it takes slack"):
        make_rule("nearly", codebook(64), delta=0.1)


def test_an_answerer_is_a_class_with_one_method() -> None:
    """It reads the best passage; the base class searches, streams and cites."""

    class FirstSentence(Answerer):
        def _write(self, question: Question) -> Answer:
            hit = question.search.hits[0]
            tokenizer = self.engine.tokenizer
            prompt = build_prompt(tokenizer, question.text, [hit], template=self.template)
            return self.answer_of(question, prompt, self._generate(prompt, question))

    def search(question: str) -> list[tuple[str, float, dict[str, str]]]:
        return [("The walk follows the tokens of the target.", 1.0, {"name": "rules.md"})]

    model = tiny.model("llama", max_position_embeddings=1024)
    reader = FirstSentence(Engine(model, tiny.tokenizer()), as_retriever(search))
    pieces: list[str] = []
    answer = reader.ask("What does it follow?", max_new_tokens=8, stream=pieces.append)
    assert "".join(pieces) == answer.text
    assert [hit.passage.text for hit in answer.passages] == [search("")[0][0]]
    with pytest.raises(InputError, match="question"):
        reader.ask(" ")


FAMILY = """
from ragspec.visual.families.llamagen import LlamaGen

class ToyFamily(LlamaGen):
    pass
"""


def test_entry_points_add_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny installed package brings drafters, a rule and a family; broken ones are skipped."""
    site = tmp_path / "site"
    info = site / "toy_ragspec-1.0.dist-info"
    info.mkdir(parents=True)
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    module = DRAFTER.replace('"toy"', '"outside"') + RULE + FAMILY + example
    (site / "toy_ragspec.py").write_text(module, encoding="utf-8")
    extra = "from ragspec.errors import MissingExtraError\nraise MissingExtraError('Install it.')"
    (site / "toy_extra.py").write_text(extra)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-ragspec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ragspec.drafters]\noutside = toy_ragspec:Toy\ncontext = toy_ragspec:Toy\n"
        "echo = toy_ragspec:EchoDrafter\nabsent = no_such_module:Toy\nvague = math:pi\n"
        "needy = toy_extra:Toy\n"
        "[ragspec.rules]\noutside-rule = toy_ragspec:Nearly\nvague-rule = math:pi\n"
        "[ragspec.families]\noutside-family = toy_ragspec:ToyFamily\nvague-family = math:pi\n"
    )
    monkeypatch.syspath_prepend(str(site))
    model = tiny.model("llama")
    with pytest.warns(UserWarning, match="got 'context', which ragspec has"):
        engine = Engine(model, drafter=["outside", "echo"], budget=4)
        result = engine.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True)
        TextBenchOptions(PlaceOptions(), StoreOptions(), variants="outside")  # is a known one
        assert registry.resolve("drafter", "context").__name__ == "ContextDrafter"
    assert min(result.report.drafted_by_source[name] for name in ("outside", "echo")) > 0
    for kind, name in (("drafter", "absent"), ("drafter", "vague"), ("rule", "vague-rule")):
        with pytest.warns(UserWarning, match=f"got {name} = .*skipped"):
            assert name not in dict(registry.entries(kind))
    with pytest.warns(UserWarning), pytest.raises(InputError, match="got vague = math:pi: 'float'"):
        Engine(model, drafter="vague")
    with pytest.warns(UserWarning), pytest.raises(MissingExtraError, match=r"^Install it"):
        Engine(model, drafter="needy")
    rule: Any = make_rule("outside-rule", codebook(64), slack=2.0)
    assert rule.slack == 2.0
    family = registry.resolve("family", "outside-family")
    out = tmp_path / "out"
    words = ["draw", "--class", "1", "--family", "outside-family", "--seed", "1"]
    folder = tiny_images.save(tmp_path / "images")
    assert main([*words, "--model", str(folder), "--out", str(out)]) == 0
    assert list(out.glob("*.png")) and family.__name__ == "ToyFamily"
