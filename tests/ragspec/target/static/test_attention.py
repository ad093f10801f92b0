"""Ways of telling a model what a step's queries see: the logits are those of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import varlen

from ragspec.errors import InputError
from ragspec.target.causal import CausalTarget
from ragspec.target.static.attention import ATTENTIONS
from ragspec.target.static.open import open_static
from ragspec.target.static.target import StaticTarget
from ragspec.trees.draft_tree import DraftTree
from tests.support import architectures

CLOSE = 1e-12


def packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float,
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the CUDA kernel is documented to: lengths of their own over pages, with weights."""
    assert cu_seq_k is None and return_aux.lse and max_k == key.shape[1]
    assert enable_gqa == (query.shape[1] != key.shape[2])
    share = query.shape[1] // key.shape[2]
    outs, weights = [], []
    for row, used in enumerate(seqused_k.tolist()):
        page = int(block_table[row, 0])
        queries = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        assert len(queries) == max_q
        keys = key[page, :used].repeat_interleave(share, 1)
        values = value[page, :used].repeat_interleave(share, 1)
        scores = scale * torch.einsum("qhd,khd->hqk", queries, keys)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        weights.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(weights)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", packed)


def opened(name: str, attention: str, mode: str = "eager") -> tuple[CausalTarget, StaticTarget]:
    plain = CausalTarget(architectures.build(name))
    static = open_static(plain, mode, backend="eager", attention=attention)
    assert isinstance(static, StaticTarget), static.static
    return plain, static


def a_tree(rng: np.random.Generator) -> DraftTree:
    n = int(rng.integers(0, 20))
    parents = [int(rng.integers(-1, node)) for node in range(n)]
    tokens = rng.choice(90, n, replace=False).tolist()
    return DraftTree.build(tokens, parents, "test") if n else DraftTree.empty()


def furthest(plain: CausalTarget, static: StaticTarget, steps: int) -> float:
    """Return by how much logits of ragged rows and random trees differ at most."""
    rng = np.random.default_rng(0)
    apart = 0.0
    with plain.open(3, 400) as one, static.open(3, 400) as other, torch.no_grad():
        for session in (one, other):
            session.verify([[1, 2, 3, 4] * 8, [5, 6], [7] * 11], [DraftTree.empty()] * 3)
            session.commit([()] * 3)
        for _ in range(steps):
            trees = [a_tree(rng) for _ in range(3)]
            roots = [[int(root)] for root in rng.integers(0, 90, 3)]
            expected, found = one.verify(roots, trees), other.verify(roots, trees)
            for row, tree in enumerate(trees):
                difference = expected[row, : len(tree) + 1] - found[row, : len(tree) + 1]
                apart = max(apart, float(difference.abs().max()))
            kept = [(0,) if len(tree) and rng.random() < 0.7 else () for tree in trees]
            for session in (one, other):
                session.commit(kept)
    return apart


@pytest.mark.parametrize("attention", ["flex", "varlen"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mistral", "gpt_oss"])
def test_logits_are_those_of_a_mask(name: str, attention: str) -> None:
    plain, static = opened(name, attention)
    assert static.attention is ATTENTIONS[attention], "it passed its trial that way"
    rounding = CLOSE if plain.dtype == torch.float64 else 5e-5  # gpt_oss is built in float32
    assert furthest(plain, static, 6) < rounding


def test_a_soft_cap_is_attended_to_by_flex_and_else_by_a_mask() -> None:
    plain, static = opened("gemma2", "flex")
    assert static.attention is ATTENTIONS["flex"]
    assert furthest(plain, static, 4) < CLOSE
    assert opened("gemma2", "varlen")[1].attention is ATTENTIONS["mask"]


def test_what_a_device_lacks_is_told_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert opened("llama", "varlen")[1].attention is ATTENTIONS["mask"], "it is CUDA's"
    with pytest.raises(InputError, match="got attention='flax'; expected one of 'mask', 'flex'"):
        opened("llama", "flax")


def test_flex_attention_compiles_without_a_break() -> None:
    plain, static = opened("llama", "flex", "compile")
    torch._dynamo.reset()
    counters.clear()
    assert furthest(plain, static, 12) < CLOSE
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] <= 4, "one a shape"
