"""Long prompts of windowed, chunked and other models: at every border the model's own logits.

All in float64, against one plain forward of the model over the whole text. Windows and chunks are
8, and everything is long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import ragspec.verification.causal as causal_module
import ragspec.verification.tree_attention as attention_module
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, TreeSession
from tests.ragspec.verification.test_kernels import Largest
from tests.support.architectures import ARCHITECTURES, COMMON, HEAD, VOCAB, WINDOW

SOME = {"use_sliding_window": True, "max_window_layers": 1}  # the first layer sees everything
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", HEAD | WINDOW | SOME),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma2": ("gemma2", {}),  # scores with a cap
    "gpt_oss": ("gpt_oss", {}),  # sinks
    "llama4": ("llama4_text", {}),  # chunks
}
# These work out norms and turns (llama4) or softmax (gemma2) in float32, whatever they are given.
FLOAT32 = {"gemma2", "llama4"}
WINDOWED = set(MODELS) - {"llama", "qwen3"}
EMPTY = DraftTree.empty()
# Tokens of each row's first text, then of the one behind it.
LENGTHS = {
    "shorter": ([5], [2]),
    "window - 1": ([7], [1]),
    "window": ([8], [7]),
    "window + 1": ([9], [8]),
    "blocks": ([12], [24]),
    "longer": ([31], [33]),
    "level": ([12, 12], [17, 17]),
    "ragged": ([30, 5, 12], [9, 25, 20]),
    "far apart": ([40, 3], [4, 40]),
}


@cache
def build(name: str) -> Any:
    """Return a tiny model in float64, routed experts too: run one by one they have it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more = MODELS[name]
    config = AutoConfig.for_model(kind, **(COMMON | ARCHITECTURES[kind].settings | more))
    inputs = {"experts_implementation": "eager"} if ARCHITECTURES[kind].experts else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        instance = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **inputs)
    return instance.eval()


def texts(lengths: list[int], seed: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB - 1, (n,), generator=random).tolist() for n in lengths]


def local(model: Any, text: list[int]) -> torch.Tensor:
    """Return the logits of the model's plain forward: [n, V]."""
    with torch.no_grad():
        places = torch.arange(len(text))[None]
        result: torch.Tensor = model(
            input_ids=torch.tensor([text]), position_ids=places, use_cache=False
        ).logits
    return result[0]


def worst(name: str, lengths: str, piece: int | None) -> float:
    """Return how far the logits of the ends of both texts and of a tree behind them are off."""
    model = build(name)
    first, second = (texts(n, i) for i, n in enumerate(LENGTHS[lengths]))
    rows = len(first)
    tree = DraftTree.build([5, 6, 7], [-1, -1, 1], "test")
    target = CausalTarget(model)
    target.piece = piece
    with target.open(rows, 8) as session:
        results = [session.verify(first, [EMPTY] * rows)]
        session.commit([()] * rows)
        results.append(session.verify(second, [EMPTY] * rows))
        session.commit([()] * rows)
        results.append(session.verify([[9]] * rows, [tree] * rows)[:, 3:])
    off = 0.0
    for row, (head, tail) in enumerate(zip(first, second, strict=True)):
        expected = local(model, [*head, *tail, 9, 6, 7])
        for part, at in zip(results, (len(head), len(head) + len(tail), 0), strict=True):
            off = max(off, float((part[row, 0] - expected[at - 1]).abs().max()))
    return off


@pytest.fixture
def everything_is_long(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no chain be too short for a narrow mask; return the slots that such masks left out."""
    cuts: list[int] = []
    real = attention_module._first_visible

    def counted(*arguments: Any) -> int:
        cuts.append(real(*arguments))
        return cuts[-1]

    monkeypatch.setattr(attention_module, "LARGE_MASK", 1)
    monkeypatch.setattr(attention_module, "_first_visible", counted)
    monkeypatch.setattr(causal_module, "LONG", 1)
    return cuts


@pytest.mark.parametrize("piece", [8, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models_its_at_every_border(
    name: str, lengths: str, piece: int, everything_is_long: list[int]
) -> None:
    assert worst(name, lengths, piece) < (1e-5 if name in FLOAT32 else 1e-12)
    crosses = name in WINDOWED and lengths in ("blocks", "longer", "level")
    assert not crosses or any(everything_is_long), "no slot was left out"


def test_a_mask_that_leaves_out_a_visible_slot_is_noticed(
    everything_is_long: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention_module._first_visible
    monkeypatch.setattr(attention_module, "_first_visible", lambda *inputs: real(*inputs) + 1)
    assert worst("gemma3", "longer", 16) > 1e-6


def test_a_rule_that_sees_farther_than_it_says_is_spelled_out() -> None:
    places = torch.arange(20)[None]
    view = attention_module.TreeView(torch.tensor([0]), places, places, None)

    def rule(row: Any, head: Any, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return (slot <= query) & ((slot > query - 8) | (slot == 0))

    first = attention_module._first_visible
    tail = replace(view, positions=places[:, 16:])
    assert first(tail, rule, 8, 1 << 20) == 0
    assert first(tail, lambda b, h, q, s: (s <= q) & (s > q - 8), 8, 1 << 20) == 9


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_no_mask_grows_with_the_prompt(name: str) -> None:
    """With all sizes as they are; a mask of one byte an entry would be seen."""
    n, before = 1000, 3000
    with CausalTarget(build(name)).open(1, n + before) as session:
        session.verify(texts([before], 0), [EMPTY])
        session.commit([()])
        with Largest() as largest:
            session.verify(texts([n], 1), [EMPTY])
    assert largest.bytes < n * (n + before)


def test_ragged_chains_are_read_in_chunks() -> None:
    target, message = CausalTarget(build("gemma3")), list[tuple[int, int]]()
    target.piece = 8
    with target.open(2, 8) as session:
        assert isinstance(session, TreeSession)
        session.verify(texts([5, 3], 0), [EMPTY] * 2)
        session.commit([()] * 2)
        session.on_read = lambda done, total: message.append((done, total))
        session.verify(texts([16, 9], 1), [EMPTY] * 2)
    assert message == [(0, 16), (8, 16), (16, 16)]
