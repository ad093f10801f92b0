"""What users of diffusers type: placing, slices, the bar, callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual import ImagePipeline

LABELS = [0, 1, 2]
Saved = Callable[[str], Path]
SETTINGS: dict[str, dict[str, Any]] = {
    "codes": {"drafter": "model", "budget": 6},
    "latents": {"drafter": "model", "budget": 3},
    "masked": {"iterations": 3, "steps": 4},
}
EVERY = pytest.mark.parametrize("kind", SETTINGS)


def opened(saved: Saved, kind: str) -> Any:
    return ImagePipeline.from_pretrained(saved(kind), **SETTINGS[kind])


def sampled(pipe: Any, **more: Any) -> Any:
    return pipe(class_labels=LABELS, seed=2, output_type="np", **more).images


@EVERY
def test_all_modules_change_device_and_dtype(saved: Saved, kind: str) -> None:
    pipe = opened(saved, kind).to(torch.float64).to("cpu", torch.float64)
    assert pipe.dtype == pipe.model.dtype == torch.float64 and pipe.device.type == "cpu"
    if getattr(pipe, "draft", None) is not None:
        assert pipe.draft.dtype == torch.float64
    assert len(sampled(pipe)) == len(LABELS)
    fewer = SETTINGS[kind] if kind == "masked" else {}
    again = type(pipe)(**pipe.components, **fewer)
    assert again.model is pipe.model and len(sampled(again)) == len(LABELS)
    with torch.device("meta"):
        pipe.to("meta")
    assert {each.device.type for each in (pipe.model, *pipe.family.modules)} == {"meta"}


@pytest.mark.parametrize("text", [True, False])
def test_the_bar_can_be_named_and_turned_off(
    saved: Saved, text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = opened(saved, "codes")
    capsys.readouterr()
    pipe.set_progress_bar_config(disable=not text, desc="codes")
    pipe(class_labels=LABELS)
    assert ("codes: 100%" in capsys.readouterr().err) is text


@EVERY
def test_callbacks_may_not_change_tensors(saved: Saved, kind: str) -> None:
    pipe = opened(saved, kind)
    name, before = pipe.family.unit, sampled(pipe)
    same = sampled(pipe, callback_on_step_end=lambda pipe, step, count, message: message)
    assert (same == before).all()
    with pytest.raises(InputError, match=rf"other {name} than it received.*cannot be changed"):
        sampled(pipe, callback_on_step_end=lambda *inputs: {name: inputs[3][name] + 1})
