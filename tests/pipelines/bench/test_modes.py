"""The ways of decoding that are compared: same tokens, honest counts, peers left alone."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.fuse import Fuse
from ragspec.engine.engine import Engine
from ragspec.errors import UnknownNameError
from ragspec.pipelines.bench.modes import (
    DRAFT_LENGTHS,
    MODES,
    NGRAMS,
    HFMode,
    Mode,
    OurMode,
    build_modes,
)
from ragspec.pipelines.bench.prompts import BenchItem
from tests.support import heads, tiny

PROMPT = (5, 6, 7, 8, 9, 5, 6, 7)
ITEM = BenchItem("1", "free", PROMPT, 12, fixed=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model("llama"), tiny.tokenizer(), "context", budget=6)


@pytest.fixture(scope="module")
def modes(engine: Engine) -> dict[str, list[Mode]]:
    draft = tiny.model("llama", num_hidden_layers=1)
    return build_modes(MODES, engine, draft, lambda: copy.deepcopy(engine.model))


def test_every_mode_writes_the_same_tokens(modes: dict[str, list[Mode]]) -> None:
    assert list(modes) == list(MODES)
    plain = modes["plain"][0].run(ITEM, 12)
    assert len(plain.tokens) == 12
    for name, settings in modes.items():
        found = settings[0].run(ITEM, 12)
        assert found.tokens == plain.tokens, name
        assert 0 < found.forwards <= 12, name
        assert found.seconds > 0
        assert sum(found.step_tokens) == 12, name
        assert len(found.step_tokens) <= found.forwards, name


def test_steps_show_what_drafts_saved(engine: Engine) -> None:
    names = ("plain", "hf-greedy", "model", "hf-assistant")
    found = build_modes(names, engine, engine.model, lambda: copy.deepcopy(engine.model))
    plain, greedy, ours, theirs = (found[name][0].run(ITEM, 12).step_tokens for name in names)
    assert plain == greedy == [1] * 12
    assert theirs == [1 + DRAFT_LENGTHS[0]] * 2
    assert sum(ours) == 12 and max(ours) > 1


def test_forwards_of_the_prompt_count_for_all_alike(modes: dict[str, list[Mode]]) -> None:
    for name in ("plain", "hf-greedy"):
        assert modes[name][0].run(ITEM, 12).forwards == 12
        assert modes[name][0].run(ITEM, 1).forwards == 1


def test_end_tokens_count_only_where_the_length_is_not_fixed(engine: Engine) -> None:
    peer, own = (copy.deepcopy(engine.model) for _ in range(2))
    theirs = HFMode("hf-greedy", peer)
    whole = theirs.run(ITEM, 12).tokens
    peer.generation_config.eos_token_id = own.generation_config.eos_token_id = whole[3]
    ending = BenchItem("1", "docqa", PROMPT, 12)
    ours = build_modes(["plain"], Engine(own, drafter=None), None, lambda: None)["plain"][0]
    short = whole[: whole.index(whole[3]) + 1]
    for mode in (theirs, ours):
        assert mode.run(ending, 12).tokens == short
        assert mode.run(ITEM, 12).tokens == whole
    assert peer.generation_config.eos_token_id == whole[3]


def test_the_peers_have_a_copy_and_a_grid(engine: Engine, modes: dict[str, list[Mode]]) -> None:
    peer = modes["hf-greedy"][0]
    assert isinstance(peer, HFMode)
    assert peer.model is not engine.model
    assert len(modes["hf-lookup"]) == len(DRAFT_LENGTHS) * len(NGRAMS)
    grid = set()
    for mode in modes["hf-assistant"]:
        assert isinstance(mode, HFMode)
        config = mode.arguments["assistant_model"].generation_config
        grid.add((config.num_assistant_tokens, config.assistant_confidence_threshold))
    assert grid == set(itertools.product((5, 10, 20), (0.0, 0.4)))
    assert len(modes["hf-assistant"]) == len(grid)
    assert len({mode.name for settings in modes.values() for mode in settings}) == 17


def test_a_forward_of_the_peers_runs_the_counter_of_one_mode(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = copy.deepcopy(engine.model)
    modes = [HFMode("greedy", peer), HFMode("lookup", peer, prompt_lookup_num_tokens=5)]
    assert not peer._forward_pre_hooks
    seen: list[int] = []
    forward = peer.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(len(peer._forward_pre_hooks))
        return forward(*arguments, **options)

    monkeypatch.setattr(peer, "forward", watched)
    for mode in (*modes, *modes):
        seen.clear()
        found = mode.run(ITEM, 12)
        assert seen == [1] * found.forwards
        assert sum(found.step_tokens) == 12
    monkeypatch.setattr(peer, "forward", None)
    with pytest.raises(TypeError):
        modes[0].run(ITEM, 12)
    assert not peer._forward_pre_hooks


def test_modes_that_need_a_draft_model_are_left_out_without_one(engine: Engine) -> None:
    calls: list[Any] = []
    found = build_modes(["plain", "model", "fused", "hf-assistant"], engine, None, calls.clear)
    assert list(found) == ["plain"]


@pytest.mark.parametrize("name", ["hf-greedi", "contxt"])
def test_unknown_modes_are_refused(name: str, engine: Engine) -> None:
    with pytest.raises(UnknownNameError, match=name):
        build_modes([name], engine, None, lambda: copy.deepcopy(engine.model))


def test_heads_and_methods_can_be_joined(tmp_path: Path) -> None:
    folder = str(tmp_path / "head")
    heads.trained().save(folder)
    engine = Engine(heads.model(torch.float32), drafter=None)
    names = [folder, f"context+{folder}", "context"]
    modes = build_modes(names, engine, None, lambda: None)
    item = replace(ITEM, prompt=tuple(tiny.prompt(20, vocab_size=heads.VOCAB)))
    found = {name: mode.run(item, 24) for name, (mode,) in modes.items()}
    assert len({tuple(outcome.tokens) for outcome in found.values()}) == 1
    fused = [mode.engine.drafter for (mode,) in modes.values() if isinstance(mode, OurMode)]
    sources = [[each.name for each in one.drafters] for one in fused if isinstance(one, Fuse)]
    assert sources == [["head"], ["context", "head"], ["context"]]
    for wrong in ("context+nothing", "context+hf-greedy", "context+plain", "context+", ""):
        with pytest.raises(UnknownNameError, match="mode"):
            build_modes([wrong], engine, None, lambda: None)
