"""Sequences of tests share their slots although they are short."""

from collections.abc import Iterator

import pytest

from ragspec.verification import sequence_cache


@pytest.fixture(autouse=True, scope="session")
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sequence_cache, "LEAST_SHARED", 4)
        patched.setattr(sequence_cache, "PAGE", 2)
        yield
