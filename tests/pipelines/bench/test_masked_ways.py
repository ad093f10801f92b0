"""Ways of drawing with a masked model by their short names, and a run of the benchmark over one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.bench.cli import main
from ragspec.pipelines.bench.image_ways import Way
from ragspec.pipelines.bench.masked_ways import (
    USUAL,
    build_masked_way,
    parse_masked_way,
    parse_masked_ways,
)
from ragspec.visual import MaskedLatentPipeline
from tests.support import tiny_images, tiny_masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_masked.save(tmp_path_factory.mktemp("masked"))


def test_fewer_is_of_iterations() -> None:
    assert parse_masked_way("fewer@8") == Way("fewer@8", "fewer", None, {"iterations": 8})
    assert parse_masked_way("near@0.1:jacobi").settings == {"r": 0.1}
    assert [way.name for way in parse_masked_ways(USUAL)] == ["plain", *USUAL]
    with pytest.raises(InputError, match="with N iterations of the target alone"):
        parse_masked_way("fewer@8:jacobi")


def test_pipelines_share_the_model_and_its_last_step(folder: Path) -> None:
    base = MaskedLatentPipeline.from_pretrained(folder, steps=5, floor=0.2, device="cpu")

    def made(name: str, budget: Any = "7") -> MaskedLatentPipeline:
        return build_masked_way(parse_masked_way(name), base, budget, 1, 0.25)

    path, near, fewer, plain = map(made, ("path:jacobi", "near@0.3", "fewer@4", "plain"))
    pipes = (path, near, fewer, plain)
    assert all(pipe.model is base.model for pipe in pipes)
    assert {(pipe.schedule.steps, pipe.schedule.floor) for pipe in pipes} == {(5, 0.2)}
    assert [pipe.iterations for pipe in pipes] == [9, 9, 4, 9]
    assert [pipe.rule_name for pipe in pipes] == ["path", "near", "plain", "plain"]
    assert path.drafts is not None and (path.drafts.window, path.drafts.prefill) == (7, 0.25)
    assert plain.drafts is None and fewer.drafts is None
    with pytest.raises(InputError, match="10 iterations for 9 latents"):
        made("fewer@10")
    for budget in ("many", 0):
        with pytest.raises(InputError, match="budget"):
            made("path", budget)


def test_a_run_compares_rules_with_fewer_iterations(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ragspec.visual.evaluation.frechet import FeatureNet

    FeatureNet(3).save(tmp_path / "net.safetensors")
    code = main(
        [
            *("image", "--model", str(folder), "--device", "cpu", "--steps", "4"),
            *("--ways", "fewer@4,near@9:jacobi,aligned", "--images", "2", "--budget", "3"),
            *("--quality", "40", "--features", str(tmp_path / "net.safetensors")),
            *("--json", str(tmp_path / "rows.json"), "--prefill", "0.3"),
        ]
    )
    assert code == 0 and "4 steps, floor 0.1" in capsys.readouterr().out
    found = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "fewer@4", "near@9:jacobi", "aligned"]
    assert [row["forwards"] for row in rows.values()][:2] == [9, 4]
    labels = [row["label"] for row in rows.values()]
    assert labels == ["exact", "approximate", "approximate", "exact-for(law)"]
    assert rows["near@9:jacobi"]["accepted"] == 1.0 and rows["fewer@4"]["psnr"] is not None
    assert rows["near@9:jacobi"]["forwards"] < 9 and rows["aligned"]["frechet"] is not None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--html", "page.html"), "--html with a masked model"),
        (("--worth", "0.1"), "got --worth"),
        (("--floor", "0", "--ways", "aligned"), "with floor 0"),
        (("--tune", "lantern"), "--tune with a model of continuous latents"),
    ],
)
def test_what_masked_models_have_not_is_refused(
    folder: Path, more: tuple[str, ...], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        main(["image", "--model", str(folder), "--device", "cpu", "--images", "1", *more])


def test_other_models_have_no_denoising_or_prefill(tmp_path: Path) -> None:
    codes = tiny_images.save(tmp_path / "codes")
    for more in (("--steps", "3"), ("--prefill", "0.1")):
        with pytest.raises(InputError, match=f"got {more[0]}"):
            main(["image", "--model", str(codes), *more])
