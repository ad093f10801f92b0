"""The script that trains the heads of the starter image sets, on a tiny model and drawn codes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head
from ragspec.visual.families.llamagen import LlamaGen
from tests.support import image_models

pytestmark = pytest.mark.usefixtures("training_path")


class Codes:
    """Stands for the pictures of a set."""

    def __init__(self, *arguments: Any) -> None:
        return None

    def draw(self, count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(image_models.BOOK, (count, 16), generator=rng)
        return codes, torch.arange(count) % image_models.CLASSES


def test_heads_are_written_beside_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("image_head")
    for name in ("read_pictures", "split"):
        monkeypatch.setattr(script, name, lambda *arguments: [None])
    monkeypatch.setattr(script, "Rows", Codes)
    monkeypatch.setattr(script.VQTokenizer, "from_pretrained", lambda path: None)
    image_models.model("class").save_pretrained(tmp_path / "tiles" / "target")
    requests = ["--sets", "tiles", "--models", str(tmp_path), "--steps", "3", "--pictures", "100"]
    monkeypatch.setattr("sys.argv", ["image_head.py", *requests])
    script.main()
    assert "step 0" in capsys.readouterr().out
    head = open_head(tmp_path / "tiles" / "head")
    target = image_models.target(LlamaGen.load_model(tmp_path / "tiles" / "target"), 2.0)
    assert HeadDrafter(head, target).head.config.vocab_size == image_models.BOOK
