"""Keywords of diffusers' loaders: honoured, or refused with what to do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from ragspec.errors import InputError, ModelNotFoundError
from ragspec.visual.pipeline.diffusers_mixin import check_loading, saving
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from ragspec.visual.pipeline.pipeline import ImagePipeline
from tests.support import tiny_images, tiny_masked


def test_one_device_may_be_reported_in_every_form() -> None:
    for where in ("cpu", {"": "cpu"}, {"model": "cpu", "vq": "cpu"}, torch.device("cpu")):
        assert check_loading({"device_map": where}, "auto") == (torch.device("cpu"), False)
    assert check_loading({"device_map": "auto"}, "cpu") == ("auto", False)
    assert check_loading({"local_files_only": True}, "cpu") == ("cpu", True)
    for spread in ("balanced", "sequential", {"model": 0, "vq": "cpu"}):
        with pytest.raises(InputError, match=r"got device_map=.*device='cuda'"):
            check_loading({"device_map": spread}, "auto")


def keywords() -> list[str]:
    """Return the keywords that diffusers' own loader takes out of what it is given."""
    source = inspect.getsource(DiffusionPipeline.from_pretrained.__wrapped__)
    return sorted(set(re.findall(r'kwargs\.pop\("(\w+)"', source)))


@pytest.mark.parametrize("name", keywords())
def test_no_keyword_of_diffusers_is_taken_for_a_setting_of_a_rule(name: str) -> None:
    honoured = {"torch_dtype", "dtype", "device_map", "local_files_only"}
    settings: dict[str, Any] = {name: True if name != "device_map" else "cpu", "delta": 0.2}
    served_elsewhere = {"provider", "sess_options", "provider_options", "load_connected_pipeline"}
    if name in {*honoured, "use_safetensors", "low_cpu_mem_usage"}:
        check_loading(settings, "cpu")
        assert settings.keys() - {"torch_dtype", "dtype"} == {"delta"}
    elif name not in served_elsewhere:  # of ONNX and of other pipelines
        with pytest.raises(InputError, match=rf"got {name}=True; expected nothing there: \w+"):
            check_loading(settings, "cpu")


def test_what_cannot_be_turned_off_is_reported() -> None:
    for name in ("use_safetensors", "low_cpu_mem_usage"):
        assert check_loading({name: None}, "cpu") == ("cpu", False)
        with pytest.raises(InputError, match=f"got {name}=False; it is always true"):
            check_loading({name: False}, "cpu")


def test_local_files_only_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[bool] = []

    def from_hub(name: str, offline: bool) -> tuple[None, str]:
        requests.append(offline)
        return None, ""

    monkeypatch.setattr("ragspec.models.resolve._from_hub", from_hub)
    for offline in (True, False):
        with pytest.raises(ModelNotFoundError):
            ImagePipeline.from_pretrained("nobody/nothing", local_files_only=offline)
    assert requests == [True, False]


def test_savers_write_safetensors_alone(tmp_path: Path) -> None:
    assert saving({"safe_serialization": True, "variant": None, "max_shard_size": "1KB"}) == {
        "max_shard_size": "1KB"
    }
    pipe = ImagePipeline(tiny_images.model(), tiny_images.tokenizer())
    for wrong in ({"safe_serialization": False}, {"variant": "fp16"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            pipe.save_pretrained(tmp_path / "wrong", **wrong)
    pipe.save_pretrained(tmp_path / "shards", max_shard_size="20KB", safe_serialization=True)
    assert len([*(tmp_path / "shards" / "target").glob("*.safetensors")]) > 1
    again = ImagePipeline.from_pretrained(tmp_path / "shards")
    assert torch.equal(again.model.lm_head.weight, pipe.model.lm_head.weight)


def test_masked_pipelines_take_the_same_keywords(tmp_path: Path) -> None:
    model = tiny_masked.model(tmp_path, 0.1).float()
    pipe = MaskedLatentPipeline(model, tiny_images.tokenizer(), iterations=3, steps=4)
    pipe.save_pretrained(tmp_path / "saved")
    record: dict[str, Any] = {
        "torch_dtype": torch.float64,
        "device_map": "cpu",
        "local_files_only": True,
    }
    again = MaskedLatentPipeline.from_pretrained(tmp_path / "saved", **record)
    assert again.dtype == torch.float64
    with pytest.raises(InputError, match="variant='fp16'"):
        MaskedLatentPipeline.from_pretrained(tmp_path / "saved", variant="fp16")
