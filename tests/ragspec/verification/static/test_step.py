"""Steps under `torch.compile(fullgraph=True)`: one graph a shape, no breaks, same addresses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ragspec.models.supported import AttentionWindow
from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static
from ragspec.verification.static.layout import (
    LEAST_SLOTS,
    Counters,
    Layout,
    ancestor_bits,
    lay_out,
    plain_mask,
    slots_of,
    walk,
    windowed,
)
from tests.ragspec.verification.static.test_session import check_logits, distribution
from tests.support import architectures
from tests.support.calls import noted
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
    counters.clear()
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
        assert counters["graph_break"] == {}
        assert counters["stats"]["unique_graphs"] == len(other._arena.steps) <= 4
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


VOCAB, ROWS = 50, 3
PENALISED = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def text_distributions() -> tuple[BatchDistribution, list[tuple[int, TokenDistribution | None]]]:
    """Return distributions, and a list of every row that is set."""
    distributions, calls = BatchDistribution(ROWS, VOCAB, "cpu", 100), list[Any]()
    noting = noted(distributions.set, calls, lambda row, distribution, *_: (row, distribution))
    distributions.set = noting  # type: ignore[method-assign]
    return distributions, calls


def chosen(
    distributions: BatchDistribution, logits: torch.Tensor, texts: Sequence[Sequence[int]]
) -> list[int]:
    """Return the token that each row's distribution selects after its text."""
    roots = torch.tensor([[text[-1]] for text in texts])
    indices = torch.tensor([[len(text) - 2] for text in texts])
    see = torch.ones(len(texts), 1, 1, dtype=torch.bool)
    tokens, _ = distributions.choose(logits, indices, roots, see)
    return [int(token) for token in tokens[:, 0]]


def test_penalties_count_the_tokens_of_growing_texts() -> None:
    message, calls = text_distributions()
    distributions = [distribution(row, **PENALISED) for row in range(ROWS)]
    texts = [[1, 2, 3], [4, 4], [5, 6, 7, 8]]
    first: list[list[int]] = [[], [], []]
    grown: list[list[list[int]]] = [[[9], [1, 1, 2], []], [[10, 9, 9, 9], [], [5]], [[], [3], [3]]]
    generator = torch.Generator().manual_seed(0)
    differ = 0
    for new in [first, *grown]:
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        shape = message.notify(dict(enumerate(zip(distributions, texts, strict=True))))
        message.grow(torch.from_numpy(message.fresh))  # as the step does
        assert shape == message.shape and shape.penalties.reads_texts
        logits = torch.randn(ROWS, 1, VOCAB, generator=generator, dtype=torch.float64)
        logits[:, :, :12] += 1.5  # what the texts hold would be taken, but for the penalties
        again = BatchDistribution(ROWS, VOCAB, "cpu", 100)
        for row in range(ROWS):
            again.set(row, distributions[row], texts[row])
        result = chosen(message, logits, texts)
        assert result == chosen(again, logits, texts)
        differ += result != logits[:, 0].argmax(-1).tolist()
        held, known = (each._penalties._held for each in (message, again))  # type: ignore[union-attr]
        assert torch.equal(held[..., :VOCAB], known[..., :VOCAB])
    assert [row for row, _ in calls[:ROWS]] == [0, 1, 2] and len(calls) == ROWS, "set once"
    assert differ


N, SLOTS = 16, 40


def laid(seed: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, list[int], Layout]:
    """Return parents i64 [B, n] with pads, lengths i64 [B], queries used, and their layout."""
    rng = np.random.default_rng(seed)
    table = np.tile(np.arange(N), (rows, 1))
    counts = [1, N, *rng.integers(1, N + 1, rows - 2).tolist()]
    for row, count in enumerate(counts):
        table[row, 1:count] = [int(rng.integers(0, node)) for node in range(1, count)]
    parents, lengths = map(torch.from_numpy, (table, rng.integers(0, SLOTS - N, rows)))
    return parents, lengths, counts, layout_of(parents, lengths)


