"""What a comparison picture shows of what was drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.cli.draw_compare import MOST_ROWS, shown_rows
from ragspec.pipelines.cli.draw_run import draw_images
from ragspec.pipelines.console.terminal import Terminal
from ragspec.visual.evaluation import pictures
from tests.pipelines.cli.test_draw_run import asked
from tests.support import tiny_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))


def compared(
    what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[pictures.Column], dict[str, Any]]:
    """Return what the comparison picture is made of."""
    seen: list[Any] = []
    made = pictures.comparison

    def spy(columns: Any, **options: Any) -> Any:
        seen.append((columns, options))
        return made(columns, **options)

    monkeypatch.setattr(pictures, "comparison", spy)
    draw_images(what, tmp_path / "out", None, True, Terminal(quiet=True))
    ((columns, options),) = seen
    return columns, options


def test_rows_come_from_every_subject_and_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, options = compared(replace(asked(folder), count=4), tmp_path, monkeypatch)
    assert [len(column.images) for column in columns] == [MOST_ROWS] * 3
    assert options["rows"] == [
        *("image 0: red", "image 1: red", "image 2: red"),
        *("image 4: blue", "image 5: blue", "image 6: blue"),
    ]
    assert options["notes"][1:] == ["6 of 8 shown"]
    assert options["dots"] is False


def test_a_relaxed_rule_has_the_dots_in_its_key(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = replace(asked(folder), rule="lantern", settings={"neighbours": 20, "delta": 0.9})
    what = replace(what, classes=("red",), count=1)
    columns, options = compared(what, tmp_path, monkeypatch)
    assert options["dots"] is True and options["rows"] == () and len(options["notes"]) == 1
    assert columns[1].heading == "lantern (neighbours 20, delta 0.9)"


@pytest.mark.parametrize("subjects", range(1, MOST_ROWS + 1))
def test_no_subject_is_left_out_while_there_are_rows(subjects: int) -> None:
    for count in range(1, 9):
        rows = shown_rows(subjects * count)
        assert len(rows) == len(set(rows)) == min(subjects * count, MOST_ROWS)
        assert {row // count for row in rows} == set(range(subjects))
