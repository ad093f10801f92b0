"""`ragspec draw --image --mask`: what is kept, under every rule, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ragspec.errors import InputError
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.kept_codes import kept_codes
from ragspec.visual import ImagePipeline
from tests.support import tiny_images, tiny_latents, tiny_masked

Capture = pytest.CaptureFixture[str]
CELLS = np.array([[0, 255, 0], [255, 0, 0], [0, 255, 255]], dtype=np.uint8)
RULES = ("exact", "lantern", "lantern++", "gsd", "even", "cool", "rejection", "lantern-rejection")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> ImagePipeline:
    return ImagePipeline.from_pretrained(folder, device="cpu")


def picture(path: Path, side: int = 6, mode: str = "RGB") -> Path:
    bands = 4 if mode == "RGBA" else 3
    values = np.random.default_rng(0).integers(0, 200, (side, side, bands), dtype=np.uint8)
    Image.fromarray(values, mode).save(path)
    return path


def mask(path: Path, values: np.ndarray = CELLS) -> Path:
    Image.fromarray(values).save(path)
    return path


def test_black_keeps_the_codes_of_the_picture_and_white_asks_for_new_ones(
    pipe: ImagePipeline, tmp_path: Path
) -> None:
    image, small = picture(tmp_path / "p.png"), mask(tmp_path / "m.png")
    kept = kept_codes(image, small, pipe)
    values = torch.from_numpy(np.asarray(Image.open(image)) / 127.5 - 1).permute(2, 0, 1).float()
    own = pipe.tokenizer.encode(values[None]).reshape(3, 3)
    assert torch.equal(kept.codes == -1, torch.from_numpy(CELLS == 255))
    assert torch.equal(kept.codes[kept.codes >= 0], own[kept.codes >= 0])
    wide = mask(tmp_path / "w.png", CELLS.repeat(2, 0).repeat(2, 1))
    assert torch.equal(kept_codes(image, wide, pipe).codes, kept.codes)
    one = np.zeros((6, 6), dtype=np.uint8)
    one[3, 4] = 255  # a single pixel asks for its whole code
    found = kept_codes(image, mask(tmp_path / "o.png", one), pipe).codes
    assert (found == -1).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_leaves_what_was_kept(folder: Path, tmp_path: Path, rule: str) -> None:
    pipe = ImagePipeline.from_pretrained(folder, "auto", rule, device="cpu", budget=6)
    codes = kept_codes(picture(tmp_path / "p.png"), mask(tmp_path / "m.png"), pipe).codes
    dice = torch.Generator().manual_seed(1)
    out = pipe(class_labels=[0, 1], codes=codes, num_images_per_prompt=4, generator=dice)
    assert (out.codes[:, codes >= 0] == codes[codes >= 0]).all()
    assert len({tuple(each) for each in out.codes[:, codes < 0].tolist()}) > 1


def test_the_files_show_the_kept_part_as_it_was(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    image, small = picture(tmp_path / "p.png"), mask(tmp_path / "m.png")
    figures, out = tmp_path / "f.json", tmp_path / "out"
    arguments = ["draw", "-c", "1", "--model", str(folder), "-n", "3", "--seed", "1", "--compare"]
    arguments += ["--image", str(image), "--mask", str(small), "--json", str(figures)]
    assert main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["kept_codes"] == 5 and found["equal"] is True
    given = np.asarray(Image.open(image))
    new = CELLS.repeat(2, 0).repeat(2, 1) == 255
    for path in found["images"]:
        drawn = np.asarray(Image.open(path))
        assert (drawn[~new] == given[~new]).all() and (drawn[new] != given[new]).any()
    assert any(path.name.endswith("-kept-sheet.png") for path in out.iterdir())


def test_a_white_mask_keeps_nothing(folder: Path, tmp_path: Path) -> None:
    image = picture(tmp_path / "p.png")
    white = mask(tmp_path / "m.png", np.full((3, 3), 255, dtype=np.uint8))
    usual = ["draw", "-c", "1", "--model", str(folder), "--seed", "1"]
    found = []
    for name, more in (("a", []), ("b", ["--image", str(image), "--mask", str(white)])):
        figures = tmp_path / f"{name}.json"
        files = ["--out", str(tmp_path / name), "--json", str(figures)]
        assert main([*usual, *more, *files]) == 0
        (path,) = json.loads(figures.read_text(encoding="utf-8"))["images"]
        found.append(np.asarray(Image.open(path)))
    assert (found[0] == found[1]).all()


def test_what_does_not_fit_is_refused(pipe: ImagePipeline, tmp_path: Path) -> None:
    image, small = picture(tmp_path / "p.png"), mask(tmp_path / "m.png")
    (tmp_path / "text.png").write_text("none", encoding="utf-8")
    black = mask(tmp_path / "black.png", np.zeros((3, 3), dtype=np.uint8))
    odd = mask(tmp_path / "odd.png", np.zeros((4, 3), dtype=np.uint8))
    cases = [
        (picture(tmp_path / "big.png", 8), small, "is 8 x 8 pixels; expected 6 x 6"),
        (picture(tmp_path / "clear.png", 6, "RGBA"), small, "see-through"),
        (image, odd, "is 3 x 4 pixels; expected 6 x 6 as the picture, or 3 x 3"),
        (image, black, "no white pixel"),
        (tmp_path / "text.png", small, "cannot be read as a picture"),
    ]
    for one, two, message in cases:
        with pytest.raises(InputError, match=message):
            kept_codes(one, two, pipe)


def test_half_a_request_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: Capture
) -> None:
    usual = ["draw", "-c", "1", "--model", str(tmp_path / "absent")]
    image = picture(tmp_path / "p.png")
    for more, message in (
        (["--image", str(image)], "got --image alone"),
        (["--mask", str(image)], "got --mask alone"),
        (["--image", str(image), "--mask", str(tmp_path / "no.png")], "there is no file"),
    ):
        assert main([*usual, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("made", [tiny_latents, tiny_masked], ids=["causal", "masked"])
@pytest.mark.parametrize("way", ["--out", "--sheet"])
def test_latents_cannot_be_given(made: Any, way: str, tmp_path: Path, capsys: Capture) -> None:
    folder = made.save(tmp_path / "latents")
    image, small = picture(tmp_path / "p.png"), mask(tmp_path / "m.png")
    arguments = ["draw", "-c", "1", "--model", str(folder), way, str(tmp_path / "out.png")]
    assert main([*arguments, "--image", str(image), "--mask", str(small)]) == 2
    assert "continuous latents" in capsys.readouterr().err
