"""The image pipeline: seeds, equality with and without a drafter, outputs, callbacks, refusals."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ragspec import errors
from ragspec.rules.walk import Walk
from ragspec.visual import ImagePipeline
from tests.support import image_models, tiny_images
from tests.support.tiny_images import dice

ALL = tiny_images.SIDE**2


def opened(folder: Path, drafter: Any = "model", rule: Any = "exact", **more: Any) -> Any:
    return ImagePipeline.from_pretrained(folder, drafter, rule, **{"budget": 6, **more})


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("drafter", ["model", "jacobi"])
def test_an_exact_rule_draws_as_plain_decoding(folder: Path, drafter: str, scale: float) -> None:
    arguments = {"guidance_scale": scale, "num_images_per_prompt": 2, "top_k": 12}
    fast = opened(folder, drafter)(class_labels=["red", 2], generator=dice(), **arguments)
    plain = opened(folder, None)(class_labels=["red", 2], generator=dice(), **arguments)
    assert fast.label == plain.label == "exact"
    assert torch.equal(fast.codes, plain.codes)
    for one, two in zip(fast.images, plain.images, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(two))
    assert fast.stats.forwards < plain.stats.forwards == 4 * ALL
    assert (plain.acceptance_map == 1).all() and fast.acceptance_map.max() > 1
    assert fast.stats.tv_excess == 0.0


def test_output_types_are_those_of_diffusers(folder: Path) -> None:
    pipe = opened(folder)
    side = tiny_images.SIDE * 2
    draw = partial(pipe, class_labels=0, seed=1)
    by_type = {kind: draw(output_type=kind) for kind in ("pil", "np", "pt", "latent")}
    assert by_type["pil"].images[0].size == (side, side)
    numbers = by_type["np"].images
    assert numbers.shape == (1, side, side, 3) and 0.0 <= numbers.min() <= numbers.max() <= 1.0
    assert np.allclose(by_type["pt"].images[0].permute(1, 2, 0).numpy(), numbers[0])
    assert torch.equal(by_type["latent"].images, by_type["np"].codes)
    codes = torch.arange(4 * ALL).reshape(4, tiny_images.SIDE, -1) % tiny_images.CODES
    alone = [pipe.decode(each[None], "pt") for each in codes]  # to the last bit
    assert torch.equal(torch.cat(alone), pipe.decode(codes, "pt"))
    with pytest.raises(errors.InputError, match=r"codes of torch\.int64 with shape \[1\]"):
        pipe.decode([1, 2])
    for make in (draw, partial(pipe.decode, codes)):
        with pytest.raises(errors.InputError, match="output_type 'jpeg'"):
            make(output_type="jpeg")


@pytest.mark.parametrize("rule", ["lantern", "lantern++", "gsd"])
def test_relaxed_rules_measure_what_they_cost(folder: Path, rule: str) -> None:
    inputs = {"lantern": {"delta": 0.4}, "lantern++": {"lam": 40.0, "neighbours": 23}}.get(rule, {})
    out = opened(folder, rule=rule, **inputs)(class_labels=[0, 1, 2], generator=dice())
    assert out.label == "approximate"
    assert out.stats.excess.shape == (3, tiny_images.SIDE, tiny_images.SIDE)
    plain = opened(folder, None)(class_labels=[0, 1, 2], generator=dice()).codes.flatten(1)
    replaced, other = out.stats.excess.reshape(3, -1) > 0, (out.codes.flatten(1) != plain).numpy()
    assert (replaced.cumsum(1) > 0).tolist() == (other.cumsum(1) > 0).tolist(), "equal before"
    assert out.stats.tv_excess == pytest.approx(replaced.mean()) and replaced.any()


def test_prompts_condition_the_image(tmp_path: Path) -> None:
    pipe = opened(tiny_images.save(tmp_path, "features"))
    one = pipe("cat face", generator=dice())
    assert torch.equal(one.codes, pipe(prompt=["cat face"], generator=dice()).codes)
    assert not torch.equal(one.codes, pipe("red heart", generator=dice()).codes)
    broken = pipe("cat \ud800", negative_prompt="sun \ud800", seed=1).codes
    assert torch.equal(broken, pipe("cat \ufffd", negative_prompt="sun \ufffd", seed=1).codes)
    with pytest.raises(errors.InputError, match="expected"):
        pipe(["cat", ""])
    with pytest.raises(errors.InputError, match="expected prompt"):
        pipe(class_labels=1)
    pipe.family.text_encoder = None
    with pytest.raises(errors.InputError, match="text_encoder="):
        pipe("cat face")


def test_the_callback_is_called_after_each_step_and_may_end_the_call(folder: Path) -> None:
    known: list[tuple[int, int]] = []

    def look(pipe: Any, step: int, codes: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        known.append((step, codes))
        batch = kwargs["codes"][:2] if step < ALL else kwargs["codes"][2:]
        assert (batch >= 0).sum(1).min() == codes
        return kwargs

    pipe = opened(folder, None, batch_size=2)
    whole = pipe(class_labels=[0, 1, 2], generator=dice(), callback_on_step_end=look)
    assert known == [(n, n % ALL + 1) for n in range(2 * ALL)]

    stop = {"callback_on_step_end": lambda *inputs: inputs[2] >= 3}
    part = pipe(class_labels=[0, 1], generator=dice(), **stop)
    written = part.stats.reports[0].tokens
    assert written == 3
    assert torch.equal(part.codes.flatten(1)[:, :3], whole.codes.flatten(1)[:2, :3])
    assert (part.acceptance_map.reshape(2, -1)[:, written:] == 0).all()
    assert (whole.label, part.label) == ("exact", "unfinished")


@pytest.mark.parametrize("true", [True, np.True_, torch.tensor(True)])
@pytest.mark.parametrize("scale", [2.0, [1.0, 2.0, 3.0, 1.0, 2.0]])
def test_the_callback_is_called_once_a_forward(folder: Path, scale: Any, true: Any) -> None:
    pipe, look = opened(folder, batch_size=2), Mock(return_value=None)
    forwards = pipe.model.forward = Mock(wraps=pipe.model.forward)
    call = {"class_labels": [0, 1, 2, 0, 1], "seed": 1, "guidance_scale": scale}
    whole = pipe(**call, callback_on_step_end=look)
    assert [each.args[1] for each in look.call_args_list] == [*range(forwards.call_count)]
    for tensor in (each.args[3]["codes"] for each in look.call_args_list):
        assert ((tensor == whole.codes.flatten(1)) | (tensor == -1)).all()
    forwards.reset_mock()
    ended = pipe(**call, callback_on_step_end=Mock(return_value=true))
    assert forwards.call_count == 1 and ended.label == "unfinished"
    assert sorted((ended.acceptance_map > 0).sum((1, 2)).tolist()) == [0, 0, 0, 1, 1]


def test_loaders_know_keywords_of_diffusers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"local_files_only": True, "torch_dtype": torch.float64, "device": "cpu"}
    assert opened(folder, **inputs).model.dtype == torch.float64
    for wrong in ({"device_map": "balanced"}, {"variant": "fp16"}, {"revision": "main"}):
        with pytest.raises(errors.InputError, match=next(iter(wrong))):
            opened(folder, **wrong)
    with pytest.raises(errors.InputError, match="Did you mean 'num_images_per_prompt'"):
        opened(folder)(class_labels=0, num_images_per_promt=2)
    from_hub = Mock(return_value=("hub", None, ""))
    monkeypatch.setattr("ragspec.models.resolve._from_hub", from_hub)
    for offline in (True, False):
        with pytest.raises(errors.MissingModelError):
            ImagePipeline.from_pretrained("nobody/nothing", local_files_only=offline)
    assert [call.args[1] for call in from_hub.call_args_list] == [True, False]


def test_parts_can_be_passed_one_by_one(folder: Path) -> None:
    model, tokenizer = tiny_images.model(), tiny_images.tokenizer()
    pipe = ImagePipeline(model, tokenizer, tiny_images.model(layers=1), Walk(), budget=4)
    assert pipe(class_labels=0, generator=dice()).label == "exact"
    plain = ImagePipeline(**pipe.components)
    assert plain.model is model and plain.tokenizer is tokenizer
    beside = opened(folder / "target", None, tokenizer=folder / "tokenizer", device="cpu")
    assert beside.tokenizer.vocab_size == tiny_images.CODES


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    model, tokenizer = tiny_images.model(), tiny_images.tokenizer()
    instance = image_models.target(image_models.model())
    with pytest.raises(errors.UnsupportedModelError, match="Give the model itself"):
        ImagePipeline(instance, tokenizer, None)
    with pytest.raises(errors.TokenizerMismatchError, match="of vocab_size 30 for"):
        ImagePipeline(model, tiny_images.tokenizer(30))
    with pytest.raises(errors.UnsupportedModelError, match="got a NoneType as tokenizer"):
        ImagePipeline(model)
    settings: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (errors.UnknownNameError, "lantern", {"rule": "lantrn"}),
        (errors.InputError, "has no lam", {"rule": "lantern", "lam": 2.0}),
        (errors.InputError, "settings by a name", {"rule": Walk(), "delta": 0.1}),
        *((errors.InputError, "or a Rule", {"rule": rule}) for rule in (42, None, Walk)),
        (errors.RuleError, "cannot judge", {"rule": "rejection", "draft_mode": "coupled"}),
        (errors.RuleError, "cannot judge", {"draft_mode": "foo"}),
        *((errors.InputError, "of accepted", {"min_expected_gain": n}) for n in (-1, "a", np.nan)),
        (errors.InputError, "family=5; expected a name", {"family": 5}),
        (errors.UnsupportedModelError, "got a int as tokenizer", {"tokenizer": 5}),
    ]
    for error, message, inputs in settings:
        with pytest.raises(error, match=message):
            opened(folder, **inputs)
    pipe = opened(folder)
    wrong: list[dict[str, Any]] = [
        *({"class_labels": labels} for labels in list[Any]([3, [], torch.tensor([]), {1: 2}, {1}])),
        {"prompt": "cat"},
        {},
        {"class_labels": 1, "prompt": "cat"},
        {"class_labels": 1, "num_images_per_prompt": 0},
        *({"class_labels": 1, name: 5} for name in ("callback_on_step_end", "on_image")),
    ]
    for arguments in wrong:
        with pytest.raises(errors.InputError, match="expected"):
            pipe(**arguments)


@pytest.mark.parametrize("drafter", [None, "jacobi", "model"])
def test_fixed_codes_stay_and_the_others_are_generated(folder: Path, drafter: Any) -> None:
    pipe = opened(folder, drafter)
    whole = pipe(class_labels=[1], generator=dice(3), guidance_scale=2.0).codes
    inputs = whole[0].clone()
    inputs[1, 1] = inputs[2, :2] = -1
    assert torch.equal(pipe(class_labels=[1], generator=dice(3), codes=inputs).codes, whole)
    other = torch.full((ALL,), -1)
    other[[0, 4]] = torch.tensor([5, 7])
    sample = pipe(class_labels=[1, 2], generator=dice(3), codes=other)
    assert sample.codes.flatten(1)[:, [0, 4]].tolist() == [[5, 7]] * 2
    assert sample.label == "exact"
    plain = opened(folder, None)(class_labels=[1, 2], generator=dice(3), codes=other)
    assert torch.equal(sample.codes, plain.codes)
    begun = pipe(class_labels=[1], generator=dice(3), codes=whole[0, 0])  # the first row alone
    assert torch.equal(begun.codes, whole)
    for wrong in (whole.float(), whole[0] + 1000, torch.arange(ALL + 1), [1, 2], whole[0] - 99):
        with pytest.raises(errors.InputError, match="to be drawn"):
            pipe(class_labels=0, codes=wrong)


def test_each_filter_can_leave_the_likeliest_code_alone(folder: Path) -> None:
    greedy = opened(folder, None)(class_labels=[1], temperature=0.0).codes
    for name, value in (("top_k", 1), ("top_p", 1e-9), ("min_p", 1.0)):
        for drafter in (None, "jacobi"):
            sample = opened(folder, drafter)(class_labels=[1], generator=dice(), **{name: value})
            assert torch.equal(sample.codes, greedy)


RELAXED = {"neighbours": 20, "delta": 0.6}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "least gain": ("model", {"rule": "lantern", "least_gain": 0.4, **RELAXED}),
    "variation": ("model", {"rule": "lantern", "tv_budget": 1.0, **RELAXED}),
    "mixed": (["jacobi", "model"], {"rule": "lantern", **RELAXED}),
    "mixed, least gain": (["jacobi", "model"], {"rule": "lantern", "least_gain": 0.4, **RELAXED}),
    "gsd": ("jacobi", {"rule": "gsd"}),
    "rejection": ("model", {"rule": "rejection"}),
}


def sampled(pipe: Any, seeds: list[int]) -> Any:
    return pipe(class_labels=[1] * len(seeds), seed=seeds).codes.flatten(1).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_images_depend_on_their_seed_alone_under_every_rule(folder: Path, name: str) -> None:
    """Under every rule, whatever is drawn beside it and was drawn before."""
    drafter, settings = SETTINGS[name]
    settings = {"budget": 3, "dtype": torch.float64, **settings}
    pipe = opened(folder, drafter, **settings)
    seeds = list(range(6))
    first = sampled(pipe, seeds)
    assert sampled(pipe, seeds) == first  # after all of it was used
    assert sampled(pipe, seeds[::-1]) == first[::-1]
    for seed in seeds[:2]:  # alone, in a pipeline that has drawn nothing yet
        assert sampled(opened(folder, drafter, **settings), [seed]) == [first[seed]]
    plain = opened(folder, None, dtype=torch.float64)
    assert (sampled(plain, seeds) != first) or name == "gsd"  # the rule does relax


def test_a_budget_by_time_makes_relaxed_images_not_repeatable(folder: Path) -> None:
    every = ((3, "lantern", True), ("auto", "lantern", False), ("auto", "exact", True))
    for budget, rule, repeats in every:
        settings = RELAXED if rule == "lantern" else {}
        pipe = opened(folder, "model", rule, budget=budget, dtype=torch.float64, **settings)
        stats = pipe(class_labels=[1], seed=1).stats
        assert stats.repeatable is repeats
        assert ("not repeatable" in stats.summary()) is not repeats
    plain = opened(folder, None, "lantern", budget="auto", **RELAXED)(class_labels=[1])
    assert (plain.label, plain.stats.repeatable) == ("exact", True)
