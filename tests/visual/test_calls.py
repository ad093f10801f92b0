"""Calls of every family: seeds, guidance, callbacks, devices, NaN, saved folders, adapters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from ragspec.errors import InputError, ModelError, PromptTooLongError
from ragspec.pipelines.bench.images import ImageBenchOptions, ImagePlaceOptions, build_images
from ragspec.pipelines.cli.app import main
from ragspec.visual import ImagePipeline

CALLS: dict[str, dict[str, Any]] = {
    "codes": {"class_labels": [0, 1, 2]},
    "texts": {"prompt": ["cat", "red heart", "sun"]},
    "emu3": {"prompt": ["a cat", "tree", "red"], "height": 6, "width": 4},
    "janus": {"prompt": ["a cat", "tree", "red bicycle"]},
    "latents": {"class_labels": [0, 1, 2]},
    "masked": {"class_labels": [0, 1, 2]},
    "imagegpt": {"num_images_per_prompt": 3},
}
Saved = Callable[[str], Path]
EVERY = pytest.mark.parametrize("kind", CALLS)


def opened(folder: Path, *args: Any, **settings: Any) -> ImagePipeline:
    if folder.name == "masked":
        settings.setdefault("steps", 8)  # of the 100 that it was trained with
    return ImagePipeline.from_pretrained(folder, *args, **settings)


def one(call: dict[str, Any], row: int) -> dict[str, Any]:
    """Return the call of one of its images."""
    single = {name: [value[row]] for name, value in call.items() if isinstance(value, list)}
    rest = {name: value for name, value in call.items() if not isinstance(value, list)}
    return {**rest, **single, "num_images_per_prompt": 1}


def values(out: Any) -> Any:
    return out.codes if out.latents is None else out.latents


@EVERY
def test_images_of_a_batch_equal_those_drawn_alone(saved: Saved, kind: str) -> None:
    pipe, call = opened(saved(kind)), CALLS[kind]
    scales = [1.0] * 3 if kind == "imagegpt" else [3.0, 1.0, 3.0]
    several = pipe(**call, seed=5, guidance_scale=scales)
    assert several.stats.seeds == (5, 6, 7)
    more = {"seed": dict.fromkeys([5, 6, 7]).keys(), "guidance_scale": torch.tensor(scales)}
    assert torch.equal(values(pipe(**call, **more)), values(several))
    for row, scale in enumerate(scales):
        alone = pipe(**one(call, row), seed=several.stats.seeds[row], guidance_scale=scale)
        assert torch.allclose(values(alone)[0], values(several)[row], atol=1e-4)
        assert (alone.acceptance_map[0] == several.acceptance_map[row]).all()


@EVERY
def test_the_adaptive_budget_serves_every_family(saved: Saved, kind: str) -> None:
    drafted, plain = (opened(saved(kind), drafter, budget="auto") for drafter in ("auto", None))
    label = "exact-for(distribution)" if kind == "latents" else "exact"
    assert drafted(**CALLS[kind], seed=5).label == label
    assert plain(**CALLS[kind], seed=5).label == "exact"


@EVERY
def test_on_image_receives_each_complete_image(saved: Saved, kind: str) -> None:
    pipe, done = opened(saved(kind), batch_size=2), dict[int, Any]()
    out = pipe(**CALLS[kind], seed=5, on_image=done.__setitem__)
    assert sorted(done) == [0, 1, 2]
    assert all(done[number] is image for number, image in enumerate(out.images))
    plain = pipe(**CALLS[kind], seed=5)
    for image, other in zip(out.images, plain.images, strict=True):
        assert image.tobytes() == other.tobytes()
    with pytest.raises(KeyboardInterrupt):
        pipe(**CALLS[kind], seed=5, on_image=Mock(side_effect=KeyboardInterrupt))
    assert torch.equal(values(pipe(**CALLS[kind], seed=5)), values(plain))


def test_invalid_arguments_of_a_call_are_refused(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = opened(saved("codes"))
    wrong: list[dict[str, Any]] = [
        *({"seed": seed} for seed in (1.5, [1, 2], [1, 2, "x"], (1 << 63) - 2)),
        {"seed": 1, "generator": torch.Generator()},
        *({"guidance_scale": [1.0, 2.0, *more]} for more in ([], [-1.0], [np.nan])),
        {"guidance_interval": {0, 2}},
        *({"codes": torch.zeros(shape, dtype=torch.int64)} for shape in ((9, 1), (2, 3))),
        {"codes": np.zeros((3, 3), dtype=np.int64)},
    ]
    for inputs in wrong:
        with pytest.raises(InputError, match="expected"):
            pipe(**CALLS["codes"], **inputs)
    scales = [("guidance_scale", [1.0, 2.0]), ("guidance_scale", [])]
    for name, value in (("prompt", "a cat"), ("guidance_interval", np.array([0, 2])), *scales):
        with pytest.raises(InputError, match=r"(\((0, 2|1\.0, 2\.0|)\)|got prompt).* conditions"):
            opened(saved("imagegpt"))(**{name: value})
    for kind in ("codes", "janus", "emu3", "imagegpt"):
        with pytest.raises(InputError, match="got codes from 99 to 99; expected 0 to"):
            opened(saved(kind)).decode(torch.full((1, 3, 3), 99))
    monkeypatch.setattr("ragspec.visual.run.Progress", None)  # it takes memory by the size
    long, small = "red " * 99, {"height": 8, "width": 8}
    lengths: list[tuple[str, dict[str, Any], str]] = [
        ("emu3", {"height": 2000, "width": 2000}, "do: set height x width in codes of 2 pixels to"),
        ("emu3", {"negative_prompt": long, **small}, "shorten negative_prompt by"),
        ("emu3", {"negative_prompt": ["", long, ""], **small}, "shorten negative_prompt 2 of 3 by"),
        ("janus", {"prompt": ["tree", long]}, r"shorten prompt 2 of 2 by \d+ tokens\.$"),
    ]
    for kind, inputs, message in lengths:
        with pytest.raises(PromptTooLongError, match=message):
            opened(saved(kind))(**{"prompt": ["tree"] * 3} | inputs)


@EVERY
def test_an_empty_negative_prompt_is_none(saved: Saved, kind: str) -> None:
    pipe, call = opened(saved(kind)), CALLS[kind]
    plain = pipe(**call, seed=5)
    for blank in ("", " \n", ["", " ", ""], []):
        assert torch.equal(values(pipe(**call, seed=5, negative_prompt=blank)), values(plain))
    if kind not in ("texts", "emu3"):
        with pytest.raises(InputError, match="prompt"):
            pipe(**call, seed=5, negative_prompt=["", "blue cat", ""])
        return
    some = pipe(**call, seed=5, negative_prompt=["", "blue cat", ""])
    assert torch.equal(some.codes[::2], plain.codes[::2])
    assert not torch.equal(some.codes[1], plain.codes[1])


PARTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "codes-condition": lambda pipe: pipe.model.class_embedding.weight,
    "codes-head": lambda pipe: pipe.model.lm_head.weight,
    "codes-decoder": lambda pipe: pipe.tokenizer.model.decoder.conv_in.bias,
    "codes-pixels": lambda pipe: pipe.tokenizer.model.decoder.conv_out.bias,
    "codes-book": lambda pipe: pipe.tokenizer.model.quantize.embedding.weight,
    "latents-head": lambda pipe: pipe.model.get_parameter("head.write.bias"),
    "masked-head": lambda pipe: pipe.model.get_parameter("diffloss.net.input_proj.bias"),
}


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", PARTS)
def test_weights_that_are_not_finite_raise_a_model_error(
    saved: Saved, part: str, number: float
) -> None:
    kind = part.partition("-")[0]
    pipe = opened(saved(kind))
    PARTS[part](pipe).data.view(-1)[0] = number
    inputs: dict[str, Any] = {} if kind == "codes" else {"output_type": "latent"}
    if part == "codes-book":
        inputs = {"codes": torch.zeros(9, dtype=torch.int64)}
    message = "NaN|not finite" if kind == "codes" else "latents that are not finite"
    with pytest.raises(ModelError, match=message):
        pipe(**CALLS[kind], seed=5, **inputs)


def test_a_damaged_draft_model_is_named(saved: Saved) -> None:
    pipe = opened(saved("codes"), "model")
    pipe.draft.class_embedding.weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match="draft returned embeddings of conditions"):
        pipe(**CALLS["codes"], seed=5)


def test_autocast_changes_no_code(saved: Saved) -> None:
    pipe = opened(saved("codes"))
    plain = pipe(class_labels=[0, 1, 2] * 4, seed=5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = pipe(class_labels=[0, 1, 2] * 4, seed=5)
    assert torch.equal(cast.codes, plain.codes) and cast.label == "exact"


@EVERY
def test_a_pipeline_can_replace_the_folder_it_was_loaded_from(
    saved: Saved, kind: str, tmp_path: Path
) -> None:
    opened(saved(kind), None).save_pretrained(tmp_path)
    pipe = opened(tmp_path, "jacobi", batch_size=3)
    expected = values(pipe(**CALLS[kind], seed=5))
    pipe.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert again.batch_size == 3 and again.source.name == "jacobi"
    assert torch.equal(values(again(**CALLS[kind], seed=5)), expected)
    assert not any(each.data_ptr() % 64 for each in again.model.parameters())
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    again.save_pretrained(tmp_path)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]


def test_foreign_folders_are_not_overwritten(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"has target and no ragspec\.json"):
        opened(saved("codes"), None).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "notes.txt"]


@pytest.mark.parametrize("kind", ["latents", "janus"])
def test_a_saved_pipeline_is_replaced_whole(saved: Saved, kind: str, tmp_path: Path) -> None:
    settings = {"steps": np.int64(4), "floor": np.float32(0.5)} if kind == "latents" else {}
    old, new = tmp_path / "old", tmp_path / "new"
    opened(saved("codes"), "model").save_pretrained(old)
    (old / "notes.md").write_text("mine")
    (old / "relaxation.json").write_text("of codes")
    (old / "head").mkdir()
    for root in (old, new):
        opened(saved(kind), None, **settings).save_pretrained(root)
    names = {path.relative_to(new) for path in new.rglob("*")} | {Path("notes.md")}
    assert {path.relative_to(old) for path in old.rglob("*")} == names
    assert opened(old).family.record == opened(saved(kind), **settings).family.record
    pipe = opened(old)
    (old / "head").mkdir()  # trained since
    pipe.save_pretrained(old)
    assert (old / "head").is_dir()
    with pytest.raises(InputError, match=r"cannot be saved in .*notes\.md"):
        opened(saved(kind), None).save_pretrained(old / "notes.md")


def test_dropout_is_refused(saved: Saved) -> None:
    pipe = opened(saved("codes"), "model")
    config = LoraConfig(target_modules="all-linear", lora_dropout=0.3)
    adapt = partial(get_peft_model, pipe.model, config)
    for change in (pipe.model.train, pipe.draft.train, adapt):
        change()
        with pytest.raises(InputError, match=r"in training mode.*Call model\.eval\(\)"):
            pipe(**CALLS["codes"])
        pipe.model.eval(), pipe.draft.eval()


@EVERY
def test_adapters_of_peft_draw(saved: Saved, kind: str, tmp_path: Path) -> None:
    pipe, call = opened(saved(kind), "jacobi"), CALLS[kind]
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped: Any = get_peft_model(opened(saved(kind)).model, config).eval()
    wrapped.save_pretrained(tmp_path / "lora")
    adapted = ImagePipeline(wrapped, pipe.tokenizer, "jacobi", **pipe.family.record)
    merged = opened(saved(kind), "jacobi", lora=tmp_path / "lora")
    sample = [values(each(**call, seed=5)) for each in (pipe, adapted, merged)]
    assert torch.allclose(sample[1], sample[2], atol=1e-3)
    assert not torch.allclose(sample[0], sample[1], atol=1e-2)
    with pytest.raises(InputError, match="merge_and_unload"):
        adapted.save_pretrained(tmp_path / "saved")
    merged.save_pretrained(tmp_path / "saved")
    again = values(opened(tmp_path / "saved", "jacobi")(**call, seed=5))
    assert torch.allclose(again, sample[1], atol=1e-3)


@EVERY
def test_command_and_benchmark_reach_every_family(saved: Saved, kind: str, tmp_path: Path) -> None:
    subject = ["--class", "1"] if "class_labels" in CALLS[kind] else ["red cat"]
    subject = [] if kind == "imagegpt" else subject
    size: Any = {"height": 6, "width": 4} if kind == "emu3" else {}  # its usual one is too large
    place = ["--model", str(saved(kind)), "--out", str(tmp_path), "--seed", "3", "--n", "2"]
    sizes = [text for name, value in size.items() for text in ("--set", f"{name}={value}")]
    assert main(["draw", *subject, *place, *sizes]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 2
    rule = "aligned" if kind in ("latents", "masked") else "exact"
    files = ImagePlaceOptions(**size), None, str(saved(kind))
    options = ImageBenchOptions(*files, rule, images=1, budget="3")
    items, variants = build_images(options)
    plain, drafted = (variants[name](items[0], 0) for name in ("plain", rule))
    assert len(plain.tokens) == len(drafted.tokens) == plain.forwards
    if rule == "exact":
        assert plain.tokens == drafted.tokens


SETTINGS: dict[str, dict[str, Any]] = {
    "codes": {"drafter": "model", "budget": 6},
    "latents": {"drafter": "model", "budget": 3},
    "masked": {"iterations": 3, "steps": 4},
}
CONFIGURED = pytest.mark.parametrize("kind", SETTINGS)


def sampled_images(pipe: Any, **more: Any) -> Any:
    return pipe(class_labels=[0, 1, 2], seed=2, output_type="np", **more).images


@CONFIGURED
def test_all_modules_change_device_and_dtype(saved: Saved, kind: str) -> None:
    pipe = opened(saved(kind), **SETTINGS[kind]).to(torch.float64).to("cpu", torch.float64)
    assert pipe.dtype == pipe.model.dtype == torch.float64 and pipe.device.type == "cpu"
    if getattr(pipe, "draft", None) is not None:
        assert pipe.draft.dtype == torch.float64
    assert len(sampled_images(pipe)) == 3
    fewer = SETTINGS[kind] if kind == "masked" else {}
    again = type(pipe)(**pipe.components, **fewer)
    assert again.model is pipe.model and len(sampled_images(again)) == 3
    with torch.device("meta"):
        pipe.to("meta")
    assert {each.device.type for each in (pipe.model, *pipe.family.modules)} == {"meta"}


@pytest.mark.parametrize("text", [True, False])
def test_the_bar_can_be_named_and_turned_off(
    saved: Saved, text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = opened(saved("codes"))
    capsys.readouterr()
    pipe.set_progress_bar_config(disable=not text, desc="codes")
    pipe(class_labels=[0, 1, 2])
    assert ("codes: 100%" in capsys.readouterr().err) is text


@CONFIGURED
def test_callbacks_may_not_change_tensors(saved: Saved, kind: str) -> None:
    pipe = opened(saved(kind), **SETTINGS[kind])
    name, before = pipe.family.unit, sampled_images(pipe)
    same = sampled_images(pipe, callback_on_step_end=lambda pipe, step, count, message: message)
    assert (same == before).all()
    with pytest.raises(InputError, match=rf"other {name} than it received.*cannot be changed"):
        sampled_images(pipe, callback_on_step_end=lambda *inputs: {name: inputs[3][name] + 1})
