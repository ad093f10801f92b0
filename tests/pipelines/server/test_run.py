"""What `ragspec serve` does around the application."""

from __future__ import annotations

import gc
from typing import Any

from ragspec.pipelines.server.run import _settled


def test_what_was_loaded_is_no_matter_of_the_garbage_collector() -> None:
    loaded: Any = [[]]
    assert gc.get_freeze_count() == 0
    try:
        assert _settled(loaded) is loaded
        assert gc.get_freeze_count() > 0
        assert not any(each is loaded for each in gc.get_objects())
    finally:
        gc.unfreeze()
