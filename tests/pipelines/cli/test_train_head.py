"""`ragspec train-head`: from texts or codes to a head that drafts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.cli.app import main
from tests.support import heads, tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(tiny.TEXT[number * 50 :][:300], encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["train-head", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def small(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    options = ["--data", str(data), "--out", str(out), "--model", str(model), "--steps", "4"]
    return [*options, "--batch", "2", "--length", "32", *more]


def test_texts_become_a_head(model: Path, texts: Path, tmp_path: Path, capsys: Capture) -> None:
    from ragspec.drafters.eagle.drafter import HeadDrafter
    from ragspec.engine.engine import Engine
    from ragspec.models.load import load_model

    out = tmp_path / "head"
    code, printed, err = run(capsys, *small(model, texts, out, "--json"))
    assert code == 0, err
    match: dict[str, Any] = json.loads(printed)
    assert match["steps"] == 4
    assert match["texts"] == 3
    assert 0.0 <= match["agreement"] <= 1.0
    loaded, _ = load_model(model)
    engine = Engine(loaded, drafter=HeadDrafter(out, loaded, min_expected_gain=0.0), budget=4)
    result = engine.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    plain = Engine(loaded, drafter=None).generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert any(len(step.tree) for step in result.steps)


def test_a_person_is_reported_how_good_it_is(
    model: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, printed, err = run(capsys, *small(model, texts, tmp_path / "head"))
    assert code == 0
    assert "after 4 steps" in printed
    assert "loss" in err
    assert "25%, step 1:" in err and "100%, step 4:" in err and "step 0:" not in err
    code, printed, _ = run(capsys, *small(model, texts, tmp_path / "head", "--minutes", "0.001"))
    assert code == 0  # a head may be replaced


def test_prefill_may_end_early(model: Path, texts: Path, tmp_path: Path, capsys: Capture) -> None:
    more = ["--json", "--max-tokens", "40"]
    code, printed, _ = run(capsys, *small(model, texts, tmp_path / "head", *more))
    assert code == 0
    assert json.loads(printed)["tokens"] == 40


def test_codes_become_a_head(tmp_path: Path, capsys: Capture) -> None:
    import numpy as np

    from ragspec.visual.pipeline.folder import load_model
    from tests.support import image_models

    folder = tmp_path / "model"
    image_models.model("class").save_pretrained(folder)
    rng = np.random.default_rng(3)
    codes = rng.integers(0, image_models.BOOK, (24, 16))
    np.savez(tmp_path / "codes.npz", codes=codes, labels=np.arange(24) % 3)
    out = tmp_path / "head"
    code, printed, err = run(capsys, *small(folder, tmp_path / "codes.npz", out, "--json"))
    assert code == 0, err
    result = json.loads(printed)
    assert (result["texts"], result["tokens"], result["kept_apart"]) == (24, 24 * 17, 2)
    from ragspec.drafters.eagle.drafter import HeadDrafter

    instance = HeadDrafter(out, image_models.target(load_model(folder), 3.0))
    assert instance.head.config.vocab_size == image_models.BOOK


@pytest.mark.parametrize("case", ["missing", "other files", "a file", "no text", "bad codes"])
def test_what_cannot_be_done_is_said(
    case: str, model: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, data = tmp_path / "head", texts
    if case == "missing":
        data = tmp_path / "nowhere"
    elif case == "other files":
        out.mkdir()
        (out / "mine.txt").write_text("mine", encoding="utf-8")
    elif case == "a file":
        out.write_text("mine", encoding="utf-8")
    elif case == "no text":
        data = tmp_path / "empty"
        data.mkdir()
        (data / "short.txt").write_text("a", encoding="utf-8")
    else:
        data = tmp_path / "codes.npz"
        data.write_bytes(b"nothing")
    code, printed, err = run(capsys, *small(model, data, out))
    assert code == 2
    assert printed == ""
    assert "expected" in err or "check the path" in err
    if case == "other files":
        assert [path.name for path in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--minutes", "0"), ("--minutes", "-1"), ("--rate", "-1"), ("--rate", "nan")],
)
def test_numbers_out_of_range_are_reported_by_their_option(
    option: str, value: str, model: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, _, err = run(capsys, *small(model, texts, tmp_path / "head", option, value))
    assert code == 2
    assert f"{option} is {value}; expected" in " ".join(err.split())
    assert "HeadTraining" not in err


def test_a_head_of_another_model_is_not_taken_for_one(tmp_path: Path) -> None:
    from ragspec.errors import InputError
    from ragspec.pipelines.cli.train_head_run import check_out
    from ragspec.verification.causal import CausalTarget

    heads.fresh(CausalTarget(heads.model())).save(tmp_path / "head")
    check_out(tmp_path / "head")
    tiny.model().save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="other files"):
        check_out(tmp_path / "model")
