"""Files of published weights: the reader finds the weights and runs no code of the file."""

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ragspec.errors import MissingModelError, ModelError
from ragspec.visual.models.published import PLACES, read_checkpoint

WEIGHTS = {"norm.weight": torch.ones(3), "output.weight": torch.ones(2, 3)}


@pytest.mark.parametrize("place", [*PLACES, None])
def test_weights_are_detected_wherever_they_lie(place: str | None, tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    torch.save({place: WEIGHTS, "steps": 7} if place else WEIGHTS | {"steps": 7}, file)
    result, settings = read_checkpoint(file)
    assert result.keys() == WEIGHTS.keys() and settings is None
    wrapped = {f"module._orig_mod.module.{name}": value for name, value in WEIGHTS.items()}
    save_file(wrapped, tmp_path / "c.safetensors")
    assert read_checkpoint(tmp_path / "c.safetensors")[0].keys() == WEIGHTS.keys()


def test_settings_of_training_scripts_are_plain_data(tmp_path: Path) -> None:
    file, message = tmp_path / "c.pt", argparse.Namespace(image_size=64)
    torch.save({"model": WEIGHTS, "args": message}, file)
    assert read_checkpoint(file)[1] == message
    with pytest.raises(pickle.UnpicklingError, match="Namespace"):  # for others it stays refused
        torch.load(file, weights_only=True)


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.call[0], self.call[1:])


def test_other_objects_are_never_opened(tmp_path: Path) -> None:
    mark, file = tmp_path / "was run", tmp_path / "c.pt"
    hook = Hostile(Path.touch, mark)
    for more in ({"hook": hook}, {"args": argparse.Namespace(hook=hook)}):
        torch.save({"model": WEIGHTS, **more}, file)
        with pytest.raises(ModelError, match=r"expected tensors and plain containers"):
            read_checkpoint(file)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_message_says_how_to_run_what_a_file_holds(tmp_path: Path) -> None:
    file, command = tmp_path / "c.pt", Hostile(os.system, "true")  # of a module that torch blocks
    torch.save({"model": command}, file)
    contents = {
        file.read_bytes(): "holds posix.system; expected tensors",
        pickle.dumps(command, protocol=2): "holds posix.system; expected tensors",
        pickle.dumps(command, protocol=4): "(UnpicklingError); expected what torch.save",
        b"": "(EOFError)",
        b"some text\n": "cannot be read",
    }
    for content, message in contents.items():
        file.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            read_checkpoint(file)
        assert message in str(caught.value)
        assert "weights_only" not in str(caught.value)
        assert caught.value.__suppress_context__, "a traceback would show torch's text"


def test_the_places_are_tried_in_order(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    torch.save({"ema": {"a": torch.ones(1)}, "model": {"b": torch.ones(1)}}, file)
    assert list(read_checkpoint(file)[0]) == ["b"]
    assert list(read_checkpoint(file, places=("ema", "model"))[0]) == ["a"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    with pytest.raises(MissingModelError, match="is no file"):
        read_checkpoint(file)
    for content in (b"no checkpoint", b""):
        (tmp_path / "c.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            read_checkpoint(tmp_path / "c.safetensors")
    torch.save([1, 2], file)
    with pytest.raises(ModelError, match="holds a list"):
        read_checkpoint(file)
