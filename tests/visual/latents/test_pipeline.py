"""`LatentPipeline` and `ragspec draw` over continuous latents, with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError, RagspecError, UnknownNameError, UnsupportedModelError
from ragspec.pipelines.cli.app import main
from ragspec.visual import ImagePipeline, LatentPipeline
from ragspec.visual.latents import Near
from ragspec.visual.latents.rules import make_latent_rule
from tests.support import tiny_images
from tests.support import tiny_latents as models

RULES = ("near", "aligned", "horizon", "path")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("latents")
    made = models.model(dtype=torch.float32, strength=0.2)
    made.config.id2label = {}
    made.save_pretrained(root / "target")
    tiny_images.tokenizer().save_pretrained(root / "tokenizer", dtype=torch.float32)
    return root


def pipeline(folder: Path, *args: Any, **given: Any) -> LatentPipeline:
    pipe = LatentPipeline.from_pretrained(folder, *args, **given)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: LatentPipeline, count: int = 4, **given: Any) -> Any:
    labels = [n % models.CLASSES for n in range(count)]
    dice = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return pipe(class_labels=labels, generator=dice, **given)


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_fixes_a_picture(folder: Path, rule: str) -> None:
    pipe = pipeline(folder, rule=rule)
    first = drawn(pipe)
    again, fewer = drawn(pipe), drawn(pipe, 2)
    assert torch.equal(first.latents, again.latents)
    assert torch.allclose(first.latents[:2], fewer.latents, atol=1e-4)
    assert first.latents.shape == (4, models.SIDE, models.SIDE, models.WIDTH)
    assert first.images[0].size == (6, 6) and first.label == pipe.rule.label
    assert first.stats.codes_per_forward > 1.0 or rule != "near"


def test_plain_pictures_and_near_0_are_the_same(folder: Path) -> None:
    plain = drawn(pipeline(folder, None))
    near = drawn(pipeline(folder, rule=Near(0.0)))
    assert torch.allclose(plain.latents, near.latents, atol=1e-4)
    assert near.label == "exact" and plain.stats.forwards == 4 * models.SIDE**2


def test_outputs_and_settings(folder: Path) -> None:
    pipe = pipeline(folder, steps=3, floor=0.2)
    assert pipe.schedule.steps == 3 and pipe.schedule.floor == 0.2
    found = drawn(pipe, 2, output_type="latent")
    assert torch.equal(found.images, found.latents)
    assert drawn(pipe, 2, output_type="pt").images.shape == (2, 3, 6, 6)
    other = drawn(pipeline(folder, steps=4, floor=0.2), 2, output_type="latent")
    assert not torch.allclose(other.latents, found.latents)
    unguided = drawn(pipe, 2, guidance_scale=1.0)
    assert not torch.allclose(unguided.latents, found.latents)


def test_it_draws_again_from_what_it_saved(folder: Path, tmp_path: Path) -> None:
    pipe = pipeline(folder)
    pipe.save_pretrained(tmp_path / "copy")
    again = pipeline(tmp_path / "copy")
    assert torch.allclose(drawn(pipe).latents, drawn(again).latents, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.5}, "got temperature=0.5"),
        ({"top_k": 3}, "got top_k=3"),
        ({"guidance_interval": (0, 3)}, "guidance_interval"),
    ],
)
def test_what_densities_have_not_is_refused(
    folder: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        drawn(pipeline(folder), **given)


def test_bad_names_and_models_are_refused(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'near'"):
        pipeline(folder, rule="neer")
    with pytest.raises(UnknownNameError, match="Did you mean 'jacobi'"):
        pipeline(folder, "jacobbi")
    with pytest.raises(InputError, match="has no s; it takes r"):
        pipeline(folder, rule="near", s=3)
    with pytest.raises(InputError, match="expected settings by a name"):
        pipeline(folder, rule=Near(0.1), r=3)
    with pytest.raises(InputError, match="floor between 0 and 1"):
        pipeline(folder, floor=0.0)
    with pytest.raises(UnsupportedModelError, match="LatentPipeline"):
        ImagePipeline.from_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="expected a LatentModel"):
        LatentPipeline(tiny_images.model(), tiny_images.tokenizer())
    with pytest.raises(RagspecError, match="has no r"):
        make_latent_rule("path", r=1.0)


@pytest.mark.parametrize("rule", [[], ["--rule", "near", "--r", "0.5"], ["--rule", "path"]])
def test_the_command_draws(
    folder: Path, tmp_path: Path, rule: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    given = ["draw", "--model", str(folder), "--class", "1", "--n", "2", "--seed", "3"]
    given += [*rule, "--out", str(tmp_path / "out"), "--json", str(figures), "--compare"]
    assert main(given) == 0, capsys.readouterr().err
    found = json.loads(figures.read_text())
    assert found["rule"] == (rule[1] if rule else "aligned")
    assert len(found["images"]) == 2 and all(Path(path).is_file() for path in found["images"])
    assert found["label"] == ("approximate" if "near" in rule else "exact-for(law)")
    assert found["forwards"] <= found["forwards_plain"]
    assert found["psnr"] is None or found["psnr"] > 5.0
    assert list((tmp_path / "out").glob("*compare.png"))
