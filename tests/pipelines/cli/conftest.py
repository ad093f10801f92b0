"""What a user of the command line has on disk."""

from __future__ import annotations

from typing import Any

import pytest

from ragspec.engine.loop import Loop
from tests.support import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model and its tokenizer."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the third step of decoding."""
    take, passes = Loop._take, iter(range(100))

    def interrupted(*arguments: Any) -> Any:
        if next(passes) == 3:
            raise KeyboardInterrupt
        return take(*arguments)

    monkeypatch.setattr(Loop, "_take", interrupted)
