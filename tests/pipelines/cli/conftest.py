"""Fixtures of the command line: a model on disk, and interrupts."""

from collections.abc import Callable

import pytest

from ragspec.engine.loop import Loop
from tests.support import tiny
from tests.support.calls import failing


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model and its tokenizer."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that interrupts a step of decoding, by its number from 0."""

    def interrupt_at(step: int) -> None:
        monkeypatch.setattr(Loop, "_take", failing(KeyboardInterrupt, (step + 1,), Loop._take))

    return interrupt_at
