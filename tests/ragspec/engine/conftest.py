"""The model and the texts of requests that are served together."""

import pytest

from ragspec import Engine
from ragspec.verification.causal import CausalTarget
from tests.support.scheduling import REQUESTS, alone


@pytest.fixture(scope="module")
def target(plain: Engine) -> CausalTarget:
    return plain.target


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return alone(plain, REQUESTS)
