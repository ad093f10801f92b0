"""diffusers' own loader on saved pipelines: what it returns draws what the saved one drew."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from ragspec.acceptance.walk import Walk
from ragspec.budget.policy import FixedBudget
from ragspec.drafters.eagle.head import FeatureHead
from ragspec.errors import InputError, ModelError
from ragspec.visual.pipeline.base import NODES
from ragspec.visual.pipeline.latents import LatentPipeline
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from ragspec.visual.pipeline.model_index import INDEX, PARTS
from ragspec.visual.pipeline.pipeline import ImagePipeline
from tests.support import image_models, tiny_images, tiny_latents, tiny_masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_images.save(tmp_path_factory.mktemp("images"))
    target = image_models.target(tiny_images.model())
    FeatureHead.fresh(target, torch.Generator().manual_seed(3)).save(made / "head")
    return made


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the module that diffusers copies out of the home of whoever runs the tests."""
    place = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", place)
    monkeypatch.setattr(sys, "path", [*sys.path])


def loaded(saved: Path, **more: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(saved, trust_remote_code=True, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: Any, **more: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe(class_labels=[0, 1, 2], generator=torch.Generator().manual_seed(4), **more)


@pytest.mark.parametrize(
    ("drafter", "rule", "settings"),
    [
        ("model", "exact", {}),
        ("head", "lantern", {"delta": 0.4, "neighbours": 5}),
        (["model", "jacobi"], "lantern", {"delta": 0.4}),
        ("jacobi", "gsd", {"partition": 4}),
        (None, "exact", {}),
        ("model", "lantern", {"delta": 0.5, "tv_budget": 0.4}),
    ],
)
def test_diffusers_loads_what_was_saved(
    folder: Path, tmp_path: Path, drafter: Any, rule: str, settings: dict[str, Any]
) -> None:
    pipe = ImagePipeline.from_pretrained(
        folder, drafter, rule, budget=6, draft_worth=0.3, batch_size=2, **settings
    )
    pipe.save_pretrained(tmp_path / "saved")
    before = drawn(pipe)
    for again in (loaded(tmp_path / "saved"), ImagePipeline.from_pretrained(tmp_path / "saved")):
        after = drawn(again)
        assert type(again) is ImagePipeline and again.batch_size == 2
        assert torch.equal(before.codes, after.codes)
        assert before.stats.forwards == after.stats.forwards and before.label == after.label
        for one, two in zip(before.images, after.images, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(two))
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / INDEX).read_text() == (tmp_path / "saved" / INDEX).read_text()


def test_what_diffusers_is_told_goes_before_what_was_saved(folder: Path, tmp_path: Path) -> None:
    pipe = ImagePipeline.from_pretrained(folder, "model", "lantern", budget=6, delta=0.4)
    pipe.save_pretrained(tmp_path)
    plain = loaded(tmp_path, rule="exact", drafter="none", torch_dtype=torch.float64)
    assert (plain.rule_name, plain.dtype, plain.draft) == ("exact", torch.float64, None)
    exact = ImagePipeline.from_pretrained(tmp_path, rule="exact")
    assert exact.rule_name == "exact" and exact.budget == FixedBudget(NODES)
    other = ImagePipeline.from_pretrained(tmp_path, "jacobi", delta=0.0)
    assert (other.rule_name, other.settings, other.draft) == ("lantern", {"delta": 0.0}, None)
    assert drawn(other).label == "exact"
    with pytest.raises(InputError, match="head"):
        loaded(tmp_path, drafter="head")


def test_without_leave_diffusers_runs_nothing(folder: Path, tmp_path: Path) -> None:
    ImagePipeline.from_pretrained(folder).save_pretrained(tmp_path)
    (tmp_path / f"{PARTS}.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(tmp_path)
    assert drawn(ImagePipeline.from_pretrained(tmp_path)).label == "exact"  # never runs it either


def test_a_rule_that_is_an_object_is_not_saved_and_that_is_told(
    folder: Path, tmp_path: Path
) -> None:
    pipe = ImagePipeline(tiny_images.model(), tiny_images.tokenizer(), None, Walk())
    with pytest.warns(UserWarning, match="given as an object"):
        pipe.save_pretrained(tmp_path)
    assert ImagePipeline.from_pretrained(tmp_path).rule_name == "exact"


@pytest.mark.parametrize(
    "index",
    [
        [],
        {"_class_name": 1},
        {"_class_name": [PARTS, "SavedImagePipeline"], "rule": {"delta": 0.1}},
        {"_class_name": [PARTS, "SavedImagePipeline"], "rule": {"name": "exact"}, "drafter": 3},
    ],
)
def test_a_damaged_index_is_told(folder: Path, tmp_path: Path, index: Any) -> None:
    ImagePipeline.from_pretrained(folder).save_pretrained(tmp_path)
    for text in (json.dumps(index), "{"):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ModelError, match="cannot be read"):
            ImagePipeline.from_pretrained(tmp_path)


def test_the_index_of_a_pipeline_of_diffusers_says_nothing(folder: Path, tmp_path: Path) -> None:
    ImagePipeline.from_pretrained(folder, rule="lantern").save_pretrained(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    assert ImagePipeline.from_pretrained(tmp_path).rule_name == "exact"


@pytest.mark.parametrize("drafter", ["model", "jacobi", None])
def test_pipelines_over_latents_come_back(tmp_path: Path, drafter: Any) -> None:
    folder = tiny_latents.save(tmp_path / "set")
    pipe = LatentPipeline.from_pretrained(folder, drafter, "near", r=0.5, steps=4, budget=3)
    pipe.save_pretrained(tmp_path / "saved")
    before = drawn(pipe)
    for again in (loaded(tmp_path / "saved"), LatentPipeline.from_pretrained(tmp_path / "saved")):
        after = drawn(again)
        assert type(again) is LatentPipeline and again.schedule == pipe.schedule
        assert torch.equal(before.latents, after.latents)
        assert before.stats.forwards == after.stats.forwards and before.label == after.label


def test_masked_pipelines_come_back(tmp_path: Path) -> None:
    model = tiny_masked.model(tmp_path, 0.1).float()
    pipe = MaskedLatentPipeline(model, tiny_images.tokenizer(), iterations=3, steps=4)
    pipe.save_pretrained(tmp_path / "saved")
    before = drawn(pipe)
    again = MaskedLatentPipeline.from_pretrained(tmp_path / "saved")
    for each in (loaded(tmp_path / "saved"), again):
        assert type(each) is MaskedLatentPipeline and each.iterations == 3
        after = drawn(
            each
        ).latents  # weights lie elsewhere in memory, so that sums are rounded anew
        assert torch.allclose(before.latents, after, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["jacobi", "model"])
def test_masked_pipelines_come_back_with_their_drafts(drafter: str, tmp_path: Path) -> None:
    root = tiny_masked.save(tmp_path / "made")
    shutil.copytree(root / "target", root / "draft")
    pipe = MaskedLatentPipeline.from_pretrained(
        root, drafter=drafter, rule="near", r=5.0, steps=3, floor=0.3, window=2, prefill=0.2
    )
    pipe.save_pretrained(tmp_path / "saved")
    before = drawn(pipe)
    assert before.label == "approximate"
    each: Any
    for each in (
        loaded(tmp_path / "saved"),
        MaskedLatentPipeline.from_pretrained(tmp_path / "saved"),
    ):
        assert type(each).__name__ == "MaskedLatentPipeline" and each.drafter_name == drafter
        assert (each.rule_name, each.rule.r) == ("near", 5.0)
        assert (each.drafts.window, each.drafts.prefill, each.schedule.floor) == (2, 0.2, 0.3)
        after = drawn(each)
        assert after.stats.forwards == before.stats.forwards
        assert torch.allclose(before.latents, after.latents, rtol=1e-3, atol=1e-3)
    plain = MaskedLatentPipeline.from_pretrained(tmp_path / "saved", drafter=None, iterations=3)
    assert plain.drafter_name is None and plain.iterations == 3 and plain.schedule.floor == 0.3
    other = MaskedLatentPipeline.from_pretrained(tmp_path / "saved", rule="aligned")
    assert (other.rule_name, other.drafter_name) == ("aligned", drafter)
