"""`ImagePipeline` over published files and folders, with tiny random models."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec import errors
from ragspec.sampling.noise import NoiseStream
from ragspec.visual import ImagePipeline, KLAutoencoder
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import order_of
from tests.support import plain_mar, tiny_images, tiny_masked

KIND, SIDE, CLASSES = "masked", plain_mar.SIDE, plain_mar.CLASSES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a published checkpoint and the autoencoder that belongs to it."""
    root = tmp_path_factory.mktemp("published")
    return tiny_masked.file(root / "checkpoint-last.pth"), tiny_masked.kl_file(root / "kl.ckpt")


def pipeline(name: Path, **inputs: Any) -> ImagePipeline:
    inputs = {"iterations": 4, "steps": 6} | inputs
    return ImagePipeline.from_pretrained(name, device="cpu", **inputs)


def published(files: tuple[Path, Path], **inputs: Any) -> ImagePipeline:
    file, kl = files
    return pipeline(file, family="mar", tokenizer=kl, num_attention_heads=3, **inputs)


def sampled(pipe: ImagePipeline, count: int = 4, **inputs: Any) -> Any:
    return pipe(class_labels=[n % CLASSES for n in range(count)], seed=0, **inputs)


def test_published_files_make_a_pipeline(files: tuple[Path, Path]) -> None:
    pipe = published(files)
    out = sampled(pipe, 2, output_type="pt")
    assert out.images.shape == (2, 3, 12, 12) and out.label == "exact"
    assert out.latents.shape == (2, SIDE, SIDE, plain_mar.WIDTH)
    kl = KLAutoencoder.from_pretrained(files[1])
    assert torch.allclose(out.images, kl.decode_latents(out.latents) / 2 + 0.5, atol=1e-5)
    assert out.stats.forwards == 8 and out.stats.codes_per_forward == 9 / 4
    assert len(set(out.stats.seeds)) == 2 and "2 images, 8 forward passes" in out.stats.summary()
    # The autoencoder reads latents over the published factor.
    assert pipe.model.config.deviation == pytest.approx(1 / 0.2325)


def test_outputs_and_settings(folder: Path) -> None:
    pipe = pipeline(folder)
    latents = sampled(pipe, 2, output_type="latent")
    assert torch.equal(latents.images, latents.latents)
    out = sampled(pipe, 2, output_type="np")
    assert out.images.shape == (2, 6, 6, 3) and torch.equal(out.latents, latents.latents)
    for other in ({"guidance_scale": 1.0}, {"temperature": 0.5}):
        assert not torch.allclose(sampled(pipe, 2, **other).latents, latents.latents, atol=1e-3)
    for instance in (pipeline(folder, iterations=9), pipeline(folder, steps=20)):
        assert not torch.allclose(sampled(instance, 2).latents, latents.latents, atol=1e-3)
    out = pipe(class_labels=[0, 1], num_images_per_prompt=2)
    assert len(out.images) == 4 and len(set(out.stats.seeds)) == 4


