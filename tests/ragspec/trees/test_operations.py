import math
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.trees.draft_tree import ROOT, SAMPLED_KINDS, DraftKind, DraftTree
from ragspec.trees.operations import (
    ancestors,
    check,
    children,
    depths,
    keep_best,
    keep_order,
    keep_path,
    limit_depth,
    merge,
    paths,
    promised,
    select,
)
from tests.support.distributions import texts

VOCAB = 24


@st.composite
def trees(
    draw: st.DrawFn, source: str = "a", most: int = 12, least: int = 0, vocab: int = VOCAB
) -> DraftTree:
    """A well-formed tree whose reach never grows downwards; the offset of a node is its number."""
    parents: list[int] = []
    tokens: list[int] = []
    accept_prob: list[float] = []
    for _ in range(draw(st.integers(least, most))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        kin = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        if others := sorted(set(range(vocab)) - kin):
            tokens.append(draw(st.sampled_from(others)))
            above = 1.0 if parent == ROOT else accept_prob[parent]
            accept_prob.append(above * draw(st.integers(1, 20)) / 20)
            parents.append(parent)
    origin = [(0, i) for i in range(len(tokens))]
    return DraftTree.build(tokens, parents, source, accept_prob=accept_prob, origin=origin)


def climb(tree: DraftTree, node: int) -> list[int]:
    """The nodes from `node` up to the root, one by one."""
    up = []
    while node != ROOT:
        up.append(node)
        node = int(tree.parents[node])
    return up


def spelled(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """The node at the end of every token path."""
    return {path: node for node, path in texts(tree).items() if path}


@pytest.mark.parametrize("n", [*range(21), 63, 64, 65, 150])
def test_ancestors_and_depths_are_those_of_a_walk_to_the_root(n: int) -> None:
    for seed in range(5):
        dice = random.Random(seed)
        parents = [dice.randrange(-1, node) for node in range(n)]
        tree, expected = DraftTree.build(range(n), parents, "a"), np.zeros((n, n), dtype=bool)
        for node in range(n):
            expected[node, climb(tree, node)] = True
        assert ancestors(tree.parents).dtype == np.bool_
        assert np.array_equal(ancestors(tree.parents), expected)
        assert depths(tree.parents).tolist() == expected.sum(axis=1).tolist()


@given(trees())
def test_children_and_paths_cover_every_node(tree: DraftTree) -> None:
    below = children(tree.parents)
    assert sorted(node for kin in below.values() for node in kin) == list(range(len(tree)))
    for parent, kin in below.items():
        assert all(tree.parents[node] == parent for node in kin)
    leaves = [node for node in range(len(tree)) if node not in below]
    assert [path[-1] for path in paths(tree.parents)] == leaves
    assert all(list(path[::-1]) == climb(tree, path[-1]) for path in paths(tree.parents))


def conditional(tree: DraftTree, node: int) -> float:
    parent = int(tree.parents[node])
    return float(tree.accept_prob[node] / (tree.accept_prob[parent] if parent >= 0 else 1.0))


@given(trees("a"), trees("b"), trees("a"))
def test_merge_holds_every_path_once_with_the_best_accept_prob_and_first_source(
    one: DraftTree, two: DraftTree, three: DraftTree
) -> None:
    merged = merge([one, two, three])
    check(merged, VOCAB)
    result = spelled(merged)
    held = [spelled(tree) for tree in (one, two, three)]
    assert len(result) == len(merged)
    assert set(result) == set().union(*held)
    chances: dict[tuple[int, ...], float] = {}
    for path, node in result.items():
        offers = [
            (tree, paths_of[path])
            for tree, paths_of in zip((one, two, three), held, strict=True)
            if path in paths_of
        ]
        first, at = offers[0]
        chances[path] = max(conditional(tree, i) for tree, i in offers)
        assert merged.sources[merged.source[node]] == first.sources[0]
        assert merged.origin[node].tolist() == first.origin[at].tolist()
    for path, node in result.items():
        above = merged.parents[node]
        siblings = math.fsum(chances[kin] for kin in chances if kin[:-1] == path[:-1])
        expected = (
            chances[path] / max(1.0, siblings) * (merged.accept_prob[above] if above >= 0 else 1.0)
        )
        assert merged.accept_prob[node] == pytest.approx(expected, abs=1e-6)


def test_sources_that_name_different_tokens_share_what_they_claim() -> None:
    """One of 0.9 and one of 0.6 cannot both come true: together they are taken to be certain."""
    trees = [
        DraftTree.chain([token], "a", accept_prob=[claim]) for token, claim in ((1, 0.9), (2, 0.6))
    ]
    assert merge(trees).accept_prob.tolist() == pytest.approx([0.6, 0.4])
    assert merge([trees[0], trees[0]]).accept_prob.tolist() == pytest.approx([0.9])


def test_merge_of_nothing_is_empty_and_of_mixed_kinds_is_coupled() -> None:
    assert len(merge([])) == 0
    plain = DraftTree.chain([1, 2], "a")
    sample = DraftTree.chain([1, 3], "m", kind=DraftKind.COUPLED)
    assert merge([plain, plain]).kind is DraftKind.DETERMINISTIC
    assert merge([plain, sample]).kind is DraftKind.COUPLED


@given(trees(most=16), st.integers(0, 17))
def test_keep_best_keeps_the_tree_of_largest_accept_prob_sum(tree: DraftTree, budget: int) -> None:
    accepted = keep_best(tree, budget)
    check(accepted, VOCAB)
    assert len(accepted) == min(budget, len(tree))
    assert accepted.origin[:, 1].tolist() == sorted(keep_order(tree)[:budget])
    whole, part = spelled(tree), spelled(accepted)
    assert all(tree.accept_prob[whole[path]] == accepted.accept_prob[part[path]] for path in part)
    best = np.sort(tree.accept_prob)[::-1][:budget].sum()
    assert accepted.accept_prob.sum() == pytest.approx(best)


def test_keep_best_caps_a_child_at_its_parent() -> None:
    tree = DraftTree.build([1, 2, 3], [-1, 0, -1], "a", accept_prob=[0.2, 0.9, 0.5])
    assert keep_best(tree, 1).tokens.tolist() == [3]
    assert keep_best(tree, 2).tokens.tolist() == [1, 3]


sampled_kinds = pytest.mark.parametrize("kind", sorted(SAMPLED_KINDS))


@sampled_kinds
@given(tree=trees(most=12), size=st.integers(0, 13))
def test_keep_best_keeps_the_first_draws_of_a_sampled_draft(
    kind: DraftKind, tree: DraftTree, size: int
) -> None:
    sample = replace(tree, kind=kind)
    assert keep_order(sample) == keep_order(sample, [0.0] * len(tree)) == list(range(len(tree)))
    assert keep_best(sample, size).tokens.tolist() == tree.tokens[:size].tolist()
    assert keep_best(sample, size).kind is kind


@sampled_kinds
@given(tree=trees(most=12))
def test_keep_path_keeps_the_first_path_of_a_sampled_draft(
    kind: DraftKind, tree: DraftTree
) -> None:
    first = keep_path(replace(tree, kind=kind))  # select would refuse to lose an earlier sibling
    node, expected = ROOT, []
    while below := children(tree.parents).get(node):
        node = below[0]
        expected.append(int(tree.tokens[node]))
    assert first.tokens.tolist() == expected


@sampled_kinds
def test_select_refuses_to_lose_or_move_an_earlier_draw(kind: DraftKind) -> None:
    sample = DraftTree.build([1, 2, 3, 4], [-1, -1, 0, 0], "a", kind=kind)
    assert select(sample, [0, 2]).tokens.tolist() == [1, 3]
    assert select(sample, []).tokens.tolist() == []
    for lost in ([1], [0, 1, 3]):
        with pytest.raises(InputError, match="without a sibling that was drawn before"):
            select(sample, lost)
    with pytest.raises(InputError, match="expected their own order"):
        select(sample, [1, 0])
    assert select(replace(sample, kind=DraftKind.COUPLED), [1, 0]).tokens.tolist() == [2, 1]


@given(trees(most=16), st.integers(0, 6))
def test_limit_depth_drops_deeper_nodes_alone(tree: DraftTree, deepest: int) -> None:
    expected = {path for path in spelled(tree) if len(path) <= deepest}
    assert set(spelled(limit_depth(tree, deepest))) == expected


def test_select_keeps_the_rows_of_q_and_refuses_a_lost_parent() -> None:
    q = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 5)
    tree = DraftTree.build([1, 2, 3], [-1, 0, -1], "a", q=q)
    picked = select(tree, [0, 2]).q
    assert picked is not None
    assert picked[:, 0].tolist() == [0.0, 1.0, 3.0]
    with pytest.raises(InputError, match="leave out a parent"):
        select(tree, [1, 2])
    with pytest.raises(InputError, match="after its child"):
        select(tree, [1, 0])


GOOD = DraftTree.build([1, 2, 2], [-1, 0, -1], "a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, parents=np.array([-1, 1, -1])), "node 1 has parent 1"),
        (replace(GOOD, parents=np.array([-1, 2, -1])), "node 1 has parent 2"),
        (replace(GOOD, parents=np.array([-2, 0, -1])), "node 0 has parent -2"),
        (replace(GOOD, parents=np.array([-1, 0])), "parents: got shape"),
        (replace(GOOD, origin=np.zeros((3, 1), dtype=np.int64)), "origin"),
        (replace(GOOD, tokens=np.array([1, 2, 5])), "node 2 has token 5"),
        (replace(GOOD, tokens=np.array([1, -2, 2])), "node 1 has token -2"),
        (replace(GOOD, tokens=np.array([2, 2, 2])), "1 nodes repeat"),
        (replace(GOOD, source=np.array([0, 1, 0])), "source"),
        (replace(GOOD, accept_prob=np.array([1, np.nan, 1], dtype=np.float32)), "accept_prob"),
        (replace(GOOD, q=torch.zeros(3, 5)), "q: got 3 rows, expected 4"),
        (replace(GOOD, tokens=GOOD.tokens.astype(float)), "tokens: got float64 values"),
        (replace(GOOD, parents=GOOD.parents.astype(float)), "parents: got float64 values"),
        (replace(GOOD, source=GOOD.source.astype(float)), "source: got float64 values"),
        (
            replace(GOOD, accept_prob=GOOD.accept_prob.astype(complex)),
            "accept_prob: got complex128 values",
        ),
        (replace(GOOD, origin=np.full((3, 2), None)), "origin: got object values"),
        (replace(GOOD, sources=cast(Any, ([],))), "sources: got"),
    ],
)
def test_check_names_the_broken_invariant(bad: DraftTree, message: str) -> None:
    check(GOOD, 5)
    with pytest.raises(InputError, match=message):
        check(bad, 5)


def test_check_lets_sampled_siblings_repeat() -> None:
    check(replace(GOOD, tokens=np.array([2, 2, 2]), kind=DraftKind.SAMPLED), 5)


def test_promised_sums_what_is_expected_below() -> None:
    tree = DraftTree.build([1, 2, 3, 4], [-1, 0, 0, 1], "a", accept_prob=[0.5, 0.25, 0.1, 0.125])
    assert promised(tree) == pytest.approx([0.5 * 1.5 + 0.2, 0.5, 0.0, 0.0])
    assert promised(DraftTree.build([1, 2], [-1, 0], "a", accept_prob=[0.0, 0.0])) == [0.0, 0.0]


@pytest.mark.parametrize("kind", list(DraftKind))
def test_build_without_nodes_returns_the_empty_tree_of_the_kind(kind: DraftKind) -> None:
    tree = DraftTree.build([], [], "a", accept_prob=[], origin=[], kind=kind)
    assert tree is DraftTree.empty(kind) and tree.kind is kind
    check(tree, VOCAB)
    assert DraftTree.build([], [], "a", kind=kind, q=torch.zeros(1, VOCAB)).q is not None
