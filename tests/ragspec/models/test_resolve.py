"""Model names: which place answers, in which order, and what the error says when none does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ragspec.errors import ModelNotFoundError
from ragspec.models import resolve as models
from ragspec.models.resolve import (
    BUNDLED,
    Origin,
    fingerprint,
    hub_answers,
    resolve_model,
    tokenizer_fingerprint,
)
from tests.support import tiny


def never() -> bool:
    raise AssertionError("the hub must not be asked")


def no() -> bool:
    return False


def fake_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

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


def test_a_path_leads_to_its_folder(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "model")
    for name in (folder, str(folder)):
        found = resolve_model(name, probe=never)
        assert (found.folder, found.origin) == (folder.resolve(), Origin.PATH)


def test_a_relative_path_without_dots_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_model(tmp_path / "my" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my/model", probe=never).folder == folder.resolve()


@pytest.mark.parametrize("made", [True, False])
def test_a_path_without_a_model_is_refused_without_asking_anybody(
    tmp_path: Path, made: bool
) -> None:
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    with pytest.raises(ModelNotFoundError, match="nothing") as caught:
        resolve_model(folder, probe=never)
    assert ("holds no config.json" in str(caught.value)) == made
    assert caught.value.exit_code == 5


def test_a_bundled_name_beats_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = fake_model(tmp_path / "bundle" / "target")
    monkeypatch.setattr(models, "BUNDLED", {"starter": bundled})
    own = fake_model(tmp_path / "starter")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("starter", probe=never).folder == bundled
    assert resolve_model("./starter", probe=never).folder == own.resolve()


def test_the_bundled_models_are_there() -> None:
    for name in BUNDLED:
        assert resolve_model(name, probe=never).origin is Origin.BUNDLED


def test_an_installed_package_answers_to_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_model(tmp_path / "carrier_of_a_model" / "model")
    (folder.parent / "__init__.py").write_text("raise RuntimeError('looked at, never imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(models, "PACKAGED", {"carried": ("carrier_of_a_model", "model")})
    found = resolve_model("carried", probe=never)
    assert (found.folder, found.origin) == (folder, Origin.PACKAGE)


def test_the_cache_answers_before_the_hub_is_asked(empty_cache: Path) -> None:
    snapshot = cached(empty_cache, "someone/some-model")
    found = resolve_model("someone/some-model", probe=never)
    assert (found.folder, found.origin) == (snapshot, Origin.CACHE)


def test_a_cached_snapshot_that_lacks_a_shard_does_not_count(empty_cache: Path) -> None:
    snapshot = cached(empty_cache, "someone/some-model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"incomplete .*without model-2.safetensors"):
        resolve_model("someone/some-model", probe=no)


def test_the_error_lists_every_place_that_was_tried(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("startr", probe=no)
    message = str(caught.value)
    assert "Did you mean 'starter'" in message
    for place in ("bundled:", "package:", "cache:", "hub: no answer within 1.5 s"):
        assert place in message


def test_offline_never_asks_the_hub(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="hub: not asked"):
        resolve_model("someone/some-model", offline=True, probe=never)


def test_the_probe_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(seconds: float, answers: list[bool]) -> None:
        time.sleep(30)

    monkeypatch.setattr(models, "_ask_hub", stuck)
    began = time.monotonic()
    assert not hub_answers(0.1)
    assert time.monotonic() - began < 10


def test_the_probe_says_no_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub_answers()


def test_a_fingerprint_tells_contents_and_nothing_else(tmp_path: Path) -> None:
    one = fake_model(tmp_path / "one")
    two = fake_model(tmp_path / "two")
    os.utime(two / "model.safetensors", (1, 1))
    assert fingerprint(one) == fingerprint(two)
    (two / "model.safetensors").write_bytes(b"weightz")
    assert fingerprint(one).weights != fingerprint(two).weights
    assert fingerprint(one).tokenizer == fingerprint(two).tokenizer
    (two / "tokenizer.json").write_text('{"a": 2}')
    assert fingerprint(one).tokenizer != fingerprint(two).tokenizer


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == ""
    with pytest.raises(ModelNotFoundError, match="no weights to fingerprint"):
        fingerprint(tmp_path)


def test_what_is_resolved_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    folder = resolve_model(tmp_path, probe=never).folder
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == tiny.VOCAB
    assert AutoTokenizer.from_pretrained(folder)("a b").input_ids == [65, 0, 66]
    assert len(fingerprint(folder).weights) == 64
