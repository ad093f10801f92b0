"""Steps under `torch.compile(fullgraph=True)`: one graph a shape, never a break, same addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.target.causal import CausalTarget
from ragspec.target.static.open import open_static
from ragspec.target.static.session import StaticSession
from ragspec.target.static.target import StaticTarget
from ragspec.trees.draft_tree import DraftTree
from tests.support import architectures

STEPS = 50
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize(
    ("name", "settings"), [("llama", "greedy"), ("gemma3_text", "greedy"), ("llama", "penalised")]
)
def test_one_graph_serves_all_trees_of_a_shape(name: str, settings: str) -> None:
    model = architectures.build(name)
    plain = CausalTarget(model)
    static = open_static(plain, "compile", backend="eager")
    assert isinstance(static, StaticTarget), static.static
    torch._dynamo.reset()
    counters.clear()
    rng = np.random.default_rng(0)
    sampling = Sampling(**LAWS[settings])
    laws = [TokenLaw(sampling, NoiseStream(row), 2) for row in range(2)]
    texts = [[1, 2, 3, 4], [5, 6]]
    with plain.open(2, 400) as one, static.open(2, 400) as other, torch.no_grad():
        assert isinstance(other, StaticSession)
        for session in (one, other):
            session.verify(texts, [DraftTree.empty()] * 2)
            session.commit([()] * 2)
        addresses = [buffer.data_ptr() for buffer in other._arena.stacks.buffers]
        for _ in range(STEPS):
            trees = [a_tree(rng) for _ in range(2)]
            roots = [[int(root)] for root in rng.integers(0, 90, 2)]
            texts = [[*text, *root] for text, root in zip(texts, roots, strict=True)]
            expected = one.verify(roots, trees)
            other.follow(laws, texts)
            found = other.verify(roots, trees)
            for row, tree in enumerate(trees):
                apart = expected[row, : len(tree) + 1] - found[row, : len(tree) + 1]
                assert float(apart.abs().max()) < 1e-12
            for session in (one, other):
                session.commit([(), ()])
        assert counters["graph_break"] == {}
        assert counters["stats"]["unique_graphs"] == len(other._arena.steps) <= 4
        assert [buffer.data_ptr() for buffer in other._arena.stacks.buffers] == addresses


def a_tree(rng: np.random.Generator) -> DraftTree:
    n = int(rng.integers(0, 8))
    parents = [int(rng.integers(-1, node)) for node in range(n)]
    tokens = rng.choice(90, n, replace=False).tolist()
    return DraftTree.build(tokens, parents, "test") if n else DraftTree.empty()
