from __future__ import annotations

import copy
from pathlib import Path

import pytest

from ragspec.drafters.combined import within
from ragspec.errors import InputError, ModelError, SamplingError
from ragspec.pipelines.cli.app import main as cli_main
from ragspec.pipelines.console.options import (
    EngineOptions,
    budget_of,
    checked_output,
    checked_text,
    drafter_of,
    prediction_of,
    sampling_of,
)
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.rest import RestDrafter
from tests.support import tiny


@pytest.mark.parametrize(
    ("text", "drafter"),
    [("none", None), ("", None), ("context", "context"), ("a, b,", ["a", "b"])],
)
def test_drafters_are_named_by_text(text: str, drafter: object) -> None:
    assert drafter_of(text) == drafter


def test_a_budget_is_a_number_or_a_name() -> None:
    assert budget_of("12") == 12
    assert budget_of("auto") == "auto"


def test_a_file_in_a_missing_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    assert checked_output(None) is None
    assert checked_output(tmp_path / "new.jsonl") == tmp_path / "new.jsonl"
    with pytest.raises(InputError, match="there is no folder"):
        checked_output(tmp_path / "no" / "new.jsonl")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    copy.deepcopy(tiny.model("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        EngineOptions(str(tmp_path), None, "none", "0", "cpu", "auto").engine()


def test_steps_of_fixed_shape_are_requested_for_by_name() -> None:
    def options(static: str) -> EngineOptions:
        return EngineOptions("starter-draft", None, "none", "0", "cpu", "float32", static=static)

    assert options("eager").engine().target.static == "eager"
    assert options("auto").engine().target.static == "off"
    with pytest.raises(InputError, match="got static='graf'; expected one of 'auto', 'off'"):
        options("graf").engine()


def test_sampling_checks_its_values() -> None:
    settings = sampling_of(0.5, 0.9, 20, 3)
    assert (settings.temperature, settings.top_p, settings.top_k, settings.seed) == (
        0.5,
        0.9,
        20,
        3,
    )
    with pytest.raises(SamplingError, match="top_p"):
        sampling_of(0.5, 0.0, 0, None)


def test_bytes_that_are_no_text_are_refused() -> None:
    assert checked_text("é") == "é"
    with pytest.raises(InputError, match="UTF-8"):
        checked_text("\udcff")


def test_a_prediction_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("as before\n", encoding="utf-8")
    assert prediction_of(f"@{file}") == "as before\n"
    assert prediction_of("the same") == "the same"
    assert prediction_of(None) is None
    with pytest.raises(InputError, match="cannot be read"):
        prediction_of(f"@{tmp_path / 'missing.txt'}")
    assert prediction_of("a", "none", "draft") == prediction_of("a", "context") == "a"
    with pytest.raises(InputError, match="got --prediction and --drafter none"):
        prediction_of("a", "none")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        prediction_of(f"@{file}")


def test_a_scope_is_drafted_from_and_needs_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = tmp_path / "model", tmp_path / "c.store"
    copy.deepcopy(tiny.model("llama")).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    CorpusIndex.build([], tiny.tokenizer(), store).close()
    common = ["--model", str(folder), "--device", "cpu"]
    (tmp_path / "a.txt").write_text("ab ab", encoding="utf-8")
    for command in (["generate", "ab"], ["ask", "ab?", "--docs", str(tmp_path / "a.txt")]):
        assert cli_main([*command, *common, "--tenant", "tenant"]) == 2
        assert "got scope 'tenant' and no store" in capsys.readouterr().err
    request = EngineOptions(str(folder), None, "rest", "8", "cpu", "auto", store, scope="tenant")
    drafter = request.engine().drafter
    assert drafter is not None
    _, rest = within(drafter)
    assert isinstance(rest, RestDrafter) and rest.scope == "tenant"
