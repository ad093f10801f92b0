"""What drawing takes is told before anything is loaded, to the byte, and refused where too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual.acceptance.codebook import CodeNeighbours, building_bytes
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.latents import LatentPipeline
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from ragspec.visual.pipeline.pipeline import ImagePipeline
from tests.support import tiny_images, tiny_latents, tiny_masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))


def weights(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("drafter", ["model", "jacobi", None])
def test_every_part_is_told_to_the_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch, drafter: Any
) -> None:
    given: dict[str, Any] = {"drafter": drafter, "rule": "lantern", "neighbours": 7}
    told = ImagePipeline.memory(folder, **given, batch_size=5).parts
    pipe = ImagePipeline.from_pretrained(folder, **given, batch_size=5)
    assert told["weights"] == weights(pipe.model)
    assert told["tokenizer"] == weights(pipe.vq)
    assert told["table of neighbours"] == building_bytes(tiny_images.CODES, 7)
    assert told.get("weights of the draft model", 0) == (weights(pipe.draft) if pipe.draft else 0)
    sessions, opened = [], ImageTarget.open

    def noted(self: Any, rows: int, capacity: int) -> Any:
        sessions.append(opened(self, rows, capacity))
        return sessions[-1]

    monkeypatch.setattr(ImageTarget, "open", noted)
    held: list[int] = []

    def look(*_: Any) -> None:
        layers = sessions[0].cache.layers
        held.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))

    pipe.set_progress_bar_config(disable=True)
    pipe(class_labels=[0, 1, 2, 0, 1], callback_on_step_end=look)
    assert told["cache"] == held[0]


def test_smaller_numbers_take_less(folder: Path) -> None:
    whole, half = (ImagePipeline.memory(folder, dtype=kind) for kind in ("float32", "bfloat16"))
    assert half.parts["weights"] == whole.parts["weights"] // 2
    assert half.parts["cache"] == whole.parts["cache"] // 2
    assert half.parts.keys() == {"weights", "cache", "tokenizer"}  # nothing relaxed, no draft


def test_a_table_that_is_given_and_rules_without_one_take_nothing(folder: Path) -> None:
    table = CodeNeighbours.build(tiny_images.tokenizer().codebook(), 4)
    for rule, given in (("lantern", table), ("gsd", None), ("no rule", None)):
        told = ImagePipeline.memory(folder, None, rule, neighbours=given)
        assert "table of neighbours" not in told.parts
    assert "table of neighbours" in ImagePipeline.memory(folder, None, "lantern++").parts


@pytest.mark.parametrize("free", [10_000, 60_000])
def test_what_does_not_fit_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    assert ImagePipeline.memory(folder, batch_size=16).total > free
    monkeypatch.setattr("ragspec.models.memory.free_memory", lambda: free)
    monkeypatch.setattr(ImagePipeline, "_load", lambda *given: 1 / 0)
    with pytest.raises(
        InputError, match=r"\(weights .*cache .*\); 0\.00 GB are free .*batch_size="
    ):
        ImagePipeline.from_pretrained(folder)


def test_fewer_side_by_side_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (ImagePipeline.memory(folder, batch_size=n).total for n in (1, 64))
    monkeypatch.setattr("ragspec.models.memory.free_memory", lambda: (few + many) // 2)
    with pytest.raises(InputError, match="no room"):
        ImagePipeline.from_pretrained(folder, batch_size=64)
    assert ImagePipeline.from_pretrained(folder, batch_size=1).batch_size == 1


def test_other_pipelines_tell_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = tiny_latents.save(tmp_path / "latents")
    told = LatentPipeline.memory(latents, "model", dtype=torch.float32)
    assert {"weights", "cache", "weights of the draft model"} <= told.parts.keys()
    model = tiny_masked.model(tmp_path, 0.1).float()
    pipe = MaskedLatentPipeline(model, tiny_images.tokenizer(), iterations=3, steps=4)
    pipe.save_pretrained(tmp_path / "masked")
    monkeypatch.setattr("ragspec.models.memory.free_memory", lambda: 100)
    with pytest.raises(InputError, match="no room for drawing with"):
        LatentPipeline.from_pretrained(latents)
    with pytest.raises(InputError, match="no room for target of"):
        MaskedLatentPipeline.from_pretrained(tmp_path / "masked")
    with pytest.raises(InputError, match=r"no room for mar\.pth, which takes .*the file"):
        MaskedLatentPipeline.from_pretrained(tmp_path / "mar.pth", allow_namespace=True)
