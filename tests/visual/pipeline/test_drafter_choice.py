"""Drafters of image pipelines by name, folder and object, and how they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.acceptance.rejection import ChainRejection
from ragspec.acceptance.walk import Walk
from ragspec.drafters.eagle.head import FeatureHead
from ragspec.errors import InputError, ModelNotFoundError, TokenizerMismatchError, UnknownNameError
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.acceptance.by_name import make_rule
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.drafter_choice import Conditions, draft_source, source_name
from ragspec.visual.pipeline.folder import find_folder
from tests.support import tiny_images
from tests.support.synthetic import SyntheticDrafter

LABELS = Conditions(torch.tensor([0, 2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_images.save(tmp_path_factory.mktemp("images"))
    made = ImageTarget(tiny_images.model(), LABELS.table(tiny_images.model()), 2.0)
    FeatureHead.fresh(made, torch.Generator().manual_seed(0)).save(root / "head")
    return root


def source(*given: Any) -> Any:
    return draft_source(*given)


def target() -> ImageTarget:
    model = tiny_images.model()
    return ImageTarget(model, LABELS.table(model), 3.0, (0, 4))


def test_no_drafter_is_plain_decoding() -> None:
    assert source(None, Walk(), tiny_images.model(), None)(target(), LABELS) is None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, None),
        ("auto", "jacobi"),
        ("starter", "model"),
        ("head", "head"),
        (("model", "head"), "model+head"),
    ],
)
def test_what_drafts_has_a_name(given: Any, name: str | None, folder: Path) -> None:
    made_by = source(given, Walk(), tiny_images.model(), find_folder(folder))
    assert source_name(made_by) == name


def test_a_draft_model_is_guided_as_the_target_is(folder: Path) -> None:
    made = target()
    for given in ("starter", "model", folder / "draft", str(folder / "draft")):
        made_by = source(given, Walk(), made.model, find_folder(folder))
        drafter = made_by(made, LABELS)
        assert drafter is not None and drafter.kind is DraftKind.COUPLED
        own = drafter.model
        assert isinstance(own, ImageTarget) and own.copies == 2
        assert (own.guidance_scale, own.guidance_interval) == (3.0, (0, 4))
        assert own.input_size == made.input_size


def test_the_rule_decides_how_a_model_drafts(folder: Path) -> None:
    made = target()
    drawn = source("model", ChainRejection(), made.model, find_folder(folder))
    found = drawn(made, LABELS)
    assert found is not None and found.kind is DraftKind.SAMPLED
    mode = "sampled-without-replacement"
    asked = source("model", Walk(), made.model, find_folder(folder), mode)(made, LABELS)
    assert asked is not None and asked.kind is DraftKind.SAMPLED_WITHOUT_REPLACEMENT


def test_a_head_goes_on_from_the_target_of_the_call(folder: Path) -> None:
    made = target()
    for given in ("head", folder / "head"):
        found = source(given, Walk(), made.model, find_folder(folder))(made, LABELS)
        assert found is not None and found.target is made


@pytest.mark.parametrize("name", ["model", "head"])
def test_what_a_draft_reads_on_for_reaches_its_drafter(folder: Path, name: str) -> None:
    made = target()
    for given in (name, ["jacobi", name]):
        found: Any = draft_source(given, Walk(), made.model, find_folder(folder), None, 0.5)
        drafters = found(made, LABELS)
        last = drafters[-1] if isinstance(drafters, list) else drafters
        assert last.worth == 0.5


@pytest.mark.parametrize(
    ("rule", "kind"), [(Walk(), DraftKind.COUPLED), (ChainRejection(), DraftKind.SAMPLED)]
)
def test_jacobi_takes_the_form_that_the_rule_can_judge(rule: Walk, kind: DraftKind) -> None:
    found = source("jacobi", rule, tiny_images.model(), None)(target(), LABELS)
    assert found is not None and found.kind is kind
    assert found.width == tiny_images.SIDE


def test_an_object_is_taken_as_it_is() -> None:
    own = SyntheticDrafter(0.5, {}, 0)
    assert source(own, Walk(), tiny_images.model(), None)(target(), LABELS) is own
    small = tiny_images.model(layers=1)
    found = source(small, Walk(), tiny_images.model(), None)(target(), LABELS)
    assert found is not None and found.model.model is small


def test_what_cannot_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    model, parts = tiny_images.model(), find_folder(folder / "target")
    with pytest.raises(UnknownNameError, match="Did you mean 'jacobi'"):
        source("jacobbi", Walk(), model, parts)
    with pytest.raises(ModelNotFoundError, match="nothing of that kind lies with"):
        source("model", Walk(), model, parts)
    with pytest.raises(ModelNotFoundError, match="the given model"):
        source("starter", Walk(), model, None)
    with pytest.raises(ModelNotFoundError, match="no draft model at"):
        source(tmp_path, Walk(), model, None)
    with pytest.raises(TokenizerMismatchError, match="vocab_size 30"):
        source(tiny_images.model(codes=30), Walk(), model, None)
    with pytest.raises(InputError, match="as a drafter"):
        source(3, Walk(), model, None)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read"):
        source(tmp_path, Walk(), model, None)


def test_several_drafters_are_fused(folder: Path) -> None:
    made = target()
    several = source(["jacobi", "model"], Walk(), made.model, find_folder(folder))
    assert [each.name for each in several(made, LABELS)] == ["jacobi", "model"]
    assert several.model is not None and several.head is None
    assert source([], Walk(), made.model, None)(made, LABELS) is None
    alone = source(["jacobi"], Walk(), made.model, None)(made, LABELS)
    assert alone.name == "jacobi"


def test_a_budget_of_variation_is_drafted_for_as_it_can_bound(folder: Path) -> None:
    made, parts = target(), find_folder(folder)
    book = torch.randn(tiny_images.CODES, 4, generator=torch.Generator().manual_seed(0))
    bounded = make_rule("lantern", book, tv_budget=0.5)
    free = make_rule("lantern", book)
    assert source("auto", bounded, made.model, parts)(made, LABELS).kind is DraftKind.DETERMINISTIC
    for rule in (free, Walk()):
        drafter = source("auto", rule, made.model, parts)(made, LABELS)
        assert (drafter.name, drafter.kind) == ("jacobi", DraftKind.COUPLED)
    with pytest.raises(InputError, match="deterministic drafts are needed"):
        source("jacobi", bounded, made.model, parts)
