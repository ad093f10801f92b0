"""The starter text models are what their card says."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.visual import ImagePipeline, VQTokenizer

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "low", "high", "least"), [("target", 10e6, 14e6, 0.98), ("draft", 1e6, 3e6, 0.5)]
)
def test_starters_are_small_and_whole(name: str, low: float, high: float, least: float) -> None:
    folder = ROOT / "ragspec" / "starter" / name
    assert all(path.stat().st_size < 15e6 for path in folder.iterdir())
    model = module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert low <= sum(p.numel() for p in model.parameters()) <= high
    assert model.config.max_position_embeddings >= 2048 and model.config.eos_token_id == 0
    assert module("text_model").repeat_accuracy(model.eval(), 8, 128, 11) >= least


IMAGES = ROOT / "ragspec" / "starter" / "images"
EMBEDDER = ROOT / "ragspec" / "starter" / "embedder"


def test_the_image_folder_is_small_and_as_its_card_says() -> None:
    files = [path for path in IMAGES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 13e6
    card = (IMAGES / "README.md").read_text()
    sums = module("image_export").checksums(IMAGES)
    ours = ("tokenizer", "emoji", "tiles")  # models of latents have other cards
    parts = ("tokenizer", "target", "draft")
    built_here = {
        name: sha
        for name, sha in sums.items()
        if Path(name).parts[0] in ours and Path(name).parent.name in parts
    }
    assert len(built_here) == 10 and all(
        f"{sha}  {name}" in card for name, sha in built_here.items()
    )
    for licence in ("Apache-2.0", "OFL-1.1", "CC0-1.0", "Unicode License"):
        assert licence in card


@pytest.mark.parametrize("kind", ["emoji", "tiles"])
def test_the_draft_model_agrees_with_the_target(kind: str) -> None:
    sheet = module("image_sheet")
    llamagen = module("ragspec.visual.models.llamagen").LlamaGenModel
    models = [
        llamagen.from_pretrained(IMAGES / kind / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    ]
    inputs, _ = sheet.selection(kind, models[0], EMBEDDER)
    codes, entropy = sheet.draw(
        models[0], inputs[:16], 1.0, 1.0, 1024, torch.Generator().manual_seed(3)
    )
    assert 1.0 < float(entropy.mean()) < 5.5, "neither a memory nor noise"
    assert sheet.agreement(*models, inputs[:16], codes)["overlap"] > 0.3


def test_the_tokenizer_reconstructs_pictures(shared: Path) -> None:
    data, script = module("image_data"), module("image_tokenizer")
    tokenizer = VQTokenizer.from_pretrained(IMAGES / "tokenizer")
    sets = [data.read_pictures(shared, kind) for kind in data.SETS]
    for pictures in sets:
        assert script.psnr(tokenizer, data.split(pictures)[1]) > 20
    assert script.codes_in_use(tokenizer, sets) >= 1000
    assert json.loads((IMAGES / "tokenizer" / "config.json").read_text())["vq_embed_dim"] == 8


def card_of(name: str, files: int) -> str:
    """Return the card of a model, whose files are those that it lists."""
    card = (IMAGES / name / "README.md").read_text()
    sums = module("image_export").checksums(IMAGES / name)
    assert len(sums) == files and all(f"{sha}  {name}" in card for name, sha in sums.items())
    return card


def test_the_latents_are_as_their_card_says() -> None:
    assert "CC0-1.0" in card_of("latent-tiles", 4)
    sample = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {"drafter": None},
        "aligned": {},
        "near": {"rule": "near"},
    }
    for name, inputs in ways.items():
        pipe = ImagePipeline.from_pretrained("latent-tiles", **inputs)
        sample[name] = pipe(class_labels=[pipe.class_names[n] for n in (3, 9, 17, 24)], seed=0)
    assert sample["aligned"].label == "exact-for(distribution)"
    assert sample["near"].label == "approximate"
    assert sample["aligned"].stats.codes_per_forward > 1.7 < sample["near"].stats.codes_per_forward
    difference = (sample["near"].latents - sample["plain"].latents).abs()
    assert float(difference.max()) < 0.2 < float(sample["plain"].latents.std())
    spread = sample["plain"].latents.flatten(0, 2).std(0)
    assert float(spread.min()) > 0.05, "neither a constant nor one colour"


def test_the_draft_model_of_latents_is_as_the_card_says() -> None:
    tiles, emoji = (
        ImagePipeline.from_pretrained(name, drafter="model", rule="path")
        for name in ("latent-tiles", "latent-emoji")
    )
    labels = [tiles.class_names[n] for n in (3, 9, 17, 24)]
    for pipe, request, least in (
        (tiles, {"class_labels": labels}, 1.15),
        (emoji, {"prompt": ["red heart", "green heart", "clown face", "grinning face"]}, 1.0),
    ):
        sample = pipe(**request, seed=0)
        assert sample.label == "exact-for(distribution)"
        assert sample.stats.codes_per_forward > least, "a model that learnt nothing has 1.0"


def test_the_latents_of_prompts_are_as_their_card_says() -> None:
    card_of("latent-emoji", 4)
    pipe = ImagePipeline.from_pretrained("latent-emoji")
    sample = pipe(["red heart", "green heart"] * 2, seed=0, output_type="pt")
    assert sample.label == "exact-for(distribution)" and sample.stats.codes_per_forward > 1.5
    red, green = (sample.images[first::2, :, 12:20, 12:20].mean((0, 2, 3)) for first in (0, 1))
    assert red[0] > red[1] + 0.3 and green[1] > green[0] + 0.1, "the name is read"


def test_the_masked_model_is_as_its_card_says() -> None:
    card = card_of("masked-tiles", 2)
    pipe = ImagePipeline.from_pretrained("masked-tiles", steps=8, iterations=16)
    assert f"{sum(each.numel() for each in pipe.model.parameters()):,} parameters" in card
    pictures = pipe(class_labels=["dngn/water", "dngn/wall"] * 2, seed=0, output_type="pt")
    water, wall = pictures.images[::2], pictures.images[1::2]
    assert float(wall.mean()) != pytest.approx(float(water.mean()), abs=0.02), "classes differ"
    spread = pictures.latents.flatten(0, 2).std(0)
    assert float(spread.min()) > 0.05, "neither a constant nor one colour"
