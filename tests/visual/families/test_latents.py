"""`ImagePipeline` and `ragspec draw` over continuous latents, with tiny random models."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec import errors
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.verification.causal import CausalTarget
from ragspec.visual import ImagePipeline
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.families.llamagen import Conditions
from ragspec.visual.latents.sampler import NoiseSchedule
from ragspec.visual.latents.target import LatentTarget
from ragspec.visual.output import OUTCOMES
from tests.support import heads, tiny_images
from tests.support import tiny_latents as models

KIND, RULES = "latents", ("near", "aligned", "horizon", "path")
pipeline: Any = ImagePipeline.from_pretrained


def sampled(pipe: ImagePipeline, count: int = 4, **inputs: Any) -> Any:
    return pipe(class_labels=[n % models.CLASSES for n in range(count)], seed=0, **inputs)


@pytest.mark.parametrize("drafter", ["jacobi", "model"])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_draws_numbers(folder: Path, rule: str, drafter: str) -> None:
    pipe = pipeline(folder, drafter, rule=rule, dtype="float16")
    result = sampled(pipe, 1)
    assert result.images[0].size == (6, 6) and result.label.startswith(pipe.rule.label)
    assert result.latents.dtype == torch.float16 and bool(result.latents.isfinite().all())
    assert float(result.latents.abs().max()) < 100.0


def test_a_model_drafts_in_the_targets_steps_with_its_guidance(folder: Path) -> None:
    pipe = pipeline(folder, "model", steps=3, floor=0.2, min_expected_gain=0.4)
    conditions = Conditions(torch.tensor([1, 2]))
    for scale in (1.0, 2.0):
        table = conditions.table(pipe.family.trunk)
        target = LatentTarget(pipe.model, table, scale, pipe.family.schedule)
        (drafter,) = pipe.source.make(target, conditions)
        assert isinstance(drafter, LatentDrafter) and drafter.draft.table is target.table
        assert drafter.min_expected_gain == 0.4
        assert drafter.draft.sampler.schedule == pipe.family.schedule == NoiseSchedule(3, 0.2)
        assert drafter.draft.sampler.scale == scale and drafter.draft.model is pipe.draft.trunk
        assert drafter.draft.prompt(1) == target.prompt(1)


def test_draft_models_may_be_names_folders_and_objects(folder: Path) -> None:
    named = pipeline(folder, "model")
    for inputs in (folder / "draft", [named.draft]):
        assert torch.equal(sampled(pipeline(folder, inputs)).latents, sampled(named).latents)
    auto = pipeline(folder)
    assert auto.source.name == "jacobi" and auto.draft is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 3}, "latent_dim 3; expected 4"),
        ({"side": 2}, "grid_size 2; expected 3"),
        ({"mean": 0.5}, r"mean \[0\.5, .*; expected \[0\.0"),
        ({"deviation": 0.5}, r"deviation \[1\.5, .*; expected \[1\.0"),
    ],
)
def test_foreign_latents_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    shape = {key: value for key, value in changes.items() if key in ("width", "side")}
    draft = models.model(7, torch.float32, hidden=16, **shape)
    for name in changes.keys() - shape.keys():
        getattr(draft, name).add_(changes[name])
    with pytest.raises(errors.TokenizerMismatchError, match=message):
        pipeline(folder, draft)


@pytest.mark.parametrize("drafter", [None, "jacobi", "model", ["jacobi", "model"]])
def test_a_pipeline_can_be_pickled(saved: Callable[[str], Path], drafter: Any) -> None:
    pipe = pipeline(saved("codes" if isinstance(drafter, list) else "latents"), drafter)
    again = pickle.loads(pickle.dumps(pipe))
    assert np.array_equal(sampled(again).images[0], sampled(pipe).images[0])


def test_latents_depend_on_no_mode_of_torch(folder: Path) -> None:
    pipe = pipeline(folder)
    expected = sampled(pipe).latents
    with torch.inference_mode():
        assert torch.equal(sampled(pipe).latents, expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(sampled(pipe).latents, expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_outcomes_of_drafts_are_reported(folder: Path) -> None:
    plain = sampled(pipeline(folder, None))
    assert (plain.stats.outcomes == 0).all() and plain.stats.acceptance is None
    assert plain.label == "exact", "nothing was speculated"
    stats = sampled(pipeline(folder, rule="near", r=0.3)).stats
    selected = stats.outcomes == OUTCOMES.index("accepted")
    assert 0 < selected.sum() == sum(report.accepted for report in stats.reports)
    assert (~np.isnan(stats.distances) == selected).all()
    assert 0.0 < stats.distance_mean < stats.distance_most <= 0.3
    assert f"{stats.distance_most:.4f} at most" in stats.summary()
    assert stats.acceptance == selected.sum() / (stats.outcomes > 0).sum()
    mirrored = sampled(pipeline(folder, rule="aligned")).stats
    assert (mirrored.outcomes == OUTCOMES.index("reflected")).any()
    assert mirrored.distance_mean is None and "from the target" not in mirrored.summary()
    sample_again = sampled(pipeline(folder, rule="path")).stats
    assert (sample_again.outcomes == OUTCOMES.index("redrawn")).any()


def test_outputs_and_settings(folder: Path) -> None:
    pipe = pipeline(folder, steps=3, floor=0.2)
    assert pipe.family.schedule.steps == 3 and pipe.family.schedule.floor == 0.2
    steps = list[torch.Tensor]()
    note = {"callback_on_step_end": lambda *inputs: steps.append(inputs[3]["latents"])}
    result = sampled(pipe, 2, output_type="latent", **note)
    last = pipe.family.model.restored(steps[-1]).view_as(result.latents)
    assert torch.equal(result.images, result.latents) and torch.equal(last, result.latents)
    assert not steps[0][:, -1].any()
    assert sampled(pipe, 2, output_type="pt").images.shape == (2, 3, 6, 6)
    other = sampled(pipeline(folder, steps=4, floor=0.2), 2, output_type="latent")
    assert not torch.allclose(other.latents, result.latents)
    assert not torch.allclose(sampled(pipe, 2, guidance_scale=1.0).latents, result.latents)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"temperature": 0.5}, "got temperature=0.5"),
        ({"top_k": 3}, "got top_k=3"),
        ({"height": 4}, "got height=4"),
        ({"guidance_interval": (0, 3)}, "guidance_interval"),
    ],
)
def test_settings_of_probabilities_are_refused(
    folder: Path, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.InputError, match=message):
        sampled(pipeline(folder), **inputs)


def test_bad_names_and_models_are_refused(folder: Path) -> None:
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'near'"):
        pipeline(folder, rule="neer")
    for rule, takes in (("near", "r"), ("path", "no settings")):
        with pytest.raises(errors.InputError, match=f"'{rule}' has no s; it takes {takes}"):
            pipeline(folder, rule=rule, s=3)
    with pytest.raises(errors.InputError, match="got a draft head for latents"):
        pipeline(folder, fresh_head(CausalTarget(heads.model()), torch.Generator()))
    assert sampled(pipeline(folder, rule="near", budget=0), 1).label == "exact"
    for wrong in ({"floor": 0.0}, {"floor": "a"}, {"steps": 2.5}, {"steps": "a"}):
        with pytest.raises(errors.InputError, match=f"{next(iter(wrong))}=.*expected a"):
            pipeline(folder, **wrong)
    with pytest.raises(errors.UnsupportedModelError, match="Use family='latents'"):
        ImagePipeline.from_pretrained(folder, family="llamagen")
    with pytest.raises(errors.UnsupportedModelError, match="expected 'ragspec-latents'"):
        ImagePipeline(tiny_images.model(), tiny_images.tokenizer(), family="latents")
