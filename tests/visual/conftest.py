"""The folders of tiny image models that the tests of pictures share."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from tests.support import tiny_images, tiny_latents, tiny_masked, tiny_prompted

SAVE: dict[str, Callable[[Path], Path]] = {
    "codes": tiny_images.save,
    "texts": partial(tiny_images.save, condition="features"),
    "emu3": partial(tiny_prompted.save, kind="emu3"),
    "janus": partial(tiny_prompted.save, kind="janus"),
    "imagegpt": tiny_prompted.save_imagegpt,
    "latents": tiny_latents.save,
    "masked": tiny_masked.save,
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives the folder of a kind of model, which is written once."""
    root = tmp_path_factory.mktemp("saved")
    return cache(lambda kind: SAVE[kind](root / kind))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    """Return the folder of the module's KIND of model."""
    return saved(getattr(request.module, "KIND", "codes"))
