"""Ways of drawing by their short names, and the pipelines that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError, ModelNotFoundError, UnknownNameError
from ragspec.pipelines.bench.image_ways import (
    DRAFT_ONLY,
    PLAIN,
    Way,
    build_way,
    default_ways,
    parse_way,
    parse_ways,
)
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.drafter_choice import Conditions
from ragspec.visual.pipeline.pipeline import ImagePipeline
from tests.support import tiny_images


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("plain", Way("plain")),
        ("exact", Way("exact", "exact", "starter")),
        ("lantern@0.05", Way("lantern@0.05", "lantern", "starter", {"delta": 0.05})),
        ("lantern++@3:head", Way("lantern++@3:head", "lantern++", "head", {"lam": 3.0})),
        (
            "lantern@0.3k9",
            Way("lantern@0.3k9", "lantern", "starter", {"delta": 0.3, "neighbours": 9}),
        ),
        ("gsd@12", Way("gsd@12", "gsd", "starter", {"partition": 12})),
        ("scd", Way("scd", "exact", "jacobi")),
        ("sjd", Way("sjd", "rejection", "jacobi")),
        (
            "lantern@0.1:head/deterministic",
            Way(
                "lantern@0.1:head/deterministic", "lantern", "head", {"delta": 0.1}, "deterministic"
            ),
        ),
        ("exact:/my/head", Way("exact:/my/head", "exact", "/my/head")),
        ("exact:~/a@3/coupled", Way("exact:~/a@3/coupled", "exact", "~/a@3", {}, "coupled")),
        ("exact:./coupled/", Way("exact:./coupled/", "exact", "./coupled/")),
    ],
)
def test_a_name_stands_for_a_way(text: str, way: Way) -> None:
    assert parse_way(f" {text} ") == way


def test_ways_that_differ_in_a_value_are_one_series() -> None:
    one, two = parse_way("lantern@0.05:head"), parse_way("lantern@0.1:head")
    assert one.series == two.series == "lantern:head"
    assert (one.value, two.value, parse_way("exact").value) == ("0.05", "0.1", "")
    assert parse_way("lantern@0.3k9g2").value == "0.3k9g2"
    far = parse_way("lantern@0.1:/my/a@3k")
    assert (far.series, far.value) == ("lantern:/my/a@3k", "0.1")
    assert parse_way("exact:/my/a@3k").value == ""
    assert [parse_way(name).series for name in (PLAIN, DRAFT_ONLY, "sjd")] == [
        *(PLAIN, DRAFT_ONLY, "sjd")
    ]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("lantrn@0.1", UnknownNameError, "Did you mean 'lantern'"),
        ("exact@3", InputError, "takes no value"),
        ("lantern@", InputError, "expected RULE"),
        ("gsd@0.5", InputError, "'0.5' is no partition, expected a whole number"),
        ("lantern@1.2.3", InputError, "'1.2.3' is no delta, expected a number"),
        ("lantern++@.", InputError, "'.' is no lam, expected a number"),
        ("lantern@0.1g.", InputError, "'.' is no least_gain, expected a number"),
        ("sjd@3", InputError, "sjd takes neither a value nor a drafter, leave @3 out"),
        ("scd:head", InputError, "leave :head out"),
        ("draft-only@3", InputError, "leave @3 out"),
    ],
)
def test_other_names_are_refused(text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        parse_way(text)


def test_plain_comes_first_and_each_way_once() -> None:
    assert [way.name for way in parse_ways(["exact", "plain", "exact", ""])] == ["plain", "exact"]


def test_the_usual_ways_need_what_is_there() -> None:
    every = default_ways(1024, True, True)
    assert {"exact", "rejection", "gsd", "cool@2", "draft-only", "sjd", "scd"} <= set(every)
    assert "lantern@0.025" in every and "exact:head" in every
    assert [way.name for way in parse_ways(every)] == ["plain", *every]
    assert default_ways(1024, False, False) == ("sjd", "scd")


def test_pipelines_share_the_models(tmp_path: Path) -> None:
    base = ImagePipeline.from_pretrained(tiny_images.save(tmp_path), None)
    drafts: dict[str, Any] = {}
    built = {
        name: build_way(parse_way(name), base, drafts, 4, 1)
        for name in (PLAIN, "exact", "rejection", "scd", DRAFT_ONLY)
    }
    assert all(p.model is base.model for name, p in built.items() if name != DRAFT_ONLY)
    assert built[DRAFT_ONLY].model is drafts["model"] is built["exact"].draft
    conditions = Conditions(torch_labels())
    target = ImageTarget(base.model, conditions.table(base.model), 2.0)
    kinds = {
        name: getattr(p.source(target, conditions), "kind", None)
        for name, p in built.items()
        if name != DRAFT_ONLY
    }
    coupled, sampled = DraftKind.COUPLED, DraftKind.SAMPLED
    assert kinds == {PLAIN: None, "exact": coupled, "rejection": sampled, "scd": coupled}


def test_a_draft_that_reads_on_for_less_is_longer(tmp_path: Path) -> None:
    base = ImagePipeline.from_pretrained(tiny_images.save(tmp_path), None)
    drafted = {}
    for worth in (0.0, 5.0):
        pipe = build_way(parse_way("exact:model"), base, {}, 12, 1, worth)
        out = pipe(class_labels=[1], generator=torch.Generator().manual_seed(0))
        drafted[worth] = sum(report.drafted for report in out.stats.reports) / out.stats.forwards
        plain = base(class_labels=[1], generator=torch.Generator().manual_seed(0))
        assert torch.equal(out.codes, plain.codes)
    assert drafted[0.0] > 1.2 * drafted[5.0]
    with pytest.raises(InputError, match="worth -1"):
        pipe = build_way(parse_way("exact:model"), base, {}, 12, 1, -1.0)
        pipe(class_labels=[1])


def test_a_drafter_is_found_by_its_path(tmp_path: Path) -> None:
    folder = tiny_images.save(tmp_path)
    base = ImagePipeline.from_pretrained(folder, None)
    near: Any = build_way(parse_way("exact"), base, {}, 4, 1)
    far: Any = build_way(parse_way(f"exact:{folder / 'draft'}/sampled"), base, {}, 4, 1)
    assert near.source.mode == "coupled" and far.source.mode == "sampled"
    longer: Any = build_way(parse_way(f"exact:{folder / 'draft'}"), base, {}, 4, 1, 0.5)
    assert longer.source.worth == 0.5 and far.source.worth is None
    weights = near.draft.state_dict(), far.draft.state_dict()
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    with pytest.raises(ModelNotFoundError, match="no draft model at"):
        build_way(parse_way(f"exact:{folder / 'absent'}"), base, {}, 4, 1)


def test_draft_only_needs_a_draft(tmp_path: Path) -> None:
    folder = tiny_images.save(tmp_path)
    base = ImagePipeline.from_pretrained(folder / "target", None, tokenizer=folder / "tokenizer")
    with pytest.raises(InputError, match="needs a draft model"):
        build_way(parse_way(DRAFT_ONLY), base, {}, 4, 1)


def torch_labels() -> Any:
    return torch.tensor([0])
