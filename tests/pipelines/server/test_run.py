"""What `ragspec serve` does around the application."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from ragspec.pipelines.server import run
from ragspec.pipelines.server.settings import ServerSettings


class Stopped(Exception):
    """Ends a server before it listens."""


def test_what_was_loaded_is_no_matter_of_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaders: list[Callable[[], Any]] = []

    def build(load: Callable[[], Any], settings: ServerSettings) -> Any:
        loaders.append(load)
        raise Stopped

    loaded: list[list[Any]] = []

    def load(*request: Any) -> Any:
        loaded.append([])
        return loaded[0]

    monkeypatch.setattr(run, "build_app", build)
    monkeypatch.setattr(run, "load", load)
    served = run.Served("tiny", lambda: None, None, 0, lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(Stopped):
        run.serve(served, ServerSettings(), print)
    assert gc.get_freeze_count() == 0
    try:
        assert loaders[0]() is loaded[0]
        assert gc.get_freeze_count() > 0
        assert not any(each is loaded[0] for each in gc.get_objects())
    finally:
        gc.unfreeze()
