"""`ragspec draw` with masked models: plainly as published, or with drafts for a rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.cli.draw_run import draw_images, load_pipeline
from ragspec.pipelines.cli.drawn import Asked
from ragspec.pipelines.console.terminal import Terminal
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from tests.support import tiny_images, tiny_latents, tiny_masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_masked.save(tmp_path_factory.mktemp("masked"))


def asked(folder: Path, **given: Any) -> Asked:
    denoising = {name: given.pop(name, None) for name in ("iterations", "steps", "floor")}
    made = Asked(
        prompts=(),
        classes=("red", "2"),
        image_set=None,
        model=str(folder),
        drafter=("auto",),
        rule=None,
        settings={"r": None},
        budget=4,
        count=1,
        seed=3,
        guidance=2.0,
        temperature=1.0,
        top_k=0,
        device="cpu",
        dtype="auto",
        denoising={"steps": 4} | {k: v for k, v in denoising.items() if v is not None},
    )
    return replace(made, **given)


def figures(what: Asked, out: Path, compare: bool = False) -> dict[str, Any]:
    draw_images(what, out, out / "figures.json", compare, Terminal(quiet=True))
    found: dict[str, Any] = json.loads((out / "figures.json").read_text(encoding="utf-8"))
    return found


def test_it_draws_plainly_where_no_rule_is_named(folder: Path, tmp_path: Path) -> None:
    found = figures(asked(folder, iterations=3), tmp_path)
    assert (found["rule"], found["label"], found["forwards"]) == ("plain", "exact", 6)
    assert found["denoising"] == {"iterations": 3, "steps": 4, "floor": 0.0}
    assert found["drafter_used"] is None and found["codes_per_forward"] == 3.0
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_rule_is_compared_with_one_latent_an_iteration(folder: Path, tmp_path: Path) -> None:
    found = figures(asked(folder, rule="near", settings={"r": 0.0}), tmp_path, compare=True)
    assert found["equal"] is True and found["label"] == "exact" and found["forwards_plain"] == 18
    assert found["denoising"] == {"iterations": 9, "steps": 4, "floor": 0.1}
    assert found["drafter_used"] == "jacobi" and found["forwards"] <= 18
    lossless = figures(asked(folder, rule="path"), tmp_path)
    assert lossless["label"] == "exact-for(law)" and lossless["repeatable"] is True


def test_a_folder_keeps_its_iterations_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    made = MaskedLatentPipeline.from_pretrained(folder, iterations=2, steps=3)
    made.save_pretrained(tmp_path / "saved")
    pipe: Any = load_pipeline(asked(tmp_path / "saved", denoising={}))
    assert (pipe.iterations, pipe.schedule.steps, pipe.drafter_name) == (2, 3, None)
    drafted: Any = load_pipeline(asked(tmp_path / "saved", denoising={}, rule="path"))
    assert (drafted.iterations, drafted.drafter_name) == (9, "jacobi")


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 iterations with a drafter"):
        load_pipeline(asked(folder, rule="path", iterations=3))
    with pytest.raises(InputError, match="with floor 0"):
        load_pipeline(asked(folder, rule="path", floor=0.0))
    with pytest.raises(InputError, match="got top_k=3"):
        draw_images(asked(folder, top_k=3), tmp_path, None, False, Terminal(quiet=True))
    codes = tiny_images.save(tmp_path / "codes")
    with pytest.raises(InputError, match=r"got --steps for .*codes"):
        load_pipeline(asked(codes))
    causal = tiny_latents.save(tmp_path / "latents")
    with pytest.raises(InputError, match="--iterations for masked ones alone"):
        load_pipeline(asked(causal, iterations=2))
    pipe: Any = load_pipeline(asked(causal, floor=0.3))
    assert (pipe.schedule.steps, pipe.schedule.floor) == (4, 0.3)
