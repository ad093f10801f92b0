"""`ragspec draw` at work: pictures, figures, comparison with plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from ragspec.errors import InputError
from ragspec.pipelines.cli import draw_run as drawing
from ragspec.pipelines.cli.draw_run import draw_images, load_pipeline
from ragspec.pipelines.cli.drawn import Asked
from ragspec.pipelines.console.terminal import Terminal
from tests.support import tiny_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))


def asked(folder: Path) -> Asked:
    return Asked(
        prompts=(),
        classes=("red", "2"),
        image_set=None,
        model=str(folder),
        drafter=("starter",),
        rule="exact",
        settings={"delta": None},
        budget=6,
        count=2,
        seed=3,
        guidance=2.0,
        temperature=1.0,
        top_k=0,
        device="cpu",
        dtype="float32",
    )


def test_a_comparison_draws_the_images_that_one_batch_draws(folder: Path, tmp_path: Path) -> None:
    what = asked(folder)
    found = []
    for compare in (True, False):
        out, figures = tmp_path / str(compare), tmp_path / "figures.json"
        draw_images(what, out, figures, compare, Terminal(quiet=True))
        found.append(json.loads(figures.read_text(encoding="utf-8")))
    both, alone = found
    assert both["label"] == alone["label"] == "exact"
    assert both["equal"] is True and both["equal_images"] == 4 and both["tv_excess"] == 0.0
    assert both["forwards"] < both["forwards_plain"] == 4 * tiny_images.SIDE**2
    assert both["seconds"] > 0 and both["seconds_plain"] > 0 and both["ratio"] > 0
    assert alone["forwards_plain"] is None and alone["equal"] is None
    assert alone["model"] == str(folder) and alone["drafter_used"] == "model"
    used = [alone[name] for name in ("device", "dtype", "budget", "temperature", "top_k")]
    assert used == ["cpu", "float32", 6, what.temperature, what.top_k]
    assert both["seeds"] == alone["seeds"] and len(set(both["seeds"])) == 4
    for one, two in zip(both["images"], alone["images"], strict=True):
        assert Path(one).read_bytes() == Path(two).read_bytes()


def test_every_picture_is_written(folder: Path, tmp_path: Path) -> None:
    draw_images(asked(folder), tmp_path / "new" / "out", None, True, Terminal(quiet=True))
    names = {path.name: Image.open(path).size for path in (tmp_path / "new" / "out").iterdir()}
    stem = "red-blue-3-exact"
    assert set(names) == {f"{stem}-{n}.png" for n in range(4)} | {
        f"{stem}-sheet.png",
        f"{stem}-compare.png",
    }
    assert names[f"{stem}-0.png"] == (6, 6)
    assert min(names[f"{stem}-compare.png"]) > 500


def test_relaxed_drawing_is_told_apart(folder: Path, tmp_path: Path) -> None:
    what = replace(asked(folder), rule="lantern")
    what = replace(what, settings={"neighbours": 20, "delta": 0.9, "lam": None})
    assert what.rule_told() == "lantern (neighbours 20, delta 0.9)"
    draw_images(what, tmp_path, tmp_path / "f.json", True, Terminal(quiet=True))
    found = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert found["label"] == "approximate" and found["settings"] == what.given()
    assert found["tv_excess"] > 0.0 and found["equal_images"] < 4


def test_contradictions_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    base = asked(tmp_path / "absent")
    for wrong, message in (
        (replace(base, prompts=("cat",)), "both"),
        (replace(base, classes=()), "neither"),
        (replace(base, image_set="tiles"), "--set and --model"),
    ):
        with pytest.raises(InputError, match=message):
            load_pipeline(wrong)
    assert replace(base, model=None).source() == "tiles"
    assert replace(base, model=None, prompts=("cat",), classes=()).source() == "emoji"


def test_a_file_in_the_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("here", encoding="utf-8")
    with pytest.raises(InputError, match="is a file"):
        draw_images(asked(folder), tmp_path / "out", None, False, Terminal(quiet=True))


def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here", encoding="utf-8")
    monkeypatch.setattr(drawing, "load_pipeline", lambda asked: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match="cannot be written to"):
        draw_images(asked(folder), tmp_path / "file" / "out", None, False, Terminal(quiet=True))


def test_folders_of_what_failed_are_taken_away_unless_they_were_there(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    wrong = replace(asked(folder), classes=("violet",))
    for out in (tmp_path / "mine", tmp_path / "new" / "out"):
        with pytest.raises(InputError, match="violet"):
            draw_images(wrong, out, None, False, Terminal(quiet=True))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_a_seed_one_is_drawn_and_told(folder: Path, tmp_path: Path) -> None:
    what = replace(asked(folder), seed=None, classes=("0",), count=1)
    draw_images(what, tmp_path / "a", tmp_path / "f.json", False, Terminal(quiet=True))
    found = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    draw_images(
        replace(what, seed=found["seed"]), tmp_path / "b", None, False, Terminal(quiet=True)
    )
    again = tmp_path / "b" / Path(found["images"][0]).name
    assert again.read_bytes() == Path(found["images"][0]).read_bytes()
    assert torch.Generator().manual_seed(found["seed"])
