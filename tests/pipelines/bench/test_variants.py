"""The variants of a benchmark: equal tokens, counted forwards, and unchanged peers."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ragspec.drafters.fuse import Fuse
from ragspec.drafters.heads.files import save_head
from ragspec.engine.engine import Engine
from ragspec.errors import UnknownNameError
from ragspec.pipelines.bench.measure import DEFAULT_VARIANTS, Variant
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.bench.variants import build_variants, run_peer
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny
from tests.support.calls import noted

PROMPT = (5, 6, 7, 8, 9, 5, 6, 7)
ITEM = BenchItem("1", "free", PROMPT, 12, fixed=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model("llama"), tiny.tokenizer(), "context", budget=6)


@pytest.fixture(scope="module")
def variants(engine: Engine) -> dict[str, Variant]:
    draft = CausalTarget(tiny.model("llama", num_hidden_layers=1))
    return build_variants(DEFAULT_VARIANTS, engine, draft, lambda: copy.deepcopy(engine.model))


def test_every_variant_writes_the_same_tokens(variants: dict[str, Variant]) -> None:
    assert list(variants) == list(DEFAULT_VARIANTS)
    plain = variants["plain"](ITEM, 12)
    assert len(plain.tokens) == 12
    for name, variant in variants.items():
        outcome = variant(ITEM, 12)
        assert outcome.tokens == plain.tokens, name
        assert 0 < outcome.forwards <= 12, name
        assert outcome.seconds > 0


def test_drafts_save_forwards(engine: Engine) -> None:
    names = ("plain", "hf-greedy", "model", "hf-assistant@5")
    built = build_variants(names, engine, engine.target, lambda: copy.deepcopy(engine.model))
    plain, greedy, ours, theirs = (built[name](ITEM, 12).forwards for name in names)
    assert plain == greedy == 12
    assert theirs < 12
    assert ours < 12
    assert [built[name](ITEM, 1).forwards for name in ("plain", "hf-greedy")] == [1, 1]


def test_end_tokens_count_only_where_the_length_is_not_fixed(engine: Engine) -> None:
    peer, current = (copy.deepcopy(engine.model) for _ in range(2))
    theirs = partial(run_peer, peer)
    whole = theirs(ITEM, 12).tokens
    peer.generation_config.eos_token_id = current.generation_config.eos_token_id = whole[3]
    ending = BenchItem("1", "docqa", PROMPT, 12)
    ours = build_variants(["plain"], Engine(current, drafter=None), None, lambda: None)["plain"]
    short = whole[: whole.index(whole[3]) + 1]
    for variant in (theirs, ours):
        assert variant(ending, 12).tokens == short
        assert variant(ITEM, 12).tokens == whole
    assert peer.generation_config.eos_token_id == whole[3]


def test_peers_run_on_a_copy_and_their_names_set_the_draft_length(engine: Engine) -> None:
    names = ("hf-greedy", "hf-lookup@7", "hf-lookup", "hf-assistant@3")
    peers = build_variants(names, engine, engine.target, lambda: copy.deepcopy(engine.model))
    greedy, seven, usual, assistant = peers.values()
    for peer in (greedy, seven, usual, assistant):
        assert isinstance(peer, partial) and peer.func is run_peer
        assert peer.args[0] is not engine.model
        if peer is seven or peer is usual:
            tokens = 7 if peer is seven else 10
            assert peer.keywords == {"prompt_lookup_num_tokens": tokens}
        if peer is assistant:
            assert peer.keywords["assistant_model"].generation_config.num_assistant_tokens == 3
    misspelt = ("hf-greedi", "contxt", "hf-greedy@3", "hf-lookup@0", "hf-lookup@", "hf-assistant@n")
    for wrong in misspelt:
        with pytest.raises(UnknownNameError, match=f"unknown drafter '{wrong}'"):
            build_variants([wrong], engine, engine.model, lambda: None)


def test_the_counter_of_a_peer_counts_its_run_only_and_is_removed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = copy.deepcopy(engine.model)
    variants = [partial(run_peer, peer), partial(run_peer, peer, prompt_lookup_num_tokens=5)]
    assert not peer._forward_pre_hooks
    hooks: list[int] = []
    forward = noted(peer.forward, hooks, lambda *_, **__: len(peer._forward_pre_hooks))
    monkeypatch.setattr(peer, "forward", forward)
    for variant in (*variants, *variants):
        hooks.clear()
        assert hooks == [1] * variant(ITEM, 12).forwards
    monkeypatch.setattr(peer, "forward", None)
    with pytest.raises(TypeError):
        variants[0](ITEM, 12)
    assert not peer._forward_pre_hooks


def test_heads_and_methods_can_be_joined(tmp_path: Path) -> None:
    folder = str(tmp_path / "head++")
    save_head(heads.trained(), folder)
    engine = Engine(heads.model(torch.float32), drafter=None)
    variants = build_variants([folder, f"context+{folder}", "context"], engine, None, lambda: None)
    item = replace(ITEM, prompt=tuple(tiny.prompt(20, vocab_size=heads.VOCAB)))
    record = {name: variant(item, 24) for name, variant in variants.items()}
    assert len({tuple(outcome.tokens) for outcome in record.values()}) == 1
    fused = [each.args[0].drafter for each in variants.values() if isinstance(each, partial)]
    sources = [[each.name for each in one.drafters] for one in fused if isinstance(one, Fuse)]
    assert sources == [["head"], ["context", "head"], ["context"]]
    for wrong in ("context+nothing", "context+hf-greedy", "context+plain", "context+", ""):
        with pytest.raises(UnknownNameError, match="unknown drafter"):
            build_variants([wrong], engine, None, lambda: None)
