"""The engine that the tests of the server share, file by file."""

from collections.abc import Iterator

import httpx
import pytest

from ragspec.engine.engine import Engine
from ragspec.pipelines.server.serving import Serving
from tests.support.served import engine, served


@pytest.fixture(scope="module")
def instance() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def pair(instance: Engine) -> Iterator[tuple[httpx.Client, Serving]]:
    with served(instance) as result:
        yield result


@pytest.fixture(scope="module")
def client(pair: tuple[httpx.Client, Serving]) -> httpx.Client:
    return pair[0]
