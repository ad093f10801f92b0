"""`ragspec draw` as typed: options, messages, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragspec.pipelines.cli.app import main
from tests.support import tiny_images

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_images.save(tmp_path_factory.mktemp("images")))


def test_draw_writes_images_and_figures(folder: str, tmp_path: Path, capsys: Capture) -> None:
    figures = tmp_path / "figures.json"
    code = main(
        [
            *("draw", "--class", "green/leaf", "--model", folder, "--n", "2", "--seed", "1"),
            *("--rule", "lantern", "--delta", "0.2", "--neighbours", "5", "--budget", "6"),
            *("--out", str(tmp_path / "out"), "--json", str(figures), "--compare"),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "label approximate" in out and "times as fast" in out
    found = json.loads(figures.read_text(encoding="utf-8"))
    wanted = ("label", "forwards", "forwards_plain", "seconds", "seconds_plain", "equal")
    assert {*wanted, "tv_excess", "images"} <= set(found)
    assert all(Path(path).is_file() for path in found["images"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "neither a prompt nor --class"),
        (["cat", "--class", "1"], 2, "got both"),
        (["--class", "7"], 2, "expected a whole number from 0 to 2"),
        (["--class", "violet"], 2, "expected one of red, green/leaf, blue"),
        (["cat"], 2, "expected --class with a number or a name, or --set emoji"),
        (["--class", "1", "--seed", "99999999999999999999999"], 2, "64 bits"),
        (["--class", "1", "--drafter", ""], 2, "got --drafter ''; expected auto, starter"),
        (["--class", "1", "--drafter", "starter+"], 2, "got --drafter 'starter+'"),
        (["--class", "1", "--drafter", "none+starter"], 2, "or none by itself"),
        (["--class", "1", "--drafter", "jaccobi"], 2, "Did you mean 'jacobi'"),
        (["--class", "1", "--drafter", "head"], 5, "nothing of that kind lies with"),
        (["--class", "1", "--rule", "lantrn"], 2, "Did you mean 'lantern'"),
        (["--class", "1", "--rule", "exact", "--delta", "0.1"], 2, "rule 'exact' has no delta"),
        (["--class", "1", "--rule", "nope"], 2, "Known: block, cool, even, exact, gsd"),
        (["--class", "1", "--rule", "even", "--band", "-1"], 2, "--band"),
        (["--class", "1", "--rule", "lantern", "--band", "1"], 2, "lantern' has no band"),
        (["--class", "1", "--rule", "lantern", "--delta", "7"], 2, "delta"),
        (["--class", "1", "--n", "0"], 2, "n"),
        (["--class", "1", "--budget", "many"], 2, "budget"),
        (["--class", "1", "--json", "no/such/folder.json"], 2, "there is no folder"),
    ],
)
def test_errors_are_one_message_and_a_code(
    folder: str, tmp_path: Path, capsys: Capture, arguments: list[str], code: int, message: str
) -> None:
    out = str(tmp_path / "out")
    assert main(["draw", *arguments, "--model", folder, "--out", out]) == code
    shown, err = capsys.readouterr()
    assert shown == ""
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_class_for_a_set_of_prompts_is_refused(tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    assert main(["draw", "--class", "3", "--set", "emoji", "--out", out]) == 2
    assert "got --class 3, but emoji reads prompts" in capsys.readouterr().err


def test_figures_may_lie_in_the_folder_that_drawing_makes(
    folder: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "cats"
    arguments = ["draw", "--class", "1", "--model", folder, "--out", str(out), "--seed", "1"]
    assert main([*arguments, "--json", str(out / "figures.json")]) == 0, capsys.readouterr().err
    assert json.loads((out / "figures.json").read_text(encoding="utf-8"))["label"] == "exact"


def test_a_missing_model_has_its_code(tmp_path: Path, capsys: Capture) -> None:
    assert main(["draw", "--class", "1", "--model", str(tmp_path / "absent")]) == 5
    assert "no image model" in capsys.readouterr().err


def test_an_empty_prompt_is_named_as_such(tmp_path: Path, capsys: Capture) -> None:
    assert main(["draw", "", "--set", "emoji", "--out", str(tmp_path / "out")]) == 2
    assert "got the prompt ''" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