def test_the_acceptance_map_has_the_latents_of_each_iteration(folder: Path) -> None:
    result = sampled(pipeline(folder), 3)
    assert result.acceptance_map.shape == (3, SIDE, SIDE)
    for one in result.acceptance_map:
        sizes, counts = np.unique(one, return_counts=True)
        assert all(counts % sizes == 0) and sum(counts // sizes) == 4


def test_the_callback_receives_each_iteration_and_may_end_the_call(folder: Path) -> None:
    message: list[tuple[int, int, int]] = []

    def note(pipe: Any, iteration: int, latents: int, tensors: dict[str, torch.Tensor]) -> bool:
        message.append((iteration, latents, int((tensors["latents"] != 0).all(-1)[0].sum())))
        return iteration == last

    pipe, last, done = pipeline(folder, batch_size=1), 2, list[int]()
    ended = sampled(pipe, 2, callback_on_step_end=note)
    assert bool(ended.latents[0].any()) and not bool(ended.latents[1].any())
    assert [each[0] for each in message] == [0, 1, 2]
    assert all(each[1] == each[2] for each in message) and message[-1][1] < 9
    known = ended.acceptance_map > 0
    assert known.sum((1, 2)).tolist() == [message[-1][1], 0] and ended.stats.forwards == 3
    assert (ended.stats.outcomes == np.where(known, 0, -1)).all()
    last = 3  # of the first image
    sampled(pipe, 2, callback_on_step_end=note, on_image=lambda number, _: done.append(number))
    assert done == [0]
    assert sampled(pipe, 2).latents.shape[0] == 2  # whole again


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        *(
            ({"iterations": n}, f"iterations={n}; expected .* from 1 to 9")
            for n in (0, 10, -1, 1.5)
        ),
        *(({"steps": n}, "expected .* from 2 to 1000") for n in (0, 1, 1001, -3, 2.5, True, "100")),
        ({"batch_size": 0}, "batch_size is 0"),
        *(({"floor": floor}, "expected a deviation from 0") for floor in (-0.1, 1.0, "much")),
        ({"drafter": "jacobi", "floor": 0.0}, "densities with floor 0; expected noise"),
        ({"drafter": "jacobi", "floor": 0.1, "iterations": 4}, "iterations=4 with a drafter"),
        ({"drafter": "jacobi", "floor": 0.1, "prefill": 1.0}, "prefill=1.0"),
        ({"drafter": ["jacobi", "model"]}, "2 drafters of latents"),
    ],
)
def test_bad_settings_are_refused(folder: Path, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        pipeline(folder, **({"iterations": None} | inputs))


DRAFTED: dict[str, Any] = {"iterations": None, "floor": 0.1, "drafter": "jacobi"}


def smaller(folder: Path) -> MaskedModel:
    """Return a draft model: the target with other weights."""
    model: MaskedModel = pipeline(folder).model
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return model


def test_drafts_are_judged_by_rules_of_latents(folder: Path) -> None:
    plain = sampled(pipeline(folder, iterations=9, floor=0.1))
    for drafter in ("jacobi", smaller(folder)):
        drafted = partial(pipeline, folder, **DRAFTED | {"drafter": drafter})
        near = sampled(drafted(rule="near", r=0.0))
        assert torch.allclose(near.latents, plain.latents, atol=1e-3)
        assert near.label == "exact up to rounding"
        exact, again = sampled(drafted()), sampled(drafted(batch_size=3))
        assert torch.allclose(exact.latents, again.latents, atol=1e-3)
        assert exact.label == "exact-for(distribution)" and exact.stats.acceptance > 0.0
        assert exact.stats.forwards < plain.stats.forwards == 36
        assert exact.stats.prefixes > exact.stats.forwards
        single = sampled(drafted(min_expected_gain=1.0))
        assert single.stats.prefixes <= 2 * single.stats.forwards < exact.stats.prefixes * 2
    close = sampled(pipeline(folder, **DRAFTED, rule="near", r=0.5))
    assert close.label == "approximate" and 0.0 < close.stats.distance_most <= 0.5
    summary = close.stats.summary()
    assert "masked prefixes a pass" in summary and "% of drafts" in summary
    assert not torch.allclose(sampled(pipeline(folder, iterations=9)).latents, plain.latents)


def test_outcomes_are_reported_by_place(folder: Path) -> None:
    out = sampled(pipeline(folder, **DRAFTED, rule="near", r=9.0, prefill=0.3, budget=3), 2)
    for row, seed in enumerate(out.stats.seeds):
        order = order_of(NoiseStream(seed), 9)
        selected = out.stats.outcomes[row].reshape(-1)[order]
        # Three latents come without drafts, then the acceptance rate determines the draft.
        assert selected[:3].tolist() == [0, 0, 0] and 1 in selected[3:]
        assert out.acceptance_map[row].reshape(-1)[order][:3].tolist() == [1, 1, 1]


def test_half_precision_and_callbacks_go_with_drafts(folder: Path) -> None:
    half = sampled(pipeline(folder, **DRAFTED, torch_dtype=torch.float16), output_type="pt")
    assert bool(half.images.isfinite().all())
    message: list[tuple[int, int, torch.Tensor]] = []

    def note(pipe: Any, iteration: int, latents: int, tensors: dict[str, torch.Tensor]) -> bool:
        counts = (tensors["latents"] != 0).all(-1).sum(1)
        assert int(counts[counts > 0].min()) == latents
        message.append((iteration, latents, tensors["latents"]))
        return len(message) == 3

    pipe = pipeline(folder, **DRAFTED, batch_size=2)
    ended = sampled(pipe, 3, callback_on_step_end=note)
    assert [each[0] for each in message] == [0, 1, 2]
    assert 0 < message[0][1] < message[1][1] < 9
    assert ended.label == "unfinished" and not bool(ended.latents[2].any())
    whole = sampled(pipe, 3, callback_on_step_end=note)
    last = pipe.family.model.restored(message[-1][2]).unflatten(1, (3, 3))
    assert whole.label == "exact-for(distribution)" and torch.equal(last, whole.latents)


def test_a_draft_model_is_saved_and_detected(folder: Path, tmp_path: Path) -> None:
    pipe = pipeline(folder, **DRAFTED | {"drafter": smaller(folder)})
    pipe.save_pretrained(tmp_path / "both")
    again = pipeline(tmp_path / "both", **DRAFTED | {"drafter": "model"})
    assert torch.allclose(sampled(pipe).latents, sampled(again).latents, atol=1e-3)
    other = DRAFTED | {"drafter": MaskedModel(tiny_masked.config(4, mean=1.0))}
    message = r"draft model with mean 1\.0; expected 0\.0"
    with pytest.raises(errors.TokenizerMismatchError, match=message):
        pipeline(folder, **other)
    with pytest.raises(errors.InputError, match="with temperature 0; expected noise"):
        sampled(pipe, temperature=0.0)


@pytest.mark.parametrize("drafter", [None, "jacobi"])
def test_bad_requests_are_refused(folder: Path, drafter: str | None) -> None:
    pipe = pipeline(folder, **DRAFTED | {"drafter": drafter})
    with pytest.raises(errors.InputError, match="got top_k=5"):
        pipe(class_labels=[0], top_k=5)
    for name, value in product(("guidance_scale", "temperature"), (-1.0, float("nan"), 1e39, "2")):
        with pytest.raises(errors.InputError, match=f"{name}=.*expected a finite number of 0"):
            pipe(class_labels=[0], **{name: value})


def test_parts_that_do_not_belong_together_are_refused(
    folder: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    model, kl = pipeline(folder).model, KLAutoencoder.from_pretrained(files[1])
    with pytest.raises(errors.InputError, match=r"without a tokenizer; .*=PATH, the kl16\.ckpt"):
        pipeline(files[0], family="mar", num_attention_heads=3)
    with pytest.raises(errors.UnsupportedModelError, match="expected 'ragspec-masked-latents'"):
        ImagePipeline(tiny_images.model(), tiny_images.tokenizer(), family="mar")
    with pytest.raises(errors.UnsupportedModelError, match="got a AutoencoderKL as tokenizer"):
        ImagePipeline(model, kl.model)
    wide = MaskedModel(tiny_masked.config(5))
    with pytest.raises(errors.TokenizerMismatchError, match="width 4 for a model of latent_dim 5"):
        ImagePipeline(wide, kl)
    with pytest.raises(errors.MissingModelError, match="published file such as kl16"):
        pipeline(folder, tokenizer=tmp_path / "no.ckpt")
    with pytest.raises(errors.UnsupportedModelError, match="Use family='mar'"):
        ImagePipeline.from_pretrained(folder, family="latents")
