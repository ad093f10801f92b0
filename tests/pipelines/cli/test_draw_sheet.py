"""`ragspec draw --sheet` from end to end: the picture, its figures, its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.draw_sheet import _head_lines, _warned, cell_lines
from tests.support import tiny_images, tiny_latents, tiny_masked

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_images.save(tmp_path_factory.mktemp("images")))


def sheet(folder: str, out: Path, *more: str) -> dict[str, Any]:
    assert main(["draw", "--model", folder, "--sheet", str(out), "--budget", "5", *more]) == 0
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def test_prompts_by_rules_with_all_figures(folder: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "sheet.png"
    rules = "exact,scd,lantern@0.5k20,cool-sd,sjd,exact:starter,draft-only"
    found = sheet(folder, out, "-c", "red", "-c", "2", "-n", "2", "--seed", "3", "--rules", rules)
    columns = {each["rule"]: each for each in found["columns"]}
    assert list(columns) == ["plain", *rules.split(",")]
    assert [row["subject"] for row in found["rows"]] == ["red", "red", "blue", "blue"]
    assert columns["plain"]["ratio"] == 1.0 and columns["plain"]["codes_per_forward"] == 1.0
    for name in ("exact", "scd", "exact:starter"):
        assert columns[name]["label"] == "exact" and columns[name]["equal"] == 4
        assert columns[name]["surprise"] == pytest.approx(columns["plain"]["surprise"], abs=1e-4)
    assert columns["exact:starter"]["drafter"] == "starter"
    assert columns["exact"]["drafter"] == "auto"
    assert columns["lantern@0.5k20"]["settings"] == {"delta": 0.5, "neighbours": 20}
    assert columns["lantern@0.5k20"]["tv_excess"] > 0.0
    draft = columns.pop("draft-only")
    assert draft["label"] == "approximate" and draft["surprise"] is None is draft["tv_excess"]
    assert draft["forwards"] == 0 and draft["codes_per_forward"] is None
    for each in columns.values():
        assert len(each["cells"]) == 4
        assert all(cell["seconds"] > 0 and cell["surprise_error"] > 0 for cell in each["cells"])
        assert each["forwards"] == sum(cell["forwards"] for cell in each["cells"])
    assert min(Image.open(out).size) > 400
    page = out.with_suffix(".html").read_text(encoding="utf-8")
    assert page.count("<img") == 4 * 8 and "blue (2)" in page and "cool-sd" in page
    assert "sheet in" in capsys.readouterr().out


def test_the_pictures_are_those_of_draw(folder: str, tmp_path: Path) -> None:
    found = sheet(folder, tmp_path / "s.png", "-c", "1", "-n", "2", "--seed", "3")
    figures = tmp_path / "f.json"
    arguments = ["draw", "--model", folder, "-c", "1", "-n", "2", "--seed", "3"]
    assert main([*arguments, "--out", str(tmp_path / "o"), "--json", str(figures)]) == 0
    drawn = json.loads(figures.read_text(encoding="utf-8"))
    assert [row["seed"] for row in found["rows"]] == drawn["seeds"]
    assert [each["rule"] for each in found["columns"]] == [
        *("plain", "exact", "sjd", "lantern", "cool")
    ]


def test_prompts_of_any_script_and_a_rule_with_settings(tmp_path: Path) -> None:
    folder = str(tiny_images.save(tmp_path / "set", "features"))
    prompts = ("красное сердце", "红心")
    found = sheet(
        folder, tmp_path / "s.png", *prompts, "--rule", "lantern", "--delta", "0.5", "--seed", "1"
    )
    assert [each["rule"] for each in found["columns"]] == ["plain", "lantern (delta 0.5)"]
    assert found["columns"][1]["settings"] == {"delta": 0.5}
    page = (tmp_path / "s.html").read_text(encoding="utf-8")
    assert all(prompt in page for prompt in prompts)


def test_latents_have_rules_and_figures_of_their_own(tmp_path: Path) -> None:
    folder = str(tiny_latents.save(tmp_path / "latents"))
    found = sheet(folder, tmp_path / "s.png", "-c", "1", "--rules", "near@0.2,fewer@2")
    plain, near, fewer = found["columns"]
    assert found["latents"] and plain["surprise"] is None and near["distance_mean"] is not None
    assert fewer["label"] == "approximate" and near["rule"] == "near@0.2"


def test_masked_latents_have_usual_rules_too(tmp_path: Path, capsys: Capture) -> None:
    folder = str(tiny_masked.save(tmp_path / "masked"))
    found = sheet(folder, tmp_path / "s.png", "-c", "1", "--steps", "3", "--floor", "0.3")
    plain, aligned, near, fewer = found["columns"]
    assert [each["rule"] for each in (aligned, near, fewer)] == ["aligned", "near@0.1", "fewer@8"]
    assert aligned["label"] == "exact-for(law)" and near["distance_mean"] is not None
    assert (plain["forwards"], fewer["forwards"]) == (9, 8) and near["forwards"] < 9
    assert found["denoising"] == {"steps": 3, "floor": 0.3}
    assert "3 denoising steps, floor 0.3" in (tmp_path / "s.html").read_text(encoding="utf-8")
    usual = ["draw", "--model", folder, "-c", "1", "--sheet", str(tmp_path / "t.png")]
    assert main([*usual, "--iterations", "2"]) == 2
    assert "expected fewer@N in --rules" in capsys.readouterr().err
    assert not (tmp_path / "t.png").exists()


def test_a_mask_and_a_band_reach_the_sheet(folder: str, tmp_path: Path) -> None:
    given, mask = tmp_path / "given.png", tmp_path / "mask.png"
    Image.new("RGB", (6, 6), (200, 30, 90)).save(given)
    marks = Image.new("L", (3, 3), 255)
    marks.putpixel((0, 0), 0)
    marks.save(mask)
    parts = ("--image", str(given), "--mask", str(mask))
    found = sheet(
        folder,
        tmp_path / "s.png",
        "-c",
        "1",
        "--rule",
        "even",
        "--band",
        "2",
        "--seed",
        "1",
        *parts,
    )
    assert found["kept_codes"] == 1
    assert found["columns"][1]["settings"] == {"band": 2.0}


def told(**more: Any) -> dict[str, Any]:
    usual = {
        "rule": "lantern",
        "latents": False,
        "label": "approximate",
        "seconds": 0.25,
        "ratio": 2.0,
        "codes_per_forward": 3.25,
        "tv_excess": 0.125,
        "surprise": 0.3,
        "surprise_error": 0.1,
        "equal": 0,
        "psnr": None,
        "distance_mean": None,
        "distance_most": None,
    }
    return usual | more


def test_what_stands_below_a_picture() -> None:
    assert cell_lines(told()) == [
        *("0.25 s · 3.25 codes a forward", "surprise +0.30 ± 0.10", "tv_excess 0.12"),
        "approximate",
    ]
    same = told(label="exact", equal=1, tv_excess=0.0)
    assert cell_lines(same)[-2:] == ["tv_excess 0", "exact · the plain picture"]


def test_a_surprise_beyond_two_errors_is_marked() -> None:
    for surprise, marked in ((0.3, {2}), (0.2, set()), (-0.3, set()), (None, set())):
        each = told(surprise=surprise)
        assert _warned(each, _head_lines(each)) == marked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sheet", "a.jpg"], "expected a PNG"),
        (["--sheet", "no/such/a.png"], "there is no folder"),
        (["--rules", "exact"], "--rules without --sheet"),
        (["--sheet", "a.png", "--compare"], "expected --sheet alone"),
        (["--sheet", "a.png", "--rules", "exact", "--delta", "0.1"], "--rules and --delta"),
        (["--sheet", "a.png", "--rules", "exact", "--rule", "gsd"], "--rules and --rule"),
        (["--sheet", "a.png", "--rules", "exakt"], "Did you mean 'exact'"),
        (["--sheet", "a.png", "--drafter", "none"], "--drafter none"),
    ],
)
def test_what_cannot_be_asked_together(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "--class", "1", "--model", folder, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
