"""Steps under `torch.compile(fullgraph=True)`: one graph a shape, no breaks, same addresses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters as dynamo_counters

from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static
from ragspec.verification.static.layout import (
    LEAST_SLOTS,
    Counters,
    ancestor_bits,
    lay_out,
    slots_of,
)
from tests.ragspec.verification.static.test_session import check_logits, distribution
from tests.support import architectures
from tests.support.model_state import state_of
from tests.support.sessions import EMPTY, prefill, static_session

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
    assert static.runner is not None, static.static
    before = state_of(model)
    torch._dynamo.reset()
    dynamo_counters.clear()
    rng = np.random.default_rng(0)
    distributions = [distribution(row, **DISTRIBUTIONS[settings]) for row in range(2)]
    texts, accepted = [[1, 2, 3, 4], [5, 6]], 0
    with plain.open(2, 400) as one, static_session(static, 2, 400) as other:
        for session in (one, other):
            if name == "gemma3_text":
                session.keep_hidden()
            prefill(session, *texts)
        addresses = [buffer.data_ptr() for buffer in other._arena.buffers]
        for _ in range(STEPS):
            roots = [[int(root)] for root in rng.integers(0, 90, 2)]
            peeked = [int(each[0].argmax()) for each in one.verify(roots, [EMPTY] * 2)]
            one.discard_uncommitted()
            trees = [a_tree(rng, current) for current in peeked]
            texts = [[*text, *root] for text, root in zip(texts, roots, strict=True)]
            check_logits(one, other, roots, trees, list(zip(distributions, texts, strict=True)))
            paths = [walked(*inputs) for inputs in zip(trees, other.chosen or (), strict=True)]
            accepted += sum(map(len, paths))
            for text, tree, path in zip(texts, trees, paths, strict=True):
                text += [int(tree.tokens[node]) for node in path]
            for session in (one, other):
                session.commit(paths)
        assert accepted > STEPS / 4 or settings != "greedy"
        assert state_of(model) == before
        assert dynamo_counters["graph_break"] == {}
        assert dynamo_counters["stats"]["unique_graphs"] == len(other._arena.steps) <= 4
        assert [buffer.data_ptr() for buffer in other._arena.buffers] == addresses


def a_tree(rng: np.random.Generator, current: int) -> DraftTree:
    """Return a tree below whose root, behind others, the target's own token often stands."""
    n = int(rng.integers(0, 8))
    if not n:
        return EMPTY
    parents = [int(rng.integers(-1, node)) for node in range(n)]
    others = rng.choice(90, n + 1, replace=False).tolist()
    tokens = [token for token in others if token != current][:n]
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


def test_of_equal_siblings_the_longer_path_counts() -> None:
    parents = torch.tensor([[0, 0, 0, 2, 4]])
    tokens = torch.tensor([[9, 7, 7, 5, 5]])  # the last is a pad with a token that is chosen
    chosen = torch.tensor([[7, 1, 5, 1, 5]])
    above = torch.from_numpy(ancestor_bits(parents.numpy()))
    counters = Counters.of(5, 40, torch.float64, torch.device("cpu"))
    layout = lay_out(above, torch.tensor([2]), counters, torch.zeros_like(parents))
    selected = layout.walk(tokens, parents, chosen)
    assert selected.tolist() == [[True, False, True, True, False]]


MOST = 1 << 20


def test_slots_are_at_most_a_fourth_too_many_and_their_sizes_few() -> None:
    for count in [*range(1, 3000), 32_768, 32_769, 100_001]:
        slots = slots_of(count, MOST)
        assert slots >= count
        assert slots == LEAST_SLOTS or slots * 4 <= count * 5
    counts = [slots_of(n, MOST) for n in (1, 128, 129, 160, 161, 257)]
    assert counts == [128, 128, 160, 160, 192, 320]
    assert len({slots_of(count, MOST) for count in range(1, 32_769)}) == 1 + 8 * 4
