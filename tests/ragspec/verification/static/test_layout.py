"""Trees laid out by tensors alone against what the host works out, node by node."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragspec.models.supported import Window
from ragspec.verification.static.layout import (
    LEAST_SLOTS,
    MOST_QUERIES,
    QUERIES,
    Counters,
    Layout,
    accepted_first,
    ancestor_bits,
    lay_out,
    plain_mask,
    queries_of,
    rows_of,
    slots_of,
    walk,
    windowed,
)

N, SLOTS = 16, 40


def random_rows(seed: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return parents i64 [B, n] with pads behind, committed lengths i64 [B], and queries used."""
    rng = np.random.default_rng(seed)
    parents = np.tile(np.arange(N), (rows, 1))
    counts = [1, N, *rng.integers(1, N + 1, rows - 2).tolist()]
    for row, count in enumerate(counts):
        parents[row, 1:count] = [int(rng.integers(0, node)) for node in range(1, count)]
    lengths = torch.from_numpy(rng.integers(0, SLOTS - N, rows))
    return torch.from_numpy(parents), lengths, counts


def line(parents: torch.Tensor, query: int) -> list[int]:
    """Return a query and what is above it, the topmost first."""
    results = [query]
    while (above := int(parents[results[0]])) != results[0]:
        results.insert(0, above)
    return results


def laid(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int], Layout]:
    parents, lengths, counts = random_rows(seed)
    return parents, lengths, counts, layout_of(parents, lengths)


def counters(n: int) -> Counters:
    return Counters.of(n, SLOTS, torch.float64, torch.device("cpu"))


def layout_of(parents: torch.Tensor, lengths: torch.Tensor) -> Layout:
    above = torch.from_numpy(ancestor_bits(parents.numpy()))
    return lay_out(above, lengths - 1, counters(parents.shape[1]), torch.zeros_like(parents))


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
    parents = torch.arange(-1, 63).clamp(min=0)[None]
    layout = layout_of(parents, torch.tensor([5]))
    assert torch.equal(layout.see[0], torch.ones(64, 64).tril().bool())
    assert layout.positions[0].tolist() == list(range(5, 69))


@pytest.mark.parametrize("window", [Window(), Window(size=5), Window(chunk=6)])
def test_queries_attend_to_the_text_and_their_its_path(window: Window) -> None:
    parents, lengths, _, layout = laid(7)
    plain = plain_mask(layout, lengths - 1, counters(N))
    mask = windowed(plain, layout, counters(N), window)
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
        for query in range(1, count):  # equal siblings get tokens that nobody chooses
            key = int(parents[row, query]), int(tokens[row, query])
            if key in taken:
                tokens[row, query] = 100 + query
            taken.add(key)
    selected = walk(layout, tokens, parents, chosen)
    for row, count in enumerate(counts):
        path, at = [0], 0
        while True:
            current = int(chosen[row, at])
            results = [
                query
                for query in range(1, count)
                if parents[row, query] == at and tokens[row, query] == current
            ]
            if not results:
                break
            at = results[0]
            path.append(at)
        assert selected[row].nonzero().flatten().tolist() == path


def test_of_equal_siblings_the_longer_path_counts() -> None:
    parents = torch.tensor([[0, 0, 0, 2, 4]])
    tokens = torch.tensor([[9, 7, 7, 5, 5]])  # the last is a pad with a token that is chosen
    chosen = torch.tensor([[7, 1, 5, 1, 5]])
    selected = walk(layout_of(parents, torch.tensor([3])), tokens, parents, chosen)
    assert selected.tolist() == [[True, False, True, True, False]]


def test_what_is_preserved_comes_first_in_its_order() -> None:
    selected = torch.tensor([[True, False, True, False], [True, True, True, True]])
    assert accepted_first(selected).tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]


# --- the shapes that steps are made for ---

MOST = 1 << 20


def test_queries_are_the_least_of_six_sizes() -> None:
    assert [queries_of(n) for n in (1, 2, 4, 5, 8, 9, 16, 17, 33, 64)] == [
        *(1, 4, 4, 8, 8, 16, 16, 32, 64, 64)
    ]
    assert QUERIES[0] == 1 and MOST_QUERIES == 64
    with pytest.raises(StopIteration):
        queries_of(MOST_QUERIES + 1)


def test_rows_are_powers_of_two_within_the_buffers() -> None:
    assert [rows_of(n, 16) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]
    assert rows_of(5, 6) == 6


def test_slots_are_at_most_a_fourth_too_many() -> None:
    for count in [*range(1, 3000), 32_768, 32_769, 100_001]:
        slots = slots_of(count, MOST)
        assert slots >= count
        assert slots == LEAST_SLOTS or slots * 4 <= count * 5
    assert [slots_of(n, MOST) for n in (1, 128, 129, 160, 161, 257)] == [
        128,
        128,
        160,
        160,
        192,
        320,
    ]


def test_shapes_of_all_lengths_are_few() -> None:
    assert len({slots_of(count, MOST) for count in range(1, 32_769)}) == 1 + 8 * 4


def test_slots_end_with_the_buffers() -> None:
    assert slots_of(100, 64) == 64
    assert slots_of(1000, 1008) == 1008
