"""Model names: which place answers, in which order, and what the error says when none does."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from ragspec.errors import MissingModelError
from ragspec.models import resolve as models
from ragspec.models.resolve import BUNDLED, ModelOrigin, fingerprint, resolve_model


def fake_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return what contacts the hub, which has no model."""
    from_hub = Mock(return_value=(ModelOrigin.HUB, None, "no answer"))
    monkeypatch.setattr(models, "_from_hub", from_hub)
    return from_hub


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return cache


def cached(cache: Path, name: str) -> Path:
    """Lay out a snapshot as the hub's client does."""
    repository = cache / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    return fake_model(repository / "snapshots" / "0123abc")


def test_a_path_resolves_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Mock
) -> None:
    folder = fake_model(tmp_path / "my" / "model")
    monkeypatch.chdir(tmp_path)
    for name in (folder, str(folder), "my/model"):
        result = resolve_model(name)
        assert (result.folder, result.origin) == (folder.resolve(), ModelOrigin.PATH)
    assert not hub.called


@pytest.mark.parametrize("exists", [True, False])
def test_a_path_without_a_model_skips_the_hub(tmp_path: Path, exists: bool, hub: Mock) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(MissingModelError, match="nothing") as caught:
        resolve_model(folder)
    assert ("holds no config.json" in str(caught.value)) == exists
    assert caught.value.exit_code == 5 and not hub.called


def test_a_bundled_name_precedes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = fake_model(tmp_path / "bundle" / "target")
    monkeypatch.setattr(models, "BUNDLED", {"starter": bundled})
    current = fake_model(tmp_path / "starter")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("starter").folder == bundled
    assert resolve_model("./starter").folder == current.resolve()


def test_the_bundled_models_are_there(hub: Mock) -> None:
    for name in BUNDLED:
        assert resolve_model(name).origin is ModelOrigin.BUNDLED
    assert not hub.called


def test_the_cache_answers_before_the_hub(empty_cache: Path, hub: Mock) -> None:
    snapshot = cached(empty_cache, "someone/some-model")
    result = resolve_model("someone/some-model")
    assert (result.folder, result.origin) == (snapshot, ModelOrigin.CACHE) and not hub.called


def test_a_snapshot_that_lacks_a_shard_does_not_count(empty_cache: Path, hub: Mock) -> None:
    snapshot = cached(empty_cache, "someone/some-model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingModelError, match=r"incomplete .*without model-2.safetensors"):
        resolve_model("someone/some-model")


def test_the_error_lists_every_place(empty_cache: Path, hub: Mock) -> None:
    with pytest.raises(MissingModelError) as caught:
        resolve_model("startr")
    message = str(caught.value)
    assert "Did you mean 'starter'" in message
    for place in ("bundled:", "path:", "fetched:", "cache:", "hub: no answer"):
        assert place in message
    hub.assert_called_once_with("startr", False)


def test_the_hub_is_tried_once_and_its_files_are_checked(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("none")
        return str(cached(empty_cache, name))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/some-model").origin is ModelOrigin.HUB and calls == [True, False]
    with pytest.raises(MissingModelError, match="hub: not asked"):
        resolve_model("someone/other", offline=True)
    assert calls == [True, False, True]
    monkeypatch.setattr(models, "missing_files", lambda folder: ["*.safetensors"])
    with pytest.raises(MissingModelError, match=r"hub: incomplete .*without \*\.safetensors"):
        resolve_model("someone/third")


def test_an_unreachable_hub_is_no_error(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MissingModelError, match="hub: LocalEntryNotFoundError"):
        resolve_model("someone/some-model")


def test_a_fingerprint_depends_on_contents_alone(tmp_path: Path) -> None:
    one = fake_model(tmp_path / "one")
    two = fake_model(tmp_path / "two")
    os.utime(two / "model.safetensors", (1, 1))
    assert fingerprint(one) == fingerprint(two) and len(fingerprint(one)[0]) == 64
    (two / "model.safetensors").write_bytes(b"weightz")
    assert fingerprint(one)[0] != fingerprint(two)[0]
    assert fingerprint(one)[1] == fingerprint(two)[1]
    (two / "tokenizer.json").write_text('{"a": 2}')
    assert fingerprint(one)[1] != fingerprint(two)[1]


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(MissingModelError, match="no weights to fingerprint"):
        fingerprint(tmp_path)
