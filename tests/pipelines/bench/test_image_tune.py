"""Tuning a relaxed rule: what is kept, what is not, and that the pipeline then takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.bench import image_tune
from ragspec.pipelines.bench.image_tune import Tried, tuned_table
from ragspec.pipelines.cli.app import main
from ragspec.visual.pipeline.pipeline import ImagePipeline
from ragspec.visual.pipeline.relaxation import FILE
from tests.support import tiny_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_images.save(tmp_path / "images")


def test_the_best_setting_without_a_cost_is_kept_and_taken(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = {"neighbours": (3, 50), "delta": (0.01, 0.9)}  # 50 are more than there are codes
    monkeypatch.setitem(image_tune.GRIDS, "lantern", grid)
    monkeypatch.setattr(image_tune, "MOST_SURPRISE", 0.2)  # for so few images
    rows = tmp_path / "rows.json"
    asked = ["bench", "image", "--model", str(folder), "--images", "40", "--seed", "3"]
    assert main([*asked, "--tune", "lantern", "--json", str(rows)]) == 0
    found = json.loads(rows.read_text())
    assert [row["settings"]["delta"] for row in found["rows"]] == [0.01, 0.9]
    free = [Tried(**row) for row in found["rows"] if Tried(**row).costs_nothing]
    best = max(free, key=lambda each: each.codes_per_forward)
    assert found["kept"] == best.settings
    assert str(folder / FILE) in capsys.readouterr().out.replace("\n", "")
    kept = json.loads((folder / FILE).read_text())["rules"]["lantern"]
    assert kept["settings"] == best.settings and kept["measured"]["images"] == 40
    rule: Any = ImagePipeline.from_pretrained(folder, "jacobi", "lantern").rule
    assert rule.relation.delta == best.settings["delta"]


def test_nothing_is_written_where_every_setting_costs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(image_tune.GRIDS, "lantern", {"neighbours": (20,), "delta": (0.95,)})
    asked = ["bench", "image", "--model", str(folder), "--images", "60"]
    assert main([*asked, "--tune", "lantern"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (folder / FILE).exists()


def test_what_cannot_be_tuned_is_refused(folder: Path) -> None:
    for words in (["--tune", "exact"], ["--tune", "lantern", "--ways", "scd"]):
        assert main(["bench", "image", "--model", str(folder), *words]) != 0
    assert main(["bench", "image", "--set", "latent-tiles", "--tune", "lantern"]) != 0


def test_a_cost_is_told_by_either_figure() -> None:
    fine = Tried({"delta": 0.1}, 3.0, 0.008, 0.011, 0.01, 9)
    assert fine.costs_nothing
    for surprise, error, excess in ((0.012, 0.011, 0.01), (-0.012, 0.011, 0.01), (0.0, 0.01, 0.06)):
        assert not Tried({}, 3.0, surprise, error, excess, 9).costs_nothing
    assert not Tried({}, 3.0, 0.0, 0.03, 0.01, 9).costs_nothing, "too few images to tell"
    assert tuned_table([fine], fine, "").row_count == 1
    assert tuned_table([], None, "").row_count == 0
