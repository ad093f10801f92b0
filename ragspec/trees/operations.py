"""Operations on draft trees, and the arrays that follow from their parents.

Parents come before children and -1 stands for the root, so one pass in order visits every node
after its parent. Lists are faster than arrays at the sizes of a draft.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError
from ragspec.trees.draft_tree import ROOT, SAMPLED_KINDS, DraftKind, DraftTree, Ints

Bools = NDArray[np.bool_]


def depths(parents: Ints) -> Ints:
    """Return the depth of every node, 1 for children of the root: i64 [N]."""
    below = [0] * (len(parents) + 1)  # the last one is the root's
    for node, parent in enumerate(parents.tolist()):
        below[node] = below[parent] + 1
    return np.array(below[:-1], dtype=np.int64)


def ancestors(parents: Ints) -> Bools:
    """Return bool [N, N]: entry [i, j] tells whether node j is node i or an ancestor of it."""
    n = len(parents)
    above = [0] * (n + 1)  # the bits of the nodes; the last one is the root's
    for node, parent in enumerate(parents.tolist()):
        above[node] = above[parent] | 1 << node
    size = -(-n // 8)
    bits = b"".join(path.to_bytes(size, "little") for path in above[:-1])
    rows = np.frombuffer(bits, np.uint8).reshape(n, size)
    return np.unpackbits(rows, axis=1, count=n, bitorder="little").view(np.bool_)


def children(parents: Ints) -> dict[int, list[int]]:
    """Return the children of every node with children, in order; the key -1 is the root."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        below.setdefault(parent, []).append(node)
    return below


