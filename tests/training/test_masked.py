"""The script that trains a masked model: its loss, and that it goes on where it was left."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ragspec.visual import ImagePipeline
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.models.vq import VQTokenizer
from tests.support import plain_mar

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


def rectangles(folder: Path) -> Path:
    """Write a set of rectangles in the layout of the tiles; returns the shared folder."""
    place, dice = folder / "data" / "images", np.random.default_rng(0)
    place.mkdir(parents=True)
    images = np.zeros((40, 32, 32, 3), dtype=np.uint8)
    for image in images:
        top, left = dice.integers(4, 14, 2)
        image[top : top + 14, left : left + 14] = dice.integers(40, 220, 3)
    np.savez(
        place / "tiles32.npz",
        images=images,
        names=np.array([f"square {n}" for n in range(40)]),
        label=(np.arange(40) % 32).astype(np.uint8),
        class_names=np.array([f"class {n}" for n in range(32)]),
    )
    return folder


def test_masked_latents_are_learnt_preserved_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = module("masked_train")
    monkeypatch.setattr(masked, "BATCH", 4)
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "head_width": 32}
    monkeypatch.setattr(masked, "SIZES", masked.SIZES | small)
    pictures = module("image_data").read_pictures(rectangles(tmp_path), "tiles")
    tokenizer = VQTokenizer.from_pretrained(masked.TOKENIZER)
    trainer = masked.MaskedTrainer(pictures, tokenizer)
    before = trainer.measure()
    losses = [trainer.update(1.0) for _ in range(12)]
    trainer.save(tmp_path / "part.pt")
    again = masked.MaskedTrainer(pictures, tokenizer)
    again.load(tmp_path / "part.pt")
    assert again.update(1.0) == trainer.update(1.0) and again.step == trainer.step == 13
    assert trainer.measure() < before and min(losses) > 0.0
    again.export(tmp_path / "set")
    pipe = ImagePipeline.from_pretrained(
        tmp_path / "set", tokenizer=masked.TOKENIZER, iterations=6, steps=8
    )
    pipe.set_progress_bar_config(disable=True)
    assert pipe.class_names[3] == "class 3"
    result = pipe(class_labels="class 3", seed=0)
    assert result.images[0].size == (32, 32) and result.latents.shape == (1, 8, 8, 8)


def test_the_loss_of_a_masked_model_is_noise_and_the_divergence_of_a_step() -> None:
    torch.manual_seed(0)
    model = MaskedModel(MaskedConfig(4, 12, 1, 1, 3, None, 3, 3, 2, 10, 1)).double()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.4)
    clean, message = torch.randn(6, 4).double(), torch.randn(6, 10).double()
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        result = module("masked_train").noise_loss(
            model, LearnedSchedule(1000), message, clean, dice
        )
    dice = torch.Generator().manual_seed(3)
    times = torch.randint(1000, (6,), generator=dice)
    noise = torch.randn(6, 4, generator=dice, dtype=torch.float32).double()
    _, selected = plain_mar.respaced(1000)
    total = 0.0
    for row, at in enumerate(times.tolist()):
        noisy = selected[at] ** 0.5 * clean[row] + (1 - selected[at]) ** 0.5 * noise[row]
        with torch.no_grad():
            message_noise, where = model.head(
                noisy[None], torch.tensor([at]), message[row : row + 1]
            )
        least = np.full(4, -1.0)
        true = plain_mar.posterior(selected, at, noisy.numpy(), noise[row].numpy(), least)
        mine = plain_mar.posterior(
            selected, at, noisy.numpy(), message_noise[0].numpy(), where[0].numpy()
        )
        difference = np.square(true[0] - mine[0]) / np.exp(mine[1])
        divergence = 0.5 * (mine[1] - true[1] + np.exp(true[1] - mine[1]) + difference - 1.0)
        error = np.square(message_noise[0].numpy() - noise[row].numpy())
        total += float((error + divergence / np.log(2.0)).mean())
    assert abs(float(result) / (total / 6) - 1.0) < 1e-3
