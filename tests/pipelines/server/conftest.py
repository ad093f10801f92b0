"""The engine that the tests of the server share, file by file."""

from __future__ import annotations

import pytest

from ragspec.engine.engine import Engine
from tests.support.served import engine


@pytest.fixture(scope="module")
def instance() -> Engine:
    return engine()
