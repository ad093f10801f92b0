"""`ragspec bench image` over continuous latents from end to end: table, rows and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.bench.cli import main
from ragspec.visual.evaluation import FeatureNet
from tests.support import tiny_latents as models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp("latents"))


def bench(folder: Path, *more: str) -> int:
    return main(["image", "--model", str(folder), "--budget", "5", "--device", "cpu", *more])


def test_a_run_prints_a_table_and_writes_rows_and_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, page, features = (tmp_path / name for name in ("rows.json", "page.html", "net"))
    FeatureNet(3).save(features)
    code = bench(
        folder,
        *("--ways", "near@0.3:jacobi,aligned,horizon@2,fewer@2", "--images", "3"),
        *("--quality", "40", "--features", str(features)),
        *("--json", str(rows), "--html", str(page)),
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "near@0.3:jacobi" in printed and "latents/fwd" in printed
    by_way = {row["way"]: row for row in json.loads(rows.read_text(encoding="utf-8"))["rows"]}
    assert list(by_way) == ["plain", "near@0.3:jacobi", "aligned", "horizon@2", "fewer@2"]
    plain, near, aligned, fewer = (
        by_way[name] for name in ("plain", "near@0.3:jacobi", "aligned", "fewer@2")
    )
    assert plain["label"] == "exact" and plain["psnr"] is None and plain["equal"] == 1.0
    assert plain["codes_per_forward"] == 1.0 == fewer["codes_per_forward"]
    assert near["label"] == fewer["label"] == "approximate"
    assert 0.0 < near["distance_mean"] <= near["distance_most"] <= 0.3
    assert near["psnr_least"] <= near["psnr"] and 0.0 < near["accepted"] < 1.0
    assert aligned["label"] == "exact-for(law)" and aligned["distance_mean"] is None
    assert near["codes_per_forward"] > 1.0 and near["forwards"] < plain["forwards"]
    assert all(row["frechet_low"] <= row["frechet"] for row in by_way.values())
    html = page.read_text(encoding="utf-8")
    assert "img-src data:" in html and html.count("data:image/png;base64,") == 5
    for text in ("Coupling by coupling", "the draft was mirrored", "from the target", "fewer@2"):
        assert text in html
    assert html.count('class="place') == 4 and "http" not in html.replace("http-equiv", "")


def test_a_page_without_quality_or_drafts(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert bench(folder, "--ways", "fewer@3", "--images", "1", "--html", str(page)) == 0
    html = page.read_text(encoding="utf-8")
    assert "add --quality 400" in html and "Acceptance" not in html


def test_bad_requests_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got --worth"):
        bench(folder, "--worth", "0.1")
    with pytest.raises(InputError, match="got temperature"):
        bench(folder, "--ways", "aligned", "--images", "1", "--temperature", "0.5")
