"""Drafters of image pipelines by name, folder and object, and how they draft."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec import errors
from ragspec.drafters.heads.files import save_head
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.registry import names
from ragspec.rules.rejection import ChainRejection
from ragspec.rules.walk import Walk
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual import ImagePipeline, ImageTarget
from ragspec.visual.call import PipelineOptions
from ragspec.visual.choice import choose_drafter, mode_for
from ragspec.visual.families.llamagen import Conditions, LlamaGen
from ragspec.visual.loading import find_folder
from ragspec.visual.rules.by_name import make_rule
from tests.support import tiny_images
from tests.support.noisy import NoisyTrees

LABELS = Conditions(torch.tensor([0, 2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_images.save(tmp_path_factory.mktemp("images"))
    instance = ImageTarget(tiny_images.model(), LABELS.table(tiny_images.model()), 2.0)
    save_head(fresh_head(instance, torch.Generator().manual_seed(0)), root / "head")
    return root


def source(
    drafter: Any, rule: Any, model: Any, folder: Any, mode: Any = None, gain: Any = None
) -> Any:
    family = LlamaGen(model, tiny_images.tokenizer(), folder)
    return choose_drafter(drafter, family, PipelineOptions(None, mode or mode_for(rule), gain))


def target() -> ImageTarget:
    model = tiny_images.model()
    return ImageTarget(model, LABELS.table(model), 3.0, (0, 4))


@pytest.mark.parametrize(
    ("inputs", "name"),
    [(None, None), ("auto", "jacobi"), ("head", "head"), (("model", "head"), "model+head")],
)
def test_what_drafts_has_a_name(inputs: Any, name: str | None, folder: Path) -> None:
    assert source(inputs, Walk(), tiny_images.model(), find_folder(folder)).name == name


def test_a_draft_model_is_guided_as_the_target_is(folder: Path) -> None:
    instance, parts = target(), find_folder(folder)
    for inputs in ("model", folder / "draft", str(folder / "draft")):
        (drafter,) = source(inputs, Walk(), instance.model, parts).make(instance, LABELS)
        assert drafter.kind is DraftKind.COUPLED
        current = drafter.model
        assert isinstance(current, ImageTarget) and current.copies == 2
        assert (current.guidance_scale, current.guidance_interval) == (3.0, (0, 4))
        assert current.input_size == instance.input_size


def test_the_rule_decides_how_a_model_drafts(folder: Path) -> None:
    instance, parts = target(), find_folder(folder)
    (result,) = source("model", ChainRejection(), instance.model, parts).make(instance, LABELS)
    assert result.kind is DraftKind.SAMPLED
    mode = "sampled-without-replacement"
    (request,) = source("model", Walk(), instance.model, parts, mode).make(instance, LABELS)
    assert request.kind is DraftKind.SAMPLED_WITHOUT_REPLACEMENT


def test_a_head_goes_on_from_the_target_of_the_call(folder: Path) -> None:
    instance, parts = target(), find_folder(folder)
    for inputs in ("head", folder / "head"):
        (result,) = source(inputs, Walk(), instance.model, parts).make(instance, LABELS)
        assert result.target is instance


@pytest.mark.parametrize("name", ["model", "head"])
def test_what_a_draft_reads_on_for_reaches_its_drafter(folder: Path, name: str) -> None:
    instance, parts = target(), find_folder(folder)
    for inputs in (name, ["jacobi", name]):
        drafters = source(inputs, Walk(), instance.model, parts, None, 0.5).make(instance, LABELS)
        assert drafters[-1].settings.min_expected_gain == 0.5


@pytest.mark.parametrize(
    ("rule", "kind"), [(Walk(), DraftKind.COUPLED), (ChainRejection(), DraftKind.SAMPLED)]
)
def test_jacobi_takes_the_form_that_the_rule_can_judge(rule: Walk, kind: DraftKind) -> None:
    (result,) = source("jacobi", rule, tiny_images.model(), None).make(target(), LABELS)
    assert result.kind is kind
    assert result.width == tiny_images.SIDE


@pytest.mark.parametrize("rule", names("rule"))
def test_every_rule_draws_with_the_usual_drafter(folder: Path, rule: str) -> None:
    pipe = ImagePipeline.from_pretrained(folder, rule=rule)
    assert pipe(class_labels=[1], seed=5).stats.reports[0].drafted


def test_an_object_is_taken_as_it_is() -> None:
    current = NoisyTrees({})
    assert source(current, Walk(), tiny_images.model(), None).make(target(), LABELS) == [current]
    small = tiny_images.model(layers=1)
    (result,) = source(small, Walk(), tiny_images.model(), None).make(target(), LABELS)
    assert result.model.model is small


def test_what_cannot_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    model, parts = tiny_images.model(), find_folder(folder / "target")
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'jacobi'"):
        source("jacobbi", Walk(), model, parts)
    with pytest.raises(errors.ModelNotFoundError, match="nothing of that kind lies with"):
        source("model", Walk(), model, parts)
    with pytest.raises(errors.ModelNotFoundError, match="with the target"):
        source("head", Walk(), model, None)
    with pytest.raises(errors.ModelNotFoundError, match="no draft model at"):
        source(tmp_path, Walk(), model, None)
    with pytest.raises(errors.TokenizerMismatchError, match="vocab_size 30"):
        source(tiny_images.model(codes=30), Walk(), model, None)
    with pytest.raises(errors.InputError, match="as a drafter"):
        source(3, Walk(), model, None)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(errors.ModelError, match="not a valid JSON"):
        source(tmp_path, Walk(), model, None)


def test_several_drafters_are_fused(folder: Path) -> None:
    instance = target()
    several = source(["jacobi", "model"], Walk(), instance.model, find_folder(folder))
    assert [each.name for each in several.make(instance, LABELS)] == ["jacobi", "model"]
    assert several.first("model") is not None and several.first("head") is None
    assert source([], Walk(), instance.model, None).make(instance, LABELS) == []
    (alone,) = source(["jacobi"], Walk(), instance.model, None).make(instance, LABELS)
    assert alone.name == "jacobi"


def test_a_budget_of_variation_is_drafted_for_as_it_can_bound(folder: Path) -> None:
    instance, parts = target(), find_folder(folder)
    book = torch.randn(tiny_images.CODES, 4, generator=torch.Generator().manual_seed(0))
    bounded = make_rule("lantern", book, tv_budget=0.5)
    free = make_rule("lantern", book)
    (drafter,) = source("auto", bounded, instance.model, parts).make(instance, LABELS)
    assert drafter.kind is DraftKind.DETERMINISTIC
    for rule in (free, Walk()):
        (drafter,) = source("auto", rule, instance.model, parts).make(instance, LABELS)
        assert (drafter.name, drafter.kind) == ("jacobi", DraftKind.COUPLED)
    for rule, mode in ((bounded, "deterministic"), (Walk(), "sampled-without-replacement")):
        with pytest.raises(errors.InputError, match=f"{mode} drafts are needed"):
            source("jacobi", rule, instance.model, parts, mode)
