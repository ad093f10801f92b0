"""What a user of the command line has on disk."""

from collections.abc import Callable
from typing import Any

import pytest

from ragspec.engine.loop import Loop
from tests.support import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model and its tokenizer."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets a step of decoding be interrupted, by its number from 0."""
    take, passes = Loop._take, iter(range(100))

    def interrupt_at(step: int) -> None:
        def interrupted(*arguments: Any) -> Any:
            if next(passes) == step:
                raise KeyboardInterrupt
            return take(*arguments)

        monkeypatch.setattr(Loop, "_take", interrupted)

    return interrupt_at
