"""Heads on ONNX Runtime: the drafts of their modules, and a model's head in the cache."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head
from ragspec.drafters.heads.graph import HeadGraph
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import ModelError
from ragspec.models import resolve
from ragspec.models.quantized import quantized
from ragspec.rules.walk import Walk
from ragspec.storage.filesystem import cache_directory
from ragspec.trees.draft_tree import DraftKind
from ragspec.verification.onnx import cached_graph, form
from ragspec.verification.onnx.target import OnnxTarget
from tests.support import published_heads, tiny
from tests.support.published_heads import H, V, eagle1, eagle3

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": H}


def write(folder: Path, name: str = "EAGLE-1", **change: Any) -> Path:
    """Write a head of a reduced vocabulary, with rows of the target's or its own."""
    config, weights = eagle3() if "3" in name else eagle1("bias" in name)
    weights |= published_heads.reduced()
    if "bias" in name:
        weights["fc.bias"] = published_heads.sines("fc.bias", H)
    if "own" not in name:
        del weights["lm_head.weight"]
    return published_heads.write(folder, config | change, weights)


@pytest.mark.parametrize("heads", [2, 4], ids=["two key heads", "four"])
@pytest.mark.parametrize("source", ["head", "model"])
def test_long_texts_are_drafted_to_their_end(source: str, heads: int, tmp_path: Path) -> None:
    """The first buffers of a draft cache are full after 256 tokens."""
    small = OnnxTarget(copy.deepcopy(tiny.model("llama", **SIZES, num_key_value_heads=heads)))
    target = OnnxTarget(copy.deepcopy(tiny.model("llama", **SIZES)))
    drafter: Any = ModelDrafter(small, min_expected_gain=0.0)
    if source == "head":
        drafter = HeadDrafter(write(tmp_path), target, min_expected_gain=0.0)
    engine, prompt = Engine(target, drafter=drafter, budget=4), tiny.prompt(20, vocab_size=V)
    result = engine.generate(prompt, max_new_tokens=300, ignore_eos=True)
    assert not result.report.faults and all(len(step.tree) for step in result.steps[-9:-2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(
    "name", ["EAGLE-1", "EAGLE-1 bias", "EAGLE-3", "EAGLE-3 own", "EAGLE-3 bias"]
)
def test_drafts_are_those_of_the_modules(
    name: str, weights: str | None, temperature: float, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny.model("llama", **SIZES))
    target = OnnxTarget(model if weights is None else quantized(model))
    rotary = {"rope_type": "default"} if "bias" in name else None  # its base is beside it
    folder = write(tmp_path, name, rope_theta=500.0, rope_parameters=rotary)
    sampling, prompt = Sampling(temperature=temperature, seed=3), tiny.prompt(20, vocab_size=V)
    plain = Engine(target, drafter=None).generate(prompt, sampling, max_new_tokens=24)
    steps = []
    for head, kind in ((folder, HeadGraph), (open_head(folder, target), DraftHead)):
        drafter = HeadDrafter(head, target, min_expected_gain=0.0)
        assert isinstance(drafter.head, kind)
        result = Engine(target, drafter=drafter, budget=6).generate(
            prompt, sampling, max_new_tokens=24
        )
        assert result.tokens == plain.tokens and not result.report.faults
        steps.append([step.tree for step in result.steps])
        both = Engine(target, drafter=drafter, budget=6).generate(
            [prompt, prompt[:7]], sampling, max_new_tokens=24
        )
        assert both[0].tokens == plain.tokens and not both[1].report.faults
    assert sum(map(len, steps[0])) > 12
    for ours, theirs in zip(*steps, strict=True):
        if weights is not None:  # inputs of 8 bits round apart
            assert np.array_equal(ours.tokens[:1], theirs.tokens[:1])
            continue
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.parents, theirs.parents)
        assert np.allclose(ours.accept_prob, theirs.accept_prob, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"hidden_act": "gelu"},
    ],
)
def test_other_heads_run_through_their_modules(change: dict[str, Any], tmp_path: Path) -> None:
    target = OnnxTarget(copy.deepcopy(tiny.model("llama", **SIZES)))
    assert isinstance(HeadDrafter(write(tmp_path, **change), target).head, DraftHead)
    assert isinstance(HeadDrafter(write(tmp_path), target.model).head, DraftHead)
    with pytest.raises(ModelError, match="size mismatch"):
        HeadDrafter(write(tmp_path, num_key_value_heads=4), target)
    with pytest.raises(ModelError, match="no draft head that can be read"):
        HeadDrafter(write(tmp_path, rope_parameters=[1]), target)
    other = OnnxTarget(copy.deepcopy(tiny.model("llama", **SIZES | {"vocab_size": 50})))
    with pytest.raises(ModelError, match="97 tokens, this one has 64 and 50"):
        HeadDrafter(write(tmp_path), other)


@pytest.fixture(params=["EAGLE-1", "EAGLE-3"])
def published(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the name of a fetched model with a head of its own."""
    monkeypatch.setattr(form, "LEAST_WEIGHTS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "PUBLISHED", {"tiny": resolve.PUBLISHED["smollm2"]})
    folder = resolve.fetched_folder("tiny")
    copy.deepcopy(tiny.model("llama", tie_word_embeddings=True, **SIZES)).save_pretrained(folder)
    tiny.bpe_tokenizer(V).save_pretrained(folder)
    heads = cache_directory() / "heads"
    heads.mkdir()
    write(heads / "tiny", request.param)
    return "tiny"


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_auto_drafts_with_the_head_in_the_cache(published: str, dtype: str) -> None:
    place = {"device": "cpu", "dtype": dtype}
    prompt = tiny.prompt(30, vocab_size=V)
    plain = Engine.from_pretrained(published, None, **place)
    expected = plain.generate(prompt, max_new_tokens=40, ignore_eos=True)
    engine = Engine.from_pretrained(published, budget=8, **place)
    result = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
    assert result.tokens == expected.tokens and result.label == expected.label
    assert "head" in {name for step in result.steps for name in step.tree.sources}
    if dtype == "int8":
        assert isinstance(engine.target.loaded, cached_graph.StandIn)  # no module was loaded
        assert engine.model.config.vocab_size == V  # now they are
        again = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert again.tokens == expected.tokens and not again.report.faults
    assert not Engine.from_pretrained(published, "lookup", **place).needs.hidden_states
    other = Engine.from_pretrained(resolve.fetched_folder(published), budget=8, **place)
    assert not other.needs.hidden_states


def test_a_rule_that_cannot_judge_the_head_goes_without_it(published: str) -> None:
    class Deterministic(Walk):
        accepts = frozenset({DraftKind.DETERMINISTIC})

    engine = Engine.from_pretrained(published, rule=Deterministic(), device="cpu")
    assert engine.drafter is not None and not engine.needs.hidden_states
