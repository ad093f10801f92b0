"""Neighbours and clusters of codes against brute force, and errors."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual.rules import codebook as module
from ragspec.visual.rules.codebook import CodeNeighbours, CodePartition, compared_rows
from ragspec.visual.rules.lantern import Lantern
from tests.support.codes import broken, codebook


def brute(rows: torch.Tensor, k: int) -> list[list[int]]:
    """Return the k nearest rows by L2 distance, worked out pair by pair."""
    results = []
    for i in range(len(rows)):
        distance = [(float((rows[i] - rows[j]).norm()), j) for j in range(len(rows)) if j != i]
        results.append([j for _, j in sorted(distance)[:k]])
    return results


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1)


@pytest.mark.parametrize("k", [1, 7, 39])
def test_rows_are_the_nearest_by_distance_on_the_unit_sphere(k: int) -> None:
    codes = codebook(40)
    table = CodeNeighbours.build(codes, k)
    # The published repository compares raw rows although codes are looked up normalised.
    assert table.rows.tolist() == brute(unit(codes), k) != brute(codes.double(), k)
    assert table.rows.dtype == np.int32 and table.rows.shape == (40, k)
    assert table.k == k
    assert not (table.rows == np.arange(40)[:, None]).any(), "a code is not its own neighbour"


def test_raw_code_books_are_compared_by_plain_distance() -> None:
    codes = codebook(40).double() * torch.linspace(0.0, 3.0, 40)[:, None].double()
    table = CodeNeighbours.build(codes, 5, normalised=False)
    assert table.rows.tolist() == brute(codes, 5) != brute(unit(codes), 5)
    clusters = CodePartition.build(codes, 6, normalised=False).clusters
    centres = torch.stack([codes[clusters == number].mean(0) for number in range(6)])
    assert torch.cdist(codes, centres).argmin(1).tolist() == clusters.tolist()


def test_marks_are_neighbours_of_themselves_alone() -> None:
    codes = codebook(12)
    table = CodeNeighbours.build(codes, 3)
    marked = CodeNeighbours.build(codes, 3, marks=2)
    assert marked.rows[:12].tolist() == table.rows.tolist() and len(marked.rows) == 14
    assert marked.rows[12:].tolist() == [[12] * 3, [13] * 3]
    partition, with_marks = (CodePartition.build(codes, 4, marks=marks) for marks in (0, 2))
    assert all(map(np.array_equal, with_marks.mates, partition.mates))
    assert [len(each) for each in with_marks.mates[12:]] == [0, 0]


def test_the_code_itself_is_left_out_by_its_id_not_by_its_place() -> None:
    codes = codebook(12)
    codes[7] = codes[3]  # a twin is at distance zero too
    table = CodeNeighbours.build(codes, 4)
    assert table.rows[3, 0] == 7 and table.rows[7, 0] == 3
    lax = broken(module, "near[np.arange(len(near)), ids] = -np.inf", "pass").CodeNeighbours
    assert (lax.build(codes, 4).rows == np.arange(12)[:, None]).any()


def test_ties_go_to_the_lower_id() -> None:
    codes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 2.0], [-1.0, 0.0]])
    assert CodeNeighbours.build(codes, 3).rows[0].tolist() == [1, 2, 3]
    assert CodeNeighbours.build(codes, 1).rows[0].tolist() == [1]


@pytest.mark.parametrize(
    ("build", "inputs", "message"),
    [
        # The published repository stores uint16, on which its greedy path dies later.
        (CodeNeighbours, (np.ones((3, 1), np.uint16),), r"expected int32 \[V, k\]"),
        (CodeNeighbours, (np.ones((3, 1), np.int64),), r"expected int32 \[V, k\]"),
        (CodeNeighbours, (np.array([[1], [2], [3]], np.int32),), "ids within it"),
        *(
            (CodeNeighbours.build, (codebook(30), k), "from 1 to 29")
            for k in (0, 30, -1, 2.5, "3", True)
        ),
        (Lantern, (CodeNeighbours.build(codebook(30), 20), 21), r"k=21; expected .* from 0 to 20"),
        (CodeNeighbours.build, (torch.ones(4), 1), r"expected \[V, d\]"),
        (compared_rows, (torch.zeros(3, 2),), "cannot be compared"),
        (compared_rows, (torch.tensor([[1.0, torch.nan], [0, 1]]),), "cannot be compared"),
        (CodePartition, (np.zeros(4, np.int64),), "expected int32"),
        (CodePartition, (np.zeros(4, np.int32), codebook(5)), "code-book that was partitioned"),
        (CodePartition.build, (codebook(8), 0), "partition=0; expected"),
    ],
)
def test_invalid_tables_are_refused(build: Any, inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(*inputs)


def test_a_partition_keeps_near_codes_together() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(4)[[0, 1, 2, 3] * 10]
    codes = (centres + 0.05 * rng.normal(size=centres.shape)) * rng.uniform(0.5, 3, (40, 1))
    results = (CodePartition.build(codes, 4, seed=seed) for seed in range(1, 12))
    result = next(each for each in results if len(set(each.clusters.tolist())) == 4)
    assert len(result.clusters) == 40
    same = result.clusters[:, None] == result.clusters[None]
    true = np.arange(40) % 4
    assert (same[true[:, None] == true[None]]).all()


@pytest.mark.parametrize("normalised", [True, False])
def test_mates_are_the_rest_of_the_cluster_nearest_first(normalised: bool) -> None:
    codes = codebook(30)
    partition = CodePartition.build(codes, 5, normalised=normalised)
    near = brute(unit(codes) if normalised else codes.double(), 29)
    for code, mates in enumerate(partition.mates):
        inside = [j for j in near[code] if partition.clusters[j] == partition.clusters[code]]
        assert mates.tolist() == inside
    bare = CodePartition(partition.clusters)
    assert [sorted(m.tolist()) for m in partition.mates] == [m.tolist() for m in bare.mates]


def test_a_large_book_is_not_compared_with_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a build stays far below V x V, and blocks change no row."""
    book = torch.randn(1500, 4, generator=torch.Generator().manual_seed(1))
    whole, clusters = CodeNeighbours.build(book, 9), CodePartition.build(book, 40)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1 << 18)
    tracemalloc.start()
    small = CodeNeighbours.build(book, 9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 1500**2 / 10
    assert np.array_equal(small.rows, whole.rows) and small.rows.dtype == np.int32
    assert np.array_equal(CodePartition.build(book, 40).clusters, clusters.clusters)