def line(parents: torch.Tensor, query: int) -> list[int]:
    """Return a query and what is above it, the topmost first."""
    results = [query]
    while (above := int(parents[results[0]])) != results[0]:
        results.insert(0, above)
    return results


def layout_counters(n: int) -> Counters:
    return Counters.of(n, SLOTS, torch.float64, torch.device("cpu"))


def layout_of(parents: torch.Tensor, lengths: torch.Tensor) -> Layout:
    above = torch.from_numpy(ancestor_bits(parents.numpy()))
    return lay_out(above, lengths - 1, layout_counters(parents.shape[1]), torch.zeros_like(parents))


@pytest.mark.parametrize("seed", range(4))
def test_ancestors_depths_and_places_are_those_of_the_trees(seed: int) -> None:
    parents, lengths, _, layout = laid(seed)
    for row, current in enumerate(parents):
        length = int(lengths[row])
        for query in range(N):
            above = line(current, query)
            assert layout.see[row, query].nonzero().flatten().tolist() == sorted(above)
            assert layout.level[row, query] == len(above)
            assert layout.positions[row, query] == length + len(above) - 1
            assert layout.columns[row, query] == length + query


def test_the_longest_chain_is_visible_whole() -> None:
    layout = layout_of(torch.arange(-1, 63).clamp(min=0)[None], torch.tensor([5]))
    assert torch.equal(layout.see[0], torch.ones(64, 64).tril().bool())
    assert layout.positions[0].tolist() == list(range(5, 69))


@pytest.mark.parametrize(
    "window", [AttentionWindow(), AttentionWindow(size=5), AttentionWindow(chunk=6)]
)
def test_queries_attend_to_the_text_and_their_ancestors(window: AttentionWindow) -> None:
    parents, lengths, _, layout = laid(7)
    plain = plain_mask(layout, lengths - 1, layout_counters(N))
    mask = windowed(plain, layout, layout_counters(N), window)
    assert mask.dtype == torch.float64 and set(mask.flatten().tolist()) == {0.0, -np.inf}
    visible = mask == 0
    assert visible.shape == (len(parents), N, SLOTS)
    for row, current in enumerate(parents):
        length = int(lengths[row])
        for query in range(N):
            above = line(current, query)
            position = length + len(above) - 1
            slots = {place: place for place in range(length)}  # slot by position in the text
            slots |= {length + depth: length + at for depth, at in enumerate(above)}
            expected = {
                slot
                for place, slot in slots.items()
                if (window.size is None or position - place < window.size)
                and (window.chunk is None or position // window.chunk == place // window.chunk)
            }
            assert set(visible[row, query].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_accepts_what_the_host_does(seed: int) -> None:
    """Few tokens, so that paths are long; siblings differ."""
    rng = np.random.default_rng(seed)
    parents, _, counts, layout = laid(seed)
    tokens = torch.from_numpy(rng.integers(0, 3, parents.shape))
    chosen = torch.from_numpy(rng.integers(0, 3, parents.shape))
    for row, count in enumerate(counts):
        taken: set[tuple[int, int]] = set()
        for query in range(1, count):  # equal siblings get tokens that are never chosen
            key = int(parents[row, query]), int(tokens[row, query])
            if key in taken:
                tokens[row, query] = 100 + query
            taken.add(key)
    selected = walk(layout, tokens, parents, chosen)
    for row, count in enumerate(counts):
        nodes = tokens[row, 1:count].tolist(), (parents[row, 1:count] - 1).tolist()
        below = walked(DraftTree.build(*nodes, "test"), chosen[row].tolist())
        path = [0, *(1 + node for node in below)]
        assert selected[row].nonzero().flatten().tolist() == path


def test_of_equal_siblings_the_longer_path_counts() -> None:
    parents = torch.tensor([[0, 0, 0, 2, 4]])
    tokens = torch.tensor([[9, 7, 7, 5, 5]])  # the last is a pad with a token that is chosen
    chosen = torch.tensor([[7, 1, 5, 1, 5]])
    selected = walk(layout_of(parents, torch.tensor([3])), tokens, parents, chosen)
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
