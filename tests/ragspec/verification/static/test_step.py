"""Steps under `torch.compile(fullgraph=True)`: one graph a shape, never a break, same addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.open import open_static
from ragspec.verification.static.session import StaticSession
from ragspec.verification.static.target import StaticTarget
from tests.support import architectures
from tests.support.model_state import state_of

STEPS = 50
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
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
    before = state_of(model)
    torch._dynamo.reset()
    counters.clear()
    rng = np.random.default_rng(0)
    sampling = Sampling(**DISTRIBUTIONS[settings])
    distributions = [TokenDistribution(sampling, NoiseStream(row), 2) for row in range(2)]
    texts, accepted = [[1, 2, 3, 4], [5, 6]], 0
    with plain.open(2, 400) as one, static.open(2, 400) as other, torch.no_grad():
        assert isinstance(other, StaticSession)
        for session in (one, other):
            session.verify(texts, [DraftTree.empty()] * 2)
            session.commit([()] * 2)
        addresses = [buffer.data_ptr() for buffer in other._arena.stacks.buffers]
        for _ in range(STEPS):
            roots = [[int(root)] for root in rng.integers(0, 90, 2)]
            peeked = one.verify(roots, [DraftTree.empty()] * 2)[:, 0].argmax(-1).tolist()
            one.abandon()
            trees = [a_tree(rng, current) for current in peeked]
            texts = [[*text, *root] for text, root in zip(texts, roots, strict=True)]
            expected = one.verify(roots, trees)
            other.follow(distributions, texts)
            result = other.verify(roots, trees)
            for row, tree in enumerate(trees):
                difference = expected[row, : len(tree) + 1] - result[row, : len(tree) + 1]
                assert float(difference.abs().max()) < 1e-12
            paths = [walked(*inputs) for inputs in zip(trees, other.chosen or (), strict=True)]
            accepted += sum(map(len, paths))
            for text, tree, path in zip(texts, trees, paths, strict=True):
                text += [int(tree.tokens[node]) for node in path]
            for session in (one, other):
                session.commit(paths)
        assert accepted > STEPS / 4 or settings != "greedy"
        assert state_of(model) == before
        assert counters["graph_break"] == {}
        assert counters["stats"]["unique_graphs"] == len(other._arena.steps) <= 4
        assert [buffer.data_ptr() for buffer in other._arena.stacks.buffers] == addresses


def a_tree(rng: np.random.Generator, current: int) -> DraftTree:
    """Return a tree below whose root, behind others, the target's own token often stands."""
    n = int(rng.integers(0, 8))
    if not n:
        return DraftTree.empty()
    parents = [int(rng.integers(-1, node)) for node in range(n)]
    tokens = [token for token in rng.choice(90, n + 1, replace=False).tolist() if token != current][
        :n
    ]
    tokens[max(node for node in range(n) if parents[node] < 0)] = current
    return DraftTree.build(tokens, parents, "test")


def walked(tree: DraftTree, chosen: list[int]) -> tuple[int, ...]:
    """Return the path of the tokens that were chosen; none where the row is judged again."""
    path: list[int] = []
    while chosen:
        at = [-1, *path][-1]
        current = [
            n for n, p in enumerate(tree.parents) if p == at and tree.tokens[n] == chosen[at + 1]
        ]
        if not current:
            break
        path += current
    return tuple(path)
