"""What users of diffusers type: offloading, placing, slices, encoded prompts, the bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import hooks

from ragspec.errors import InputError
from ragspec.visual.pipeline.latents import LatentPipeline
from ragspec.visual.pipeline.manners import DiffusersMixin
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from ragspec.visual.pipeline.pipeline import ImagePipeline
from tests.support import tiny_images, tiny_latents, tiny_masked

LABELS = [0, 1, 2]
Maker = Callable[[Path], Any]


def of_codes(root: Path) -> Any:
    return ImagePipeline.from_pretrained(tiny_images.save(root), "model", budget=6)


def of_latents(root: Path) -> Any:
    return LatentPipeline.from_pretrained(tiny_latents.save(root), "model", budget=3)


def masked(root: Path) -> Any:
    model = tiny_masked.model(root, 0.1).float()
    return MaskedLatentPipeline(model, tiny_images.tokenizer(), iterations=3, steps=4)


every = pytest.mark.parametrize("make", [of_codes, of_latents, masked])


def sampled(pipe: Any, **more: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    dice = torch.Generator().manual_seed(2)
    return pipe(class_labels=LABELS, generator=dice, output_type="np", **more).images


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is brought to the accelerator and sent away, as it happens."""
    message: list[str] = []
    bring, away = hooks.CpuOffload.pre_forward, hooks.CpuOffload.init_hook

    def noted(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        message.append(f"+{type(module).__name__}")
        return bring(self, module, *args, **kwargs)

    def left(self: Any, module: Any) -> Any:
        message.append(f"-{type(module).__name__}")
        return away(self, module)

    monkeypatch.setattr(hooks.CpuOffload, "pre_forward", noted)
    monkeypatch.setattr(hooks.CpuOffload, "init_hook", left)
    return message


@every
def test_whole_models_are_supplied_before_they_work_and_sent_away_after(
    make: Maker, tmp_path: Path, moves: list[str]
) -> None:
    pipe = make(tmp_path)
    before = sampled(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    assert pipe._execution_device == torch.device("cpu:0")
    names = {type(each).__name__ for each in pipe.modules().values()}
    assert "VQModel" in names and {move[1:] for move in moves} == names
    moves.clear()
    assert (sampled(pipe) == before).all()
    first_away = next(i for i, move in enumerate(moves) if move[0] == "-")
    supplied = [move for move in moves[:first_away] if move[0] == "+"]
    assert {move[1:] for move in supplied} == names
    assert {move[1:] for move in moves[first_away:]} == names  # each is hooked anew at the end
    assert supplied[0] != "+VQModel" and supplied[-1] == "+VQModel"
    moves.clear()
    with pytest.raises(InputError):
        sampled(pipe, guidance_scale=-1.0)
    assert {move[1:] for move in moves if move[0] == "-"} == names  # after an error too
    pipe.remove_all_hooks()
    moves.clear()
    assert (sampled(pipe) == before).all() and not moves


def test_the_target_leaves_before_the_decoder_comes(tmp_path: Path) -> None:
    pipe = of_codes(tmp_path)
    pipe.enable_model_cpu_offload(device="cpu")
    by_name = {name: each._hf_hook.prev_module_hook for name, each in pipe.modules().items()}
    assert by_name["vq"].model is pipe.model
    assert by_name["model"] is None and by_name["draft"] is None  # they work side by side


@pytest.mark.parametrize("condition", ["class", "features"])
@pytest.mark.parametrize("drafter", ["model", "jacobi"])
def test_layers_are_supplied_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, condition: str
) -> None:
    real = hooks.set_module_tensor_to_device

    def placed(module: Any, name: str, device: Any, **more: Any) -> None:
        # diffusers asks for "cpu:0", which no tensor is on: accelerate takes it for another place.
        real(module, name, "cpu" if str(device) == "cpu:0" else device, **more)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", placed)
    pipe = ImagePipeline.from_pretrained(tiny_images.save(tmp_path, condition), drafter, budget=6)
    pipe.set_progress_bar_config(disable=True)
    what = {"class_labels": LABELS} if condition == "class" else {"prompt": ["red", "cat face"]}

    def codes() -> Any:
        return pipe(**what, generator=torch.Generator().manual_seed(2)).codes

    before = codes()
    pipe.enable_sequential_cpu_offload(device="cpu")
    assert {each.device.type for each in (pipe.model, pipe.draft) if each} == {"meta"}
    assert pipe.vq.device.type == "cpu"
    assert torch.equal(codes(), before)
    pipe.remove_all_hooks()
    assert pipe.model.device.type == "cpu" and torch.equal(codes(), before)


@every
@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_without_an_accelerator_offloading_says_what_to_do(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    pipe = make(tmp_path)
    with pytest.raises(InputError, match=rf"{how} moves .* expected a GPU\. Leave it out"):
        getattr(pipe, how)()
    assert len(sampled(pipe)) == len(LABELS)


@every
def test_slices_are_decoded_one_at_a_time(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, sizes = make(tmp_path), []
    decoder = pipe.modules().get("vq") or pipe.vae
    decoder.decoder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    at_once = sampled(pipe)
    pipe.enable_vae_slicing()
    sliced = sampled(pipe)
    pipe.disable_vae_slicing()
    sampled(pipe)
    assert sizes == [3, 1, 1, 1, 3]
    assert abs(at_once - sliced).max() < 1e-5


@every
def test_all_modules_move_and_change_their_numbers(make: Maker, tmp_path: Path) -> None:
    pipe = make(tmp_path).to("cpu", torch.float64)
    assert pipe.dtype == pipe.model.dtype == torch.float64 and pipe.device.type == "cpu"
    if getattr(pipe, "draft", None) is not None:
        assert pipe.draft.dtype == torch.float64
    assert len(sampled(pipe)) == len(LABELS)
    fewer = {"iterations": 3, "steps": 4} if make is masked else {}
    again = type(pipe)(**pipe.components, **fewer)
    assert again.model is pipe.model and len(sampled(again)) == len(LABELS)
    with torch.device("meta"):
        pipe.to("meta")
    assert {each.device.type for each in pipe.modules().values()} == {"meta"}


def test_the_text_encoder_is_supplied_to_encode_and_leaves(
    tmp_path: Path, moves: list[str]
) -> None:
    class Encoder(torch.nn.Linear):
        pass

    class Captions:
        model = Encoder(3, 224)

        def __call__(self, texts: Any) -> Any:
            moves.append("encoded")
            return self.model(torch.ones(len(texts), 4, 3)).detach()

    pipe = ImagePipeline.from_pretrained(tiny_images.save(tmp_path, "features"), None)
    pipe.captions = Captions()
    pipe.enable_model_cpu_offload(device="cpu")
    moves.clear()
    pipe.set_progress_bar_config(disable=True)
    pipe("red heart")
    assert moves[:2] == ["+Encoder", "encoded"] and "+LlamaGenModel" in moves[2:]


@pytest.mark.parametrize("text", [True, False])
def test_the_bar_can_be_named_and_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bool
) -> None:
    pipe = of_codes(tmp_path)
    capsys.readouterr()
    pipe.set_progress_bar_config(disable=not text, desc="codes")
    pipe(class_labels=LABELS)
    assert ("codes: 100%" in capsys.readouterr().err) is text


def test_every_pipeline_has_them() -> None:
    for kind in (ImagePipeline, LatentPipeline, MaskedLatentPipeline):
        assert issubclass(kind, DiffusersMixin)


@every
def test_what_a_callback_returns_is_not_ignored(make: Maker, tmp_path: Path) -> None:
    pipe = make(tmp_path)
    (name,) = pipe._callback_tensor_inputs
    before = sampled(pipe)
    same = sampled(pipe, callback_on_step_end=lambda pipe, step, count, message: message)
    assert (same == before).all()

    def change(pipe: Any, step: int, count: int, message: dict[str, Any]) -> dict[str, Any]:
        return {name: message[name] + 1}

    with pytest.raises(InputError, match=f"other {name} than it was told"):
        sampled(pipe, callback_on_step_end=change)
