"""The model of most tests."""

from typing import Any

import pytest
import torch

from tests.support import tiny


@pytest.fixture(scope="session")
def model() -> Any:
    """Return the tiny llama in float64, which all share."""
    return tiny.model("llama", dtype=torch.float64)
