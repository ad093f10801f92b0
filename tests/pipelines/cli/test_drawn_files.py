"""Names of what is drawn: another rule never overwrites, nothing else is overwritten unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.drawn_files import KEY, slug
from tests.support import tiny_images

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_images.save(tmp_path_factory.mktemp("images")))


def draw(folder: str, out: Path, *more: str) -> int:
    usual = ["draw", "-c", "red", "--seed", "1", "--model", folder, "--budget", "5"]
    return main([*usual, "--out", str(out), *more])


def test_rules_and_settings_have_files_of_their_own(folder: str, tmp_path: Path) -> None:
    before: dict[Path, bytes] = {}
    for more in (
        (),
        ("--rule", "lantern", "--delta", "0.9", "--neighbours", "20"),
        ("--rule", "lantern", "--delta", "0.5"),
        ("--rule", "lantern++"),
        (
            "--rule",
            "sequoia-is-none",
        ),
    ):
        code = draw(folder, tmp_path, *more)
        assert code == (2 if "sequoia-is-none" in more else 0)
        assert all(path.read_bytes() == content for path, content in before.items())
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in before if path.stem.endswith("-0")} == {
        "red-1-exact-0.png",
        "red-1-lantern-neighbours-20-delta-0-9-0.png",
        "red-1-lantern-delta-0-5-0.png",
        "red-1-lantern-plus-0.png",
    }


def test_the_same_request_may_be_repeated_and_another_is_refused(
    folder: str, tmp_path: Path, capsys: Capture
) -> None:
    assert draw(folder, tmp_path) == 0
    first = (tmp_path / "red-1-exact-0.png").read_bytes()
    assert draw(folder, tmp_path) == 0 and draw(folder, tmp_path, "--drafter", "starter") == 0
    capsys.readouterr()
    assert draw(folder, tmp_path, "--guidance", "3") == 2
    assert "drawn with guidance 2.0, not 3.0; expected a free name" in capsys.readouterr().err
    assert (tmp_path / "red-1-exact-0.png").read_bytes() == first


def test_a_foreign_file_is_left_alone(folder: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "red-1-exact-0.png").write_bytes(b"mine")
    assert draw(folder, tmp_path) == 2
    assert "no picture of this command" in capsys.readouterr().err
    assert (tmp_path / "red-1-exact-0.png").read_bytes() == b"mine"


def test_a_picture_holds_what_it_is_a_function_of(folder: str, tmp_path: Path) -> None:
    assert draw(folder, tmp_path) == 0
    with Image.open(tmp_path / "red-1-exact-0.png") as found:
        record = json.loads(found.info[KEY])
    assert record["subject"] == "red" and record["rule"] == "exact" and record["seed"] == 1


def test_names_of_any_script() -> None:
    assert slug("Красное сердце!") == "красное-сердце" and slug("红心") == "红心"
    assert slug("../a b/..") == "a-b" and slug("?!") == "image"