def follow(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that tokens follow from the root down, up to the first mismatch."""
    below, at, path = children(tree.parents), ROOT, []
    for token in tokens:
        step = next((node for node in below.get(at, ()) if tree.tokens[node] == token), None)
        if step is None:
            break
        path.append(at := step)
    return tuple(path)


def paths(parents: Ints) -> list[tuple[int, ...]]:
    """Return the nodes from the root down to every leaf, root side first."""
    down: list[tuple[int, ...]] = []
    inner = set()
    for node, parent in enumerate(parents.tolist()):
        inner.add(parent)
        down.append((node,) if parent == ROOT else (*down[parent], node))
    return [path for node, path in enumerate(down) if node not in inner]


def select(tree: DraftTree, nodes: Sequence[int] | Ints) -> DraftTree:
    """Return the tree of some nodes in the given order.

    Raises:
        InputError: A node comes without its parent or before it, or a sampled draft would lose or
            move an earlier sibling of a selected node.
    """
    picked = np.asarray(nodes, dtype=np.int64)
    n = len(tree)
    if tree.kind in SAMPLED_KINDS:
        _check_first_draws(tree.parents, picked)
    renamed = np.full(n + 1, n, dtype=np.int64)
    renamed[picked] = np.arange(len(picked))
    renamed[n] = ROOT
    parents = renamed[tree.parents[picked]]
    if (parents >= np.arange(len(picked))).any():
        raise InputError("the nodes to keep leave out a parent, or list it after its child.")
    return replace(
        tree,
        tokens=tree.tokens[picked],
        parents=parents,
        accept_prob=tree.accept_prob[picked],
        source=tree.source[picked],
        origin=tree.origin[picked],
        q=None if tree.q is None else tree.q[np.concatenate(([0], picked + 1))],
    )


def promised(tree: DraftTree) -> list[float]:
    """Return, for each accepted node, the expected number of accepted nodes below it: [N]."""
    accept_prob, below = tree.accept_prob.tolist(), [0.0] * len(tree)
    for node, parent in reversed([*enumerate(tree.parents.tolist())]):
        if parent != ROOT and accept_prob[parent] > 0.0:
            below[parent] += (1.0 + below[node]) * accept_prob[node] / accept_prob[parent]
    return below


def keep_order(tree: DraftTree, accept_prob: Sequence[float] | None = None) -> list[int]:
    """Return all nodes in the order in which a budget keeps them; every prefix of it is a tree.

    Nodes are ordered by falling `accept_prob`, of equals the earlier one first. The output of
    `walk` does not depend on the tree, so any order is exact.

    Nodes of a sampled draft keep the order of their draws: the draft may only lose its end, as if
    fewer nodes had been drawn. Rejection rules rely on this invariant: *whether a node is kept
    depends on the past and on the draws before it, never on its own token or on later draws*. Each
    rule needs a part of it.
    - Chain rejection and block verification: no token of a chain may change its length.
    - Multi-step and without replacement: a child is a draw from q, or from q without the earlier
      siblings. A later sibling may be dropped. Without an earlier one, or as the best of several,
      the child would follow another distribution.
    - k-seq: the number of siblings is part of the rule, so none of their tokens may change it.
    The number of nodes to keep must also be set before the draw, because the `accept_prob` of a
    draft may reveal its tokens. Typical acceptance is not exact, but it gets the same trees.

    Args:
        accept_prob: Replaces that of the tree [N]. The value of a node is capped at its parent's.
    """
    if tree.kind in SAMPLED_KINDS:
        return list(range(len(tree)))
    bounded: list[float] = []
    claimed = tree.accept_prob.tolist() if accept_prob is None else accept_prob
    for parent, claim in zip(tree.parents.tolist(), claimed, strict=True):
        bounded.append(claim if parent == ROOT else min(claim, bounded[parent]))
    return sorted(range(len(tree)), key=bounded.__getitem__, reverse=True)


def keep_best(tree: DraftTree, budget: int, order: Sequence[int] | None = None) -> DraftTree:
    """Return the first `budget` nodes of `order`, by default `keep_order`, in the tree's order."""
    if len(tree) <= budget:
        return tree
    if budget <= 0:
        return DraftTree.empty(tree.kind)
    return select(tree, sorted((order or keep_order(tree))[:budget]))


def keep_path(tree: DraftTree) -> DraftTree:
    """Return the path with the largest sum of `accept_prob`.

    Of a sampled draft the first path is kept, so that no earlier sibling is lost.
    """
    every = paths(tree.parents)
    if len(every) <= 1:
        return tree
    if tree.kind in SAMPLED_KINDS:
        return select(tree, min(every))
    return select(tree, max(every, key=lambda path: float(tree.accept_prob[list(path)].sum())))


def limit_depth(tree: DraftTree, deepest: int) -> DraftTree:
    """Return the tree without the nodes below depth `deepest`."""
    if len(tree) <= deepest:
        return tree
    shallow = depths(tree.parents) <= deepest
    return tree if shallow.all() else select(tree, np.flatnonzero(shallow))


def merge(trees: Iterable[DraftTree]) -> DraftTree:
    """Return one tree with every path of all trees, shared prefixes once; see `overlay`.

    The probabilities of siblings are scaled by `share_out`.
    """
    trees = list(trees)
    merged = overlay([(tree, 1) for tree in trees])[0]
    return share_out(merged) if len(trees) > 1 else merged


def share_out(tree: DraftTree) -> DraftTree:
    """Return the tree with `accept_prob` scaled so that siblings do not exceed their parent.

    Only one token can come next. If several sources claim different tokens, each with certainty,
    their probabilities become shares of one.
    """
    parents = tree.parents.tolist()
    claimed = [*tree.accept_prob.tolist(), 1.0]  # in all lists the last entry is the root's
    totals = [0.0] * len(claimed)  # of the children of each node
    for node, parent in enumerate(parents):
        totals[parent] += claimed[node]
    if all(total <= claim for total, claim in zip(totals, claimed, strict=True)):
        return tree
    shares = [0.0] * len(tree) + [1.0]
    for node, parent in enumerate(parents):
        if (most := max(totals[parent], claimed[parent])) > 0.0:
            shares[node] = claimed[node] / most * shares[parent]
    return replace(tree, accept_prob=np.asarray(shares[:-1], dtype=np.float32))


def overlay(trees: Sequence[tuple[DraftTree, int]]) -> tuple[DraftTree, list[int]]:
    """Return one tree with every path of all trees, and per node the bits of trees that have it.

    Given its parent, a node has the largest probability that any tree claims. Its source and origin
    are those of the first tree that has it. The tree is deterministic if all trees are, else
    coupled. `q` is dropped, because a sampled tree no longer follows its distribution.

    Args:
        trees: Each tree with the bit that stands for it.
    """
    if len(trees) == 1 and trees[0][0].kind not in SAMPLED_KINDS:
        tree, bit = trees[0]
        return replace(tree, q=None), [bit] * len(tree)
    at: dict[tuple[int, int], int] = {}  # nodes by parent and token, in their order
    chances, offers = list[float](), list[int]()  # of acceptance, given the parent; bits of trees
    source, origin, sources = list[int](), list[list[int]](), dict[str, int]()
    for tree, bit in trees:
        names = [sources.setdefault(name, len(sources)) for name in tree.sources]
        claimed, place = tree.accept_prob.tolist(), list[int]()
        for token, parent, claim, name, text in zip(
            tree.tokens.tolist(), tree.parents.tolist(), claimed,
            tree.source.tolist(), tree.origin.tolist(), strict=True,
        ):  # fmt: skip
            above = ROOT if parent == ROOT else place[parent]
            if parent != ROOT:
                claim = min(claim / claimed[parent], 1.0) if claimed[parent] > 0.0 else 0.0
            node = at.setdefault((above, token), len(at))
            place.append(node)
            if node < len(chances):
                chances[node] = max(chances[node], claim)
                offers[node] |= bit
                continue
            chances.append(claim)
            offers.append(bit)
            source.append(names[name])
            origin.append(text)
    accept_prob: list[float] = []
    for (parent, _), chance in zip(at, chances, strict=True):
        accept_prob.append(chance if parent == ROOT else chance * accept_prob[parent])
    plain = all(tree.kind is DraftKind.DETERMINISTIC for tree, _ in trees)
    return DraftTree(
        tokens=np.asarray([token for _, token in at], dtype=np.int64),
        parents=np.asarray([parent for parent, _ in at], dtype=np.int64),
        accept_prob=np.asarray(accept_prob, dtype=np.float32),
        source=np.asarray(source, dtype=np.int64),
        origin=np.asarray(origin, dtype=np.int64).reshape(len(at), 2),
        sources=tuple(sources) or ("none",),
        kind=DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED,
    ), offers


def check(tree: DraftTree, vocab_size: int | None = None) -> None:
    """Raise InputError if the tree breaks an invariant of `DraftTree`, naming the invariant.

    Args:
        vocab_size: If set, every token must be in 0 .. vocab_size - 1.
    """
    if tree is DraftTree.empty(tree.kind):
        return  # the most common case
    _check_shapes(tree)
    if not (n := len(tree)):
        return
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    accept_prob = tree.accept_prob.tolist()
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise InputError(f"node {node} has parent {parent}; expected -1 or an earlier node.")
    limit = int(np.iinfo(np.int64).max) if vocab_size is None else vocab_size
    if min(tokens) < 0 or max(tokens) >= limit:
        node = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
        raise InputError(f"node {node} has token {tokens[node]}; expected 0 .. {limit - 1}.")
    source = tree.source.tolist()
    if min(source) < 0 or max(source) >= len(tree.sources):
        raise InputError(f"source: expected indices into the {len(tree.sources)} sources.")
    if not (isfinite(sum(accept_prob)) and min(accept_prob) >= 0.0):
        raise InputError("accept_prob: expected probabilities, got a negative or non-finite one.")
    twins = n - len(set(zip(parents, tokens, strict=True)))
    if twins and tree.kind is not DraftKind.SAMPLED:
        raise InputError(f"{twins} nodes repeat a sibling's token; expected distinct siblings.")


def _check_first_draws(parents: Ints, picked: Ints) -> None:
    """Raise InputError if a node is picked without an earlier sibling, or out of order."""
    remaining = set(picked.tolist())
    bare: set[int] = set()  # parents that lost a child
    for node, parent in enumerate(parents.tolist()):
        if node not in remaining:
            bare.add(parent)
        elif parent in bare:
            raise InputError(
                f"node {node} of a sampled draft would stay without a sibling that was drawn "
                "before it; drop later siblings first, or the text follows another distribution."
            )
    if (np.diff(picked) <= 0).any():
        raise InputError("the nodes of a sampled draft would be moved; expected their own order.")


def _check_shapes(tree: DraftTree) -> None:
    n = len(tree)
    for name in ("tokens", "parents", "accept_prob", "source", "origin"):
        values, shape = getattr(tree, name), (n, 2) if name == "origin" else (n,)
        if values.shape != shape:
            raise InputError(f"{name}: got shape {values.shape}, expected {shape}, a row per node.")
        kinds, expected = ("iuf", "numbers") if name == "accept_prob" else ("iu", "whole numbers")
        if values.dtype.kind not in kinds:
            raise InputError(f"{name}: got {values.dtype} values, expected {expected}.")
    if not all(isinstance(name, str) for name in tree.sources):
        raise InputError(f"sources: got {tree.sources!r}, expected names.")
    if tree.q is not None and tree.q.shape[0] != n + 1:
        raise InputError(f"q: got {tree.q.shape[0]} rows, expected {n + 1} (root and nodes).")
