"""Ways of drawing continuous latents by their short names, and the pipelines they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.bench.image_ways import Way
from ragspec.pipelines.bench.latent_ways import (
    USUAL,
    build_latent_way,
    parse_latent_way,
    parse_latent_ways,
)
from ragspec.visual.drafting import JacobiDrafter
from ragspec.visual.latents import Horizon, Near
from ragspec.visual.pipeline.latents import LatentPipeline
from tests.support import tiny_latents as models


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("near@0.02:jacobi", Way("near@0.02:jacobi", "near", "jacobi", {"r": 0.02})),
        ("horizon@4", Way("horizon@4", "horizon", "auto", {"s": 4})),
        ("path:model", Way("path:model", "path", "model")),
        ("fewer@8", Way("fewer@8", "fewer", None, {"steps": 8})),
        ("plain", Way("plain", "near", None, {"r": 0.0})),
    ],
)
def test_a_name_stands_for_a_way(text: str, way: Way) -> None:
    assert parse_latent_way(f" {text} ") == way


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("neer@0.1", UnknownNameError, "Did you mean 'near'"),
        ("path@3", InputError, "path takes no value"),
        ("horizon@0.5", InputError, "'0.5' is no s, expected a whole number"),
        ("near@1.2.3", InputError, "'1.2.3' is no r, expected a number"),
        ("horizon@0", InputError, "at least 1 denoising step"),
        ("fewer", InputError, "expected fewer@N"),
        ("fewer@8:jacobi", InputError, "of the target alone"),
        ("path:model/sampled", InputError, "expected RULE"),
        ("near@", InputError, "expected RULE"),
    ],
)
def test_other_names_are_refused(text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        parse_latent_way(text)


def test_plain_comes_first_and_each_way_once() -> None:
    names = [way.name for way in parse_latent_ways(["path", "plain", "path", ""])]
    assert names == ["plain", "path"]
    assert [way.name for way in parse_latent_ways(USUAL)] == ["plain", *USUAL]
    assert parse_latent_way("fewer@4").series == parse_latent_way("fewer@8").series == "fewer"


def test_pipelines_share_the_model_and_its_schedule(tmp_path: Path) -> None:
    base = LatentPipeline.from_pretrained(models.save(tmp_path), None, steps=4, floor=0.2)
    near = build_latent_way(parse_latent_way("near@0.3"), base, "16", 1)
    path = build_latent_way(parse_latent_way("horizon@2:jacobi"), base, "auto", 1)
    fewer = build_latent_way(parse_latent_way("fewer@2"), base, 12, 1)
    plain = build_latent_way(parse_latent_way("plain"), base, 12, 1)
    assert all(pipe.model is base.model for pipe in (near, path, fewer, plain))
    assert isinstance(near.rule, Near) and near.rule.r == 0.3
    assert isinstance(path.rule, Horizon) and path.rule.s == 2
    assert [pipe.schedule.steps for pipe in (near, path, fewer, plain)] == [4, 4, 2, 4]
    assert {pipe.schedule.floor for pipe in (near, path, fewer, plain)} == {0.2}
    sources: list[Any] = [pipe.source for pipe in (near, path, fewer, plain)]
    drafters = [source.drafter for source in sources]
    assert [getattr(each, "window", None) for each in drafters] == [16, 12, None, None]
    assert isinstance(drafters[0], JacobiDrafter) and drafters[2] is drafters[3] is None
