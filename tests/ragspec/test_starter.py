"""The starter text models are what their card says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "low", "high", "least"), [("target", 10e6, 14e6, 0.98), ("draft", 1e6, 3e6, 0.5)]
)
def test_the_starter_models_are_small_whole_and_copy(
    name: str, low: float, high: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ROOT / "ragspec" / "starter" / name
    assert all(path.stat().st_size < 15e6 for path in folder.iterdir())
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert low <= sum(p.numel() for p in model.parameters()) <= high
    assert model.config.max_position_embeddings >= 2048 and model.config.eos_token_id == 0
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    accuracy = importlib.import_module("text_model").repeat_accuracy(model.eval(), 8, 128, 11)
    assert accuracy >= least
