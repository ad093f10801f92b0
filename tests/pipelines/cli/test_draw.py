"""`ragspec draw`: options, messages, exit codes."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.draw import _slug, _write_new
from ragspec.visual import ImagePipeline
from tests.support import tiny_images, tiny_masked
from tests.support.command_line import Capture, output_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_images.save(tmp_path_factory.mktemp("images")))


def test_draw_writes_images_and_figures(folder: str, tmp_path: Path, capsys: Capture) -> None:
    figures = tmp_path / "out" / "figures.json"  # in a folder that is not there yet
    out, _ = output_of(
        *(capsys, "draw", "--class", "green/leaf", "--model", folder, "--n", "2", "--seed", "1"),
        *("--rule", "lantern", "-s", "delta=0.2", "-s", "neighbours=5", "--budget", "6"),
        *("--out", tmp_path / "out", "--json", figures),
    )
    assert "label approximate" in out
    result = json.loads(figures.read_text(encoding="utf-8"))
    assert {"label", "forwards", "seconds", "tv_excess", "images"} <= set(result)
    assert all(Path(path).is_file() for path in result["images"])


def draw(*arguments: object) -> dict[str, Any]:
    """Draw, and return the figures."""
    out = Path(str(arguments[-1]))
    figures = out.with_suffix(".json")
    assert main(["draw", *map(str, arguments[:-1]), "--out", str(out), "--json", str(figures)]) == 0
    return dict(json.loads(figures.read_text(encoding="utf-8")))


def test_a_saved_pipeline_draws_with_its_settings_and_a_random_seed(
    tmp_path: Path, capsys: Capture
) -> None:
    masked = tiny_masked.save(tmp_path / "masked")
    ImagePipeline.from_pretrained(masked, None, steps=4, iterations=3).save_pretrained(tmp_path)
    result = draw("--class", "1", "--model", tmp_path, tmp_path / "out")
    assert result["forwards"] == 3
    assert f"seed {result['seed']}" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_image_holds_its_settings(folder: str, tmp_path: Path, dtype: str) -> None:
    place = ("--seed", "1", "-s", f"dtype={dtype}", "-s", "top_k=3", tmp_path / "out")
    result = draw("--class", "red", "--class", "2", "--model", folder, *place)
    assert (len({*result["subjects"]}), result["family"], result["guidance"]) == (2, "llamagen", 2)
    drafts = {"drafter": "jacobi", "budget": 12}
    assert (drafts.items() <= result.items()) == ("drafter" in result) == (dtype != "float32")
    more: dict[str, Any] = {"delta": 0.2, "neighbours": 5}
    pipe = ImagePipeline.from_pretrained(folder, "model", "lantern", budget=3, dtype=dtype, **more)
    pipe.save_pretrained(tmp_path / "saved")
    result = draw("--class", "1", "--model", tmp_path / "saved", *place)
    record = json.loads(Image.open(result["images"][0]).info["ragspec"])
    stored = {"rule": "lantern", "settings": more | {"top_k": 3}, "budget": 3}
    assert record == record | stored | {"drafter": "model"}
    image = pipe(class_labels=1, seed=1, top_k=3).images[0]
    assert Image.open(result["images"][0]).tobytes() == image.tobytes()


def test_a_file_of_another_run_is_not_overwritten(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def call(pipe: ImagePipeline, **arguments: Any) -> Any:
        (out / "red-1-0.png").write_bytes(b"another run's")
        (out / "red-1-2.png").symlink_to(tmp_path / "nowhere.png")
        return original(pipe, **arguments)

    original = ImagePipeline.__call__
    monkeypatch.setattr(ImagePipeline, "__call__", call)
    result = draw("--class", "red", "--model", folder, "--seed", 1, "--n", 2, out)
    assert result["images"] == [str(out / f"red-1-{number}.png") for number in (3, 1)]
    assert (out / "red-1-0.png").read_bytes() == b"another run's"
    assert all(Image.open(str(path)).info["ragspec"] for path in result["images"])
    assert not (tmp_path / "nowhere.png").exists()


def test_an_interrupt_leaves_whole_images_and_counts_them(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(image: Any, file: Any, *args: Any, **settings: Any) -> None:
        if len(list((tmp_path / "out").iterdir())) == 2:
            file.write(b"half") if hasattr(file, "write") else Path(file).write_bytes(b"half")
            raise KeyboardInterrupt
        save(image, file, *args, **settings)

    save = Image.Image.save
    monkeypatch.setattr(Image.Image, "save", interrupted)
    words = ["draw", "--class", "red", "--model", folder, "--n", "4", "--out"]
    message = " ".join(output_of(capsys, *words, tmp_path / "out", code=130).err.split())
    assert f"stopped with 2 images in {tmp_path / 'out'}" in message
    for path in (tmp_path / "out").iterdir():
        Image.open(path).load()


def test_a_failed_write_leaves_no_partial_image(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        _write_new(tmp_path / "image.png", iter(()), "no bytes")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_open_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.png").write_bytes(b"before")
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(24, "too many open files")))
    with pytest.raises(OSError, match="too many"):
        _write_new(tmp_path / "image.png", iter(()), b"new")
    assert (tmp_path / "image.png").exists()


def test_folders_of_a_failed_run_are_removed(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["draw", "--class", "1", "--model", folder, "--out", str(tmp_path / "file")]) == 2
    new = tmp_path / "a" / "b"
    assert main(["draw", "--class", "9", "--model", folder, "--out", str(new)]) == 2
    assert not (tmp_path / "a").exists()


def test_file_names_keep_letters_of_every_script() -> None:
    assert _slug("Große Katze, 猫!") == "große-katze-猫"
    assert _slug("!?") == "image"
