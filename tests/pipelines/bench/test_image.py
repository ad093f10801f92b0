"""`ragspec bench image` from end to end, on a tiny generator in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ragspec.errors import InputError, ModelError, ModelNotFoundError, UnknownNameError
from ragspec.pipelines.bench.cli import main
from ragspec.pipelines.bench.image_run import PROMPTS
from tests.support import tiny_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))


def bench(folder: Path, *more: str) -> int:
    return main(["image", "--model", str(folder), "--budget", "5", "--device", "cpu", *more])


def test_a_run_prints_a_table_and_writes_rows_and_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "curve.png"
    features = tmp_path / "net.safetensors"
    from ragspec.visual.evaluation.frechet import FeatureNet

    FeatureNet(3).save(features)
    code = bench(
        folder,
        *("--ways", "exact,lantern@0.4,draft-only", "--images", "3", "--quality", "40"),
        *("--json", str(rows), "--picture", str(picture), "--features", str(features)),
    )
    assert code == 0
    assert "lantern@0.4" in capsys.readouterr().out
    found = json.loads(rows.read_text(encoding="utf-8"))
    by_way = {row["way"]: row for row in found["rows"]}
    assert list(by_way) == ["plain", "exact", "lantern@0.4", "draft-only"]
    assert by_way["exact"]["equal"] == 1.0 and by_way["exact"]["label"] == "exact"
    assert by_way["exact"]["forwards"] < by_way["plain"]["forwards"] == tiny_images.SIDE**2
    assert by_way["draft-only"]["forwards"] == 0
    assert len(found["frechet_plain_batches"]) == 5
    assert all(row["frechet_low"] <= row["frechet"] for row in found["rows"])
    assert Image.open(picture).size == (860, 540)


def test_prompts_are_drawn_where_the_model_reads_them(tmp_path: Path) -> None:
    folder = tiny_images.save(tmp_path / "set", "features")
    rows = tmp_path / "rows.json"
    assert bench(folder, "--ways", "scd", "--images", "2", "--json", str(rows)) == 0
    found = json.loads(rows.read_text(encoding="utf-8"))
    assert [row["equal"] for row in found["rows"]] == [1.0, 1.0]
    assert found["frechet_null"] is None
    assert len(set(PROMPTS)) == len(PROMPTS) == 32


def test_surprise_is_told_in_table_rows_and_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    ways = "scd,lantern@0.9k20,draft-only"
    more = ("--ways", ways, "--images", "3", "--json", str(rows), "--html", str(page))
    assert bench(folder, *more) == 0
    found = {row["way"]: row for row in json.loads(rows.read_text(encoding="utf-8"))["rows"]}
    told = f"{found['plain']['surprise']:+.3f} ± {found['plain']['surprise_error']:.3f}"
    plain = pytest.approx(found["plain"]["surprise"], abs=1e-4)
    assert found["scd"]["surprise"] == plain and found["lantern@0.9k20"]["surprise"] != plain
    assert found["draft-only"]["surprise"] is None and found["plain"]["surprise_error"] > 0
    html = page.read_text(encoding="utf-8")
    assert told in capsys.readouterr().out and told in html
    assert html.count("<img") == 2 * 4 and "without the target" in html


def test_a_missing_network_of_features_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ModelNotFoundError, match="no feature network"):
        bench(absent, "--features", str(tmp_path / "missing"), "--quality", "40")
    (tmp_path / "text").write_text("none", encoding="utf-8")
    with pytest.raises(ModelError, match="holds no feature network"):
        bench(absent, "--features", str(tmp_path / "text"), "--quality", "40")
    with pytest.raises(InputError, match="--features needs"):
        bench(absent, "--features", str(tmp_path / "text"))


@pytest.mark.parametrize("seed", [(1 << 63) - 1, -(1 << 63)])
def test_the_outermost_seeds_draw_all_that_follow(folder: Path, seed: int) -> None:
    assert bench(folder, "--ways", "scd", "--images", "2", "--seed", str(seed)) == 0


def test_bad_requests_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="lantrn"):
        bench(folder, "--ways", "lantrn")
    with pytest.raises(InputError, match="--picture needs"):
        bench(folder, "--picture", str(tmp_path / "a.png"))
    with pytest.raises(InputError, match="there is no folder"):
        bench(folder, "--json", str(tmp_path / "no" / "rows.json"))
    with pytest.raises(InputError, match=r"expected 0 for none, or more than 32"):
        bench(tmp_path / "absent", "--quality", "32")  # before there is anything to load
    for seed in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(InputError, match=f"--seed is {seed}; expected"):
            bench(tmp_path / "absent", "--seed", str(seed))
    with pytest.raises(InputError, match="--set and --model"):
        bench(folder, "--set", "tiles")
    with pytest.raises(ModelNotFoundError, match="no image model"):
        main(["image", "--model", str(tmp_path / "absent")])
