"""The folder of tiny image models that the tests of pictures share, file by file."""

from pathlib import Path

import pytest

from tests.support import tiny_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.save(tmp_path_factory.mktemp("images"))
