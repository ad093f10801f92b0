"""Pictures on an accelerator: every pipeline, rule and drafter, as on the CPU.

The accelerator is a pretended one, which raises the errors of CUDA, and CUDA if there is one.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.visual import ImagePipeline
from ragspec.visual.checks import relaxed
from ragspec.visual.latents.rules import RULES
from tests.support.pretend import DEVICES, present
from tests.visual.families.test_multimodal import FAMILIES, opened, sized

Draw = Callable[[Any], torch.Tensor]
Saved = Callable[[str], Path]
Same = Callable[[Callable[[], Any], Draw], None]


@pytest.fixture(autouse=True)
def without_faults() -> Iterator[None]:
    """Raise the warning of a drafter that is switched off, as the image would be the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture(params=DEVICES)
def same_there(request: pytest.FixtureRequest) -> Same:
    """Return an assertion that a pipeline draws the same after it was moved to the accelerator.

    Latents may round differently, as wrapped operators run other kernels, and CUDA sums products in
    another order.
    """

    def check(make: Callable[[], Any], draw: Draw) -> None:
        pipe = make().to("cpu")
        here = draw(pipe)
        with present(request.param):
            there = draw(pipe.to(request.param)).cpu()
            assert pipe.device.type == request.param
        close = (1e-4 if request.param == "cuda" else 1e-5) * here.is_floating_point()
        torch.testing.assert_close(there, here.cpu(), rtol=0, atol=close)

    return check


def codes(pipe: Any) -> Any:
    out = pipe(class_labels=["red", 2], seed=1, guidance_scale=3.0, top_k=12)
    assert len(out.images) == 2
    return out.codes


@pytest.mark.parametrize("drafter", [None, "model", "jacobi"])
def test_codes_under_the_exact_rule(folder: Path, drafter: str | None, same_there: Same) -> None:
    same_there(lambda: ImagePipeline.from_pretrained(folder, drafter, "exact", budget=6), codes)


@pytest.mark.parametrize("rule", relaxed())
def test_codes_under_a_relaxed_rule(folder: Path, rule: str, same_there: Same) -> None:
    settings: dict[str, Any] = {"draft_mode": "sampled"} if rule.endswith("-rejection") else {}
    make = partial(ImagePipeline.from_pretrained, folder, "model", rule, budget=6, **settings)
    same_there(make, codes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_codes_after_prompts(kind: str, same_there: Same) -> None:
    def draw(pipe: Any) -> Any:
        return pipe(["a red tree", "cat"], seed=1, **sized(kind)).codes

    same_there(lambda: copy.deepcopy(opened(kind)), draw)  # its model is shared by all tests


def latent(pipe: Any) -> Any:
    return pipe(class_labels=[0, 1], seed=0).latents


@pytest.mark.parametrize(
    ("rule", "drafter"), [*((rule, "jacobi") for rule in RULES), (next(iter(RULES)), "model")]
)
def test_latents_one_by_one(saved: Saved, rule: str, drafter: str, same_there: Same) -> None:
    folder = saved("latents")
    same_there(lambda: ImagePipeline.from_pretrained(folder, drafter, rule=rule), latent)


def test_latents_of_a_masked_model(saved: Saved, same_there: Same) -> None:
    inputs: dict[str, Any] = {"device": "cpu", "iterations": 4, "steps": 4}
    same_there(lambda: ImagePipeline.from_pretrained(saved("masked"), **inputs), latent)
