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

LABELS, WALK = Conditions(torch.tensor([0, 2])), Walk()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_images.save(tmp_path_factory.mktemp("images"))
    instance = ImageTarget(tiny_images.model(), LABELS.table(tiny_images.model()), 2.0)
    save_head(fresh_head(instance, torch.Generator().manual_seed(0)), root / "head")
    return root


def source(
    drafter: Any, rule: Any = WALK, folder: Any = None, mode: Any = None, gain: Any = None
) -> Any:
    family = LlamaGen(tiny_images.model(), tiny_images.tokenizer(), folder and find_folder(folder))
    return choose_drafter(drafter, family, PipelineOptions(None, mode or mode_for(rule), gain))


def target() -> ImageTarget:
    model = tiny_images.model()
    return ImageTarget(model, LABELS.table(model), 3.0, (0, 4))


def drafters(drafter: Any, *inputs: Any) -> Any:
    return source(drafter, *inputs).make(target(), LABELS)


@pytest.mark.parametrize(
    ("inputs", "name"),
    [(None, None), ("auto", "jacobi"), ("head", "head"), (("model", "head"), "model+head")],
)
def test_drafters_have_names(inputs: Any, name: str | None, folder: Path) -> None:
    assert source(inputs, WALK, folder).name == name


def test_a_draft_model_is_guided_as_the_target_is(folder: Path) -> None:
    for inputs in ("model", folder / "draft", str(folder / "draft")):
        (drafter,) = drafters(inputs, WALK, folder)
        current = drafter.model
        assert drafter.kind is DraftKind.COUPLED
        assert isinstance(current, ImageTarget) and current.copies == 2
        assert (current.guidance_scale, current.guidance_interval) == (3.0, (0, 4))
        assert current.input_size == target().input_size


def test_the_rule_decides_how_a_model_drafts(folder: Path) -> None:
    (result,) = drafters("model", ChainRejection(), folder)
    assert result.kind is DraftKind.SAMPLED
    (request,) = drafters("model", WALK, folder, "sampled-without-replacement")
    assert request.kind is DraftKind.SAMPLED_WITHOUT_REPLACEMENT


def test_a_head_reads_the_target_of_the_call(folder: Path) -> None:
    for inputs in ("head", folder / "head"):
        (result,) = source(inputs, WALK, folder).make(instance := target(), LABELS)
        assert result.target is instance


@pytest.mark.parametrize("name", ["model", "head"])
def test_min_expected_gain_reaches_the_drafter(folder: Path, name: str) -> None:
    for inputs in (name, ["jacobi", name]):
        last = drafters(inputs, WALK, folder, None, 0.5)[-1]
        assert last.settings.min_expected_gain == 0.5


@pytest.mark.parametrize("rule", names("rule"))
def test_every_rule_draws_with_the_usual_drafter(folder: Path, rule: str) -> None:
    pipe = ImagePipeline.from_pretrained(folder, rule=rule)
    assert pipe(class_labels=[1], seed=5).stats.reports[0].drafted


def test_drafters_and_draft_models_may_be_objects() -> None:
    current, small = NoisyTrees({}), tiny_images.model(layers=1)
    assert drafters(current) == [current]
    (result,) = drafters(small)
    assert result.model.model is small


def test_invalid_drafters_are_refused(folder: Path, tmp_path: Path) -> None:
    bare, broken = folder / "target", tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{", encoding="utf-8")
    wrong: list[tuple[Any, Path | None, type[Exception], str]] = [
        ("jacobbi", bare, errors.UnknownNameError, "Did you mean 'jacobi'"),
        ("model", bare, errors.MissingModelError, "nothing of that kind lies with"),
        ("head", None, errors.MissingModelError, "with the target"),
        (tmp_path, None, errors.MissingModelError, "no draft model at"),
        (tiny_images.model(codes=30), None, errors.TokenizerMismatchError, "vocab_size 30"),
        (3, None, errors.InputError, "as a drafter"),
        (broken, None, errors.ModelError, "cannot be used"),
    ]
    for drafter, place, error, message in wrong:
        with pytest.raises(error, match=message):
            source(drafter, WALK, place)


def test_several_drafters_are_fused(folder: Path) -> None:
    several = source(["jacobi", "model"], WALK, folder)
    assert [each.name for each in several.make(target(), LABELS)] == ["jacobi", "model"]
    assert several.first("model") is not None and several.first("head") is None
    assert drafters([]) == []
    (alone,) = drafters(["jacobi"])
    assert alone.name == "jacobi"
    for rule in ("block", "rejection", "without-replacement"):
        with pytest.raises(errors.InputError, match=f"got 2 drafters under rule '{rule}'"):
            ImagePipeline.from_pretrained(folder, ["model", "head"], rule)


def test_rules_with_a_tv_budget_get_deterministic_drafts(folder: Path) -> None:
    book = torch.randn(tiny_images.CODES, 4, generator=tiny_images.dice(0))
    bounded, free = make_rule("lantern", book, tv_budget=0.5), make_rule("lantern", book)
    (drafter,) = drafters("auto", bounded, folder)
    assert drafter.kind is DraftKind.DETERMINISTIC
    coupled, sampled = DraftKind.COUPLED, DraftKind.SAMPLED
    for rule, kind in ((free, coupled), (WALK, coupled), (ChainRejection(), sampled)):
        (drafter,) = drafters("auto", rule, folder)
        assert (drafter.name, drafter.kind) == ("jacobi", kind)
        assert drafter.width == tiny_images.SIDE
    for rule, mode in ((bounded, "deterministic"), (WALK, "sampled-without-replacement")):
        with pytest.raises(errors.InputError, match=f"{mode} drafts are needed"):
            source("jacobi", rule, folder, mode)
