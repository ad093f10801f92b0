"""Sequences of tests share their slots although they are short; the model of most tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ragspec.verification import sequence_cache
from tests.support import tiny


@pytest.fixture(autouse=True, scope="session")
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sequence_cache, "LEAST_SHARED", 4)
        patched.setattr(sequence_cache, "PAGE", 2)
        yield


@pytest.fixture(scope="session")
def model() -> Any:
    """Return the tiny llama in float64, which all share."""
    return tiny.model("llama", dtype=torch.float64)
