"""Settings of every test: one torch thread, no network, and the data directory where there is one.

The data directory is found by `--shared DIR`, else by RAGSPEC_SHARED, else beside the repository.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Measured costs and probe verdicts of tests are not the user's.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ragspec-cache-")

import hypothesis
import pytest
import torch

from tests.support.toy_embedder import make_embedder

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile(
    "ragspec", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ragspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shared", metavar="DIR", help="folder that holds the evaluation data")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    not_slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(not_slow)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """Return the folder of a tiny static embedder."""
    return make_embedder(tmp_path / "embedder")


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Path:
    """Return the folder of evaluation data (with `docqa`, `retrieval`, ...), or skip the test."""
    named = request.config.getoption("--shared") or os.environ.get("RAGSPEC_SHARED")
    folder = Path(named) if named else ROOT.parent / "shared"
    for candidate in (folder / "data", folder):
        if (candidate / "docqa").is_dir():
            return candidate
    pytest.skip(f"no evaluation data in {folder} (give it with --shared or RAGSPEC_SHARED)")


@pytest.fixture
def training_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts of training/ be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "training"))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running in a test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
