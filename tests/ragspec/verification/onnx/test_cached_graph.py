"""Cached graphs: the same texts without the modules, damage, changes, and removal."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragspec import Engine, ModelDrafter, load_model
from ragspec.errors import ModelError
from ragspec.models import gguf
from ragspec.models.onnx_session import onnx_runtime
from ragspec.needs import LAST
from ragspec.pipelines.cli.models import known_models, remove
from ragspec.retrievers.methods.rapid import Rapid
from ragspec.storage import filesystem
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.onnx import cached_graph, form
from ragspec.verification.onnx.cached_graph import (
    BATCH,
    GRAPH,
    STEP,
    STEP_BATCH,
    TENSORS,
    WEIGHTS,
    CachedTarget,
)
from ragspec.verification.onnx.record import RECORD
from tests.support import tiny
from tests.support.command_line import Capture, output_of

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(form, "LEAST_WEIGHTS", 0)
    for name, value in {"STEP_AFTER": 400, "STEP_FROM": 1, "POSITIONS": 7}.items():
        monkeypatch.setattr(cached_graph, name, value)  # within a text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return filesystem.cache_directory() / "models"


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "gemma3_text": {"head_dim": 32, "sliding_window": 12, "num_hidden_layers": 6},
}


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "llama")


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    model = copy.deepcopy(tiny.model(family, **FAMILIES[family]))
    model.generation_config.repetition_penalty = 1.2
    model.save_pretrained(tmp_path / "model")
    tiny.bpe_tokenizer(tiny.VOCAB).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def opened(folder: Path, dtype: str = "int8") -> Engine:
    return Engine.from_pretrained(folder, "lookup", device="cpu", dtype=dtype)


def write(engine: Engine, prompt: list[int] | None = None) -> Any:
    return engine.generate(prompt or tiny.prompt(30), max_new_tokens=40, ignore_eos=True)


STORED = [*((family, "int8") for family in FAMILIES), ("llama", "int4")]


@pytest.mark.parametrize(("family", "dtype"), STORED, indirect=["family"])
def test_texts_are_those_of_the_model_and_modules_load_on_use(
    folder: Path, family: str, dtype: str
) -> None:
    model, tokenizer = load_model(folder, "cpu", dtype)
    first, second = Engine(model, tokenizer, "lookup"), opened(folder, dtype)
    expected, result = write(first), write(second)
    assert isinstance(second.target, CachedTarget)
    assert result.tokens == expected.tokens and result.label == expected.label == "exact"
    assert (result.report.weights, result.report.runtime) == (dtype, "onnx")
    session = second.target._runner.session.inner
    assert not session.get_session_options().enable_mem_pattern  # one would stay for every size
    prompts = [tiny.prompt(30), tiny.prompt(9), tiny.prompt(17, seed=2)]
    several = second.generate(prompts, max_new_tokens=40, ignore_eos=True)
    assert [each.tokens for each in several] == [write(second, each).tokens for each in prompts]
    for name in ("_step", "_step_batch"):
        held = vars(second.target).get(name)
        assert (held is not None) == (family != "gemma3_text")  # has windows
    assert isinstance(second.target.loaded, cached_graph.StandIn)
    ours, theirs = second.target.config, vars(first.target.config)
    assert ours.model_type == family and len(theirs) > 20
    for name, value in theirs.items():  # those with _ are of the call
        assert name[0] == "_" or name == "use_cache" or getattr(ours, name) == value, name
    settings = [engine.target.loaded.generation_config.to_dict() for engine in (first, second)]
    assert settings[0] == settings[1]
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    assert second.cost is not None and second.cost is not opened(folder, dtype).cost
    for other in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert write(other).tokens == expected.tokens
    assert not isinstance(second.target.loaded, cached_graph.StandIn)
    assert write(second).report.runtime == "onnx"
    states, loaded = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(each, loaded[name]) for name, each in states.items())
    with torch.no_grad():
        second.model.model.norm.weight.sub_(4.0)  # from 1, or from 0 and one more
    changed = write(second)
    assert changed.report.runtime == "torch" and changed.tokens != expected.tokens


def test_a_session_goes_on_through_modules_that_were_loaded_meanwhile(folder: Path) -> None:
    target, states = opened(folder).target, list[torch.Tensor]()
    with target.open(1, 64) as session, torch.no_grad():
        session.keep_hidden((1, LAST))
        for _ in range(2):
            session.verify([tiny.prompt(9)], [DraftTree.empty()])
            states.append(session.hidden[0].of((1, LAST)))
            session.discard_uncommitted()
            target.model.lm_head.register_forward_hook(lambda *_: None)
            target.open(1, 8)
    assert target.runtime == "torch"
    torch.testing.assert_close(states[1], states[0], atol=1e-2, rtol=0.0)


@pytest.mark.parametrize("drafter", [ModelDrafter, Rapid])
def test_a_model_in_8_bits_drafts_without_its_modules(folder: Path, drafter: Any) -> None:
    engine = opened(folder)
    result = write(engine.with_drafter(drafter(engine.target), 6))
    assert result.tokens == write(engine).tokens and not result.report.faults
    assert result.report.accepted == result.report.drafted > 25
    assert isinstance(engine.target.loaded, cached_graph.StandIn)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_draft_models_by_name_use_the_requested_runtime(folder: Path, runtime: str) -> None:
    options = {"device": "cpu", "dtype": "float32", "runtime": runtime}
    engine = Engine.from_pretrained(folder, None, folder, 6, **options)
    (drafter,) = engine.drafter.drafters  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter) and drafter.model.runtime == runtime
    result = write(engine)
    assert result.tokens == write(engine.with_drafter(None)).tokens and not result.report.faults
    assert result.report.accepted > 25


@pytest.mark.parametrize("name", [RECORD, GRAPH, STEP, WEIGHTS, TENSORS])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_graph_is_rebuilt(folder: Path, cache: Path, name: str, damage: str) -> None:
    expected = write(opened(folder)).tokens
    (path,) = cache.glob(f"*/{name}")
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        at = 2 * len(whole) // 3
        flipped = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        path.write_bytes(whole[:at] if damage == "cut" else flipped)
    with pytest.warns(RuntimeWarning, match="is damaged .* made anew"):
        engine = opened(folder)
    assert write(engine).tokens == expected
    with warnings.catch_warnings(action="error"):
        assert isinstance(opened(folder).target, CachedTarget)


def test_a_graph_deleted_while_in_use_gives_the_same_text(folder: Path, cache: Path) -> None:
    prompts = [tiny.prompt(30), tiny.prompt(9)]
    expected = opened(folder).generate(prompts, max_new_tokens=40, ignore_eos=True)
    engine = opened(folder)
    shutil.rmtree(cache)
    with pytest.warns(RuntimeWarning, match="was deleted") as caught:
        several = engine.generate(prompts, max_new_tokens=40, ignore_eos=True)
    assert {Path(str(each.message).split()[0]).name for each in caught} == {BATCH, STEP}
    assert [each.tokens for each in several] == [each.tokens for each in expected]
    assert isinstance(engine.target.loaded, cached_graph.StandIn)


@pytest.mark.parametrize("place", ["model.safetensors", "pytorch_model.bin", "w/a.safetensors"])
def test_changed_models_and_settings_get_separate_graphs(
    folder: Path, cache: Path, place: str
) -> None:
    tensors, weights = load_file(folder / "model.safetensors"), folder / place
    (folder / "model.safetensors").unlink()
    weights.parent.mkdir(exist_ok=True)
    if place.startswith("w"):
        index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, place)})
        (folder / "model.safetensors.index.json").write_text(index)
    save = torch.save if place.endswith(".bin") else partial(save_file, metadata={"format": "pt"})
    save(tensors, weights)
    engine, stat = opened(folder), weights.stat()
    before = write(engine).tokens
    save({name: each.flip(-1) for name, each in tensors.items()}, weights)
    os.utime(weights, ns=(0, stat.st_mtime_ns))
    assert write(opened(folder)).tokens != before == write(engine).tokens
    with pytest.raises(ModelError, match="has changed since it was opened"):
        _ = engine.model
    for options in ({"runtime": "torch"}, {"dtype": "float32"}, {"dtype": "auto"}):
        settings = {"device": "cpu", "dtype": "int8", **options}
        assert not isinstance(Engine.from_pretrained(folder, **settings).target, CachedTarget)
    assert len(list(cache.glob(f"*/{GRAPH}"))) == 2


def test_a_folder_may_have_a_long_name(folder: Path) -> None:
    folder = folder.rename(folder.with_name("模" * 80))
    opened(folder)
    assert isinstance(opened(folder).target, CachedTarget)


@pytest.mark.skipif(
    onnx_runtime().__version__ < "1.28" or sys.platform != "linux", reason="packs at opening"
)
def test_sessions_map_the_same_packed_weights(folder: Path, cache: Path) -> None:
    opened(folder)
    engine = opened(folder)
    engine.generate([tiny.prompt(30), tiny.prompt(9)], max_new_tokens=4)  # opens a second one
    (path,) = cache.glob(f"*/{WEIGHTS}")
    parts = {g: packed_parts(path.with_name(g)) for g in (GRAPH, BATCH, STEP, STEP_BATCH)}
    assert all(each == parts[GRAPH] for each in parts.values()) and len(parts[GRAPH]) > 8
    assert Path("/proc/self/maps").read_text("utf-8").count(str(path)) >= 2 * len(parts[GRAPH])


def packed_parts(graph: Path) -> dict[str, str]:
    weights = onnx.load(graph, load_external_data=False).graph.initializer
    entries = ((each.name, entry) for each in weights for entry in each.external_data)
    return {name: entry.value for name, entry in entries if entry.key.startswith("prepacked")}


def test_graphs_are_listed_and_removed(folder: Path, cache: Path, capsys: Capture) -> None:
    opened(folder)
    assert "a cached graph: remove takes it" in output_of(capsys, "models").out
    (path,) = (each.parent for each in cache.glob(f"*/{GRAPH}"))
    (record,) = (each for each in known_models() if each["name"] == path.name)
    assert record["parameters"] == opened(folder).target.loaded.num_parameters() > 0
    remove(path.name)
    assert not path.exists()


def test_beyond_four_graphs_the_least_recently_used_is_deleted(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph_of(version: int, folder: Path = tmp_path / "m[1]") -> set[str]:
        before = {path.name for path in cache.glob("*")}
        monkeypatch.setattr(cached_graph, "VERSION", version)
        opened(folder)
        return {path.name for path in cache.glob("*")} - before

    folder.rename(tmp_path / "m[1]")
    first, second, *others = (graph_of(version) for version in range(4))
    assert graph_of(0) == set()  # used again
    other = shutil.copytree(tmp_path / "m[1]", tmp_path / "other" / "m[1]")
    others += [graph_of(4), graph_of(0, other)]  # that of another model counts for itself
    assert {path.name for path in cache.glob("*")} == first.union(*others) and second
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "0")
    assert len(graph_of(0, other)) == 1


def test_a_full_disk_is_no_error(folder: Path, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gguf, "SPARE", 1 << 60)
    assert write(opened(folder)).tokens and not list(cache.glob(f"*/{GRAPH}"))


COLD = """
import sys
from ragspec.engine.engine import Engine
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "onnx", "onnxruntime", "numba"}, loaded
from ragspec.verification.onnx import form
form.LEAST_WEIGHTS = 0
engine = Engine.from_pretrained(sys.argv[1], device="cpu", dtype="int8")
assert engine.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).tokens
heavy = {"transformers.modeling_utils", "transformers.models", "onnx", "torch._dynamo"}
print(sorted(heavy & set(sys.modules)))
"""


def test_a_cached_graph_opens_without_modelling_code(folder: Path) -> None:
    opened(folder)
    done = subprocess.run(
        [sys.executable, "-c", COLD, str(folder)], capture_output=True, encoding="utf-8"
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
