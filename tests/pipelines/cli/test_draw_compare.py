"""What a comparison picture shows of what was drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.pipelines.cli import draw_compare, draw_run
from ragspec.pipelines.cli.draw_compare import MOST_ROWS, parted_places, parted_told, shown_rows
from ragspec.pipelines.cli.draw_run import draw_images
from ragspec.pipelines.cli.drawn import Drawn
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


def drawn_with(codes: Any, label: str) -> Drawn:
    shape = codes.shape
    stats = SimpleNamespace(surprises=np.zeros(0))
    return Drawn([SimpleNamespace(codes=codes, label=label, images=[None] * shape[0], stats=stats)])


def test_the_first_other_code_is_found_and_told() -> None:
    plain = torch.arange(2 * 9).reshape(2, 3, 3)
    other = plain.clone()
    other[1, 1, 2:] = 0
    other[1, 2] = 0
    for label, wanted in (
        ("exact up to rounding", [None, (1, 2)]),
        ("exact", [None, (1, 2)]),
        ("exact-for(law)", [None, None]),
        ("approximate", [None, None]),
    ):
        found = parted_places(drawn_with(other, label), drawn_with(plain, label))
        assert found == wanted
    assert parted_told((1, 2), (3, 3)) == "parts at code 6 of 9 (row 2, column 3)"
    assert parted_told((1, 2), (2, 4)) == "parts at code 7 of 8 (row 2, column 3)"


def test_where_rounding_parts_pictures_is_told_marked_and_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = iter([[None, (1, 2), (0, 0), None]] * 2)
    monkeypatch.setattr(draw_compare, "parted_places", lambda drawn, plain: next(places))
    monkeypatch.setattr(draw_run, "parted_places", lambda drawn, plain: next(places))
    maps: list[Any] = []
    seen: list[Any] = []
    heat_map, compare = pictures.heat_map, pictures.comparison

    def map_spy(*given: Any, **options: Any) -> Any:
        maps.append(options["parted"])
        return heat_map(*given, **options)

    def spy(columns: Any, **options: Any) -> Any:
        seen.append(options)
        return compare(columns, **options)

    monkeypatch.setattr(pictures, "heat_map", map_spy)
    monkeypatch.setattr(pictures, "comparison", spy)
    figures = tmp_path / "f.json"
    draw_images(asked(folder), tmp_path / "out", figures, True, Terminal())
    shown = " ".join(capsys.readouterr().out.split())
    assert "image 1 parts at code 6 of 9 (row 2, column 3)" in shown
    assert (
        "image 2 parts at code 1 of 9 (row 1, column 1)" in shown and "image 0 parts" not in shown
    )
    assert maps == [None, (1, 2), (0, 0), None]
    (options,) = seen
    assert options["frames"] is True
    assert options["rows"][1].endswith("parts at code 6 of 9 (row 2, column 3)")
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["parted"] == [None, [1, 2], [0, 0], None]
