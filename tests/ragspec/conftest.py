"""The model of most tests."""

from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from tests.support import tiny


@pytest.fixture(scope="session")
def model() -> Any:
    """Return the tiny llama in float64, which all share."""
    return tiny.model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(model: Any) -> Engine:
    """Return an engine over it that drafts nothing."""
    return Engine(model, tiny.tokenizer(), drafter=None)
