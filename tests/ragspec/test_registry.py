"""Names that lead somewhere, and packages that are not installed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from ragspec.errors import MissingExtraError
from ragspec.pipelines.cli.app import main
from ragspec.registry import EXTRAS, door, for_extra

ROOT = Path(__file__).parents[2]


def test_every_extra_that_is_named_brings_its_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        "PIL": "pillow",
        "pyarrow": "datasets",
        "faiss": "faiss-cpu",
        "prometheus_client": "prometheus-client",
        "langchain_core": "langchain-core",
        "llama_index": "llama-index-core",
        "haystack": "haystack-ai",
        "lm_eval": "lm-eval",
    }  # by another name, or along with another
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        required = [re.split(r"[\[<>=~; ]", text)[0] for text in extras[extra]]
        assert named.get(package, package) in required


def test_a_missing_package_is_said_with_the_extra_that_brings_it() -> None:
    found = for_extra(ModuleNotFoundError("no", name="diffusers.utils"))
    assert isinstance(found, MissingExtraError)
    assert "pip install 'ragspec[images]'" in str(found)
    other = ModuleNotFoundError("no", name="somebody")
    assert for_extra(other) is other
    assert for_extra(ModuleNotFoundError("no")) is not None


def test_the_door_and_the_command_line_say_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "toy_room", type(sys)("toy_room"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "needs_datasets.py").write_text("import datasets\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    get, _ = door("toy_room", {"Thing": "needs_datasets"})
    with pytest.raises(MissingExtraError, match=r"ragspec\[data\]"):
        get("Thing")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "state.json").write_text("{}")
    out = str(tmp_path / "corpus")
    assert main(["store", "build", str(tmp_path / "set"), "--out", out]) != 0
    assert "pip install 'ragspec[data]'" in capsys.readouterr().err
