"""What can be derived from a draft tree, and operations on trees.

Parents come before children and -1 stands for the root, so one pass in order visits every node
after its parent. Ancestors and depths are found by pointer doubling: log2(D) rounds over arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import InputError
from ragspec.trees.draft_tree import ROOT, SAMPLED_KINDS, DraftKind, DraftTree, Ints

Bools = NDArray[np.bool_]
_WORD = 64


def depths(parents: Ints) -> Ints:
    """Return the depth of every node, 1 for children of the root: i64 [N]."""
    jump = _padded(parents)
    n = len(parents)
    depth = np.ones(n + 1, dtype=np.int64)
    depth[n] = 0
    while (jump[:n] < n).any():
        depth += depth[jump]
        jump = jump[jump]
    return depth[:n]


def ancestors(parents: Ints) -> Bools:
    """Return a[i, j]: node j is node i or lies on its path from the root: bool [N, N]."""
    n = len(parents)
    if n <= _WORD:
        return _few_ancestors(parents.tolist())
    jump = _padded(parents)
    above = np.eye(n + 1, n, dtype=np.bool_)
    while (jump[:n] < n).any():
        above |= above[jump]
        jump = jump[jump]
    return above[:n]


def _few_ancestors(parents: list[int]) -> Bools:
    """Return `ancestors` of at most 64 nodes, each of whose paths fits into the bits of a word."""
    n = len(parents)
    paths = [0] * (n + 1)  # the last one is the root's
    for node, parent in enumerate(parents):
        paths[node] = paths[parent] | 1 << node
    words = np.array(paths[:n], dtype="<u8").view(np.uint8).reshape(n, 8)
    return np.unpackbits(words, axis=1, count=n, bitorder="little").view(np.bool_)


def children(parents: Ints) -> dict[int, list[int]]:
    """Return the children of every node that has any, -1 for the root, in the tree's order."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        below.setdefault(parent, []).append(node)
    return below


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

    Every node must come after its parent, which must be among them; raises InputError otherwise,
    and where a drawn draft would lose or move an earlier sibling of a node that stays.
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
        raise InputError("the nodes to keep leave out a parent, or name it after its child.")
    q = tree.q
    if q is not None:
        q = q[torch.from_numpy(np.concatenate(([0], picked + 1)))]
    return DraftTree(
        tokens=tree.tokens[picked],
        parents=parents,
        accept_prob=tree.accept_prob[picked],
        source=tree.source[picked],
        origin=tree.origin[picked],
        sources=tree.sources,
        kind=tree.kind,
        q=q,
    )


def promised(tree: DraftTree) -> list[float]:
    """Return how many nodes below each node are expected to be accepted once it is: [N]."""
    accept_prob, below = tree.accept_prob.tolist(), [0.0] * len(tree)
    parents = tree.parents.tolist()
    for node in range(len(tree) - 1, -1, -1):
        parent = parents[node]
        if parent != ROOT and accept_prob[parent] > 0.0:
            below[parent] += (1.0 + below[node]) * accept_prob[node] / accept_prob[parent]
    return below


def keep_order(tree: DraftTree, accept_prob: Sequence[float] | None = None) -> list[int]:
    """Return all nodes in the order in which a budget keeps them; any beginning of it is a tree.

    reach [N]: by default the tree's own; of a node it counts for no more than of its parent. Best
    first, of equals the earlier one, for the tokens of `walk` do not depend on what it is shown.

    A drawn draft is kept in the order of its draws, whatever its reach: it may only lose its end,
    as if fewer nodes had been drawn. The rules that judge draws rest on this invariant: *whether a
    node is kept is settled by the past and by the draws before it, never by its own token or by
    what was drawn later*. Each needs a part of it.
    - Chain rejection and block verification: a chain ends at a depth that no token of it moves.
    - Multi-step and without replacement: a child is a draw from q, or from what the siblings
      before it left of q. A later sibling may go; without an earlier one it would be of another
      distribution, and so would be the best of several.
    - k-seq: the number of siblings is part of the rule, so none of their tokens may change it.
    So the number of nodes to keep must be known before the draw, too, as the reach of a draft may
    tell what was drawn. Typical acceptance keeps no distribution; it is shown the same trees.
    """
    if tree.kind in SAMPLED_KINDS:
        return list(range(len(tree)))
    bounded: list[float] = []
    claimed = tree.accept_prob.tolist() if accept_prob is None else accept_prob
    for parent, current in zip(tree.parents.tolist(), claimed, strict=True):
        bounded.append(current if parent == ROOT else min(current, bounded[parent]))
    return sorted(range(len(tree)), key=bounded.__getitem__, reverse=True)


def keep_best(tree: DraftTree, budget: int, order: Sequence[int] | None = None) -> DraftTree:
    """Return the first `budget` nodes of `order`, as they stand in the tree.

    order: default that of `keep_order`.
    """
    if len(tree) <= budget:
        return tree
    if budget <= 0:
        return DraftTree.empty(tree.kind)
    return select(tree, sorted((order or keep_order(tree))[:budget]))


def keep_paths(tree: DraftTree, most: int) -> DraftTree:
    """Return the at most `most` paths of largest reach; of a drawn draft those drawn first.

    So of draws every sibling before a kept one stays, with all below it; see `keep_order`.
    """
    leaves = paths(tree.parents)
    if len(leaves) <= most:
        return tree
    if tree.kind in SAMPLED_KINDS:
        leaves.sort()
    else:
        leaves.sort(key=lambda leaf: -float(tree.accept_prob[list(leaf)].sum()))
    return select(tree, sorted({node for leaf in leaves[:most] for node in leaf}))


def limit_depth(tree: DraftTree, deepest: int) -> DraftTree:
    """Return the tree without the nodes below depth `deepest`."""
    if len(tree) <= deepest:
        return tree
    shallow = depths(tree.parents) <= deepest
    return tree if shallow.all() else select(tree, np.flatnonzero(shallow))


def merge(trees: Iterable[DraftTree]) -> DraftTree:
    """Return one tree that holds every path of all trees, shared prefixes once; see `overlay`.

    Siblings are together at most certain, see `share_out`.
    """
    trees = list(trees)
    merged = overlay([(tree, 1) for tree in trees])[0]
    return share_out(merged) if len(trees) > 1 else merged


def share_out(tree: DraftTree) -> DraftTree:
    """Return the tree with siblings that are together at most certain.

    Only one token can come next: where several sources name different ones, each surely, their
    chances are taken to be shares of one.
    """
    parents, claimed = tree.parents.tolist(), tree.accept_prob.tolist()
    totals = [0.0] * (len(tree) + 1)  # of children, by parent; the last entry is that of the root
    for parent, current in zip(parents, claimed, strict=True):
        totals[parent] += current
    if all(
        total <= (1.0 if node < 0 else claimed[node])
        for node, total in zip([*range(len(tree)), ROOT], totals, strict=True)
    ):
        return tree
    accept_prob: list[float] = []
    for parent, current in zip(parents, claimed, strict=True):
        above, now = (1.0, 1.0) if parent == ROOT else (claimed[parent], accept_prob[parent])
        most = max(totals[parent], above)
        accept_prob.append(current / most * now if most > 0.0 else 0.0)
    return replace(tree, accept_prob=np.asarray(accept_prob, dtype=np.float32))


def overlay(trees: Sequence[tuple[DraftTree, int]]) -> tuple[DraftTree, list[int]]:
    """Return one tree that holds every path of all trees, and the bits of those that offer a node.

    After its parent a node is as likely as the most confident tree says; source and origin are
    those of the first tree that offers it. The result is deterministic where all trees are, else
    coupled: what a sampled tree promises about its distribution does not survive, so `q` is
    dropped.
    """
    if len(trees) == 1 and trees[0][0].kind in (DraftKind.DETERMINISTIC, DraftKind.COUPLED):
        tree, bit = trees[0]
        return replace(tree, q=None), [bit] * len(tree)
    nodes = _Overlay()
    sources: dict[str, int] = {}
    for tree, bit in trees:
        nodes.add(tree, bit, [sources.setdefault(name, len(sources)) for name in tree.sources])
    accept_prob: list[float] = []
    for parent, chance in zip(nodes.parents, nodes.chances, strict=True):
        accept_prob.append(chance if parent == ROOT else chance * accept_prob[parent])
    plain = all(tree.kind is DraftKind.DETERMINISTIC for tree, _ in trees)
    merged = DraftTree(
        tokens=np.asarray(nodes.tokens, dtype=np.int64),
        parents=np.asarray(nodes.parents, dtype=np.int64),
        accept_prob=np.asarray(accept_prob, dtype=np.float32),
        source=np.asarray(nodes.source, dtype=np.int64),
        origin=np.asarray(nodes.origin, dtype=np.int64).reshape(len(accept_prob), 2),
        sources=tuple(sources) or ("none",),
        kind=DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED,
    )
    return merged, nodes.offers


@dataclass(slots=True)
class _Overlay:
    """The nodes of a merged tree; chances: of acceptance once the parent is accepted."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    origin: list[list[int]] = field(default_factory=list)
    offers: list[int] = field(default_factory=list)
    at: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tree: DraftTree, bit: int, names: Sequence[int]) -> None:
        """Lay a tree over what is there; names: the merged indices of its sources."""
        claimed = tree.accept_prob.tolist()
        place: list[int] = []
        for token, parent, claim, source, origin in zip(
            tree.tokens.tolist(), tree.parents.tolist(), claimed,
            tree.source.tolist(), tree.origin.tolist(), strict=True,
        ):  # fmt: skip
            above = ROOT if parent == ROOT else place[parent]
            if parent != ROOT:
                claim = min(claim / claimed[parent], 1.0) if claimed[parent] > 0.0 else 0.0
            node = self.at.setdefault((above, token), len(self.tokens))
            place.append(node)
            if node < len(self.tokens):
                self.chances[node] = max(self.chances[node], claim)
                self.offers[node] |= bit
                continue
            self.tokens.append(token)
            self.parents.append(above)
            self.chances.append(claim)
            self.source.append(names[source])
            self.origin.append(origin)
            self.offers.append(bit)


def check(tree: DraftTree, vocab_size: int | None = None) -> None:
    """Raise InputError where the tree breaks a promise of `DraftTree`, naming the promise.

    vocab_size: where given, every token must lie in 0 .. vocab_size - 1. Plain lists: at the sizes
    of a draft they beat arrays.
    """
    if tree is DraftTree.empty(tree.kind):
        return  # the commonest answer
    n = len(tree)
    _check_shapes(tree, n)
    if not n:
        return
    parents, tokens, accept_prob = (
        tree.parents.tolist(),
        tree.tokens.tolist(),
        tree.accept_prob.tolist(),
    )
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
        raise InputError(
            "accept_prob: expected finite probabilities, got a negative or non-finite one."
        )
    if tree.kind is not DraftKind.SAMPLED:
        distinct = len(set(zip(parents, tokens, strict=True)))
        if distinct != n:
            raise InputError(
                f"{n - distinct} nodes repeat a sibling's token; expected distinct siblings."
            )


def _check_first_draws(parents: Ints, picked: Ints) -> None:
    """Raise InputError where a node is picked without a sibling drawn before it, or out of turn."""
    accepted = set(picked.tolist())
    bare: set[int] = set()  # parents that lost a child
    for node, parent in enumerate(parents.tolist()):
        if node not in accepted:
            bare.add(parent)
        elif parent in bare:
            raise InputError(
                f"of a drawn draft, node {node} is to stay without a sibling that was drawn before "
                "it; expected the later ones to go first, or the text follows another law."
            )
    if (np.diff(picked) <= 0).any():
        raise InputError("the nodes of a drawn draft are to be moved; expected their own order.")


def _check_shapes(tree: DraftTree, n: int) -> None:
    one, two = (n,), (n, 2)
    for name, values in (
        ("tokens", tree.tokens), ("parents", tree.parents),
        ("accept_prob", tree.accept_prob), ("source", tree.source),
    ):  # fmt: skip
        if values.shape != one:
            raise InputError(f"{name}: got shape {values.shape}, expected {one}, a value per node.")
        if values.dtype.kind not in ("iuf" if name == "accept_prob" else "iu"):
            raise InputError(f"{name}: got {values.dtype} values, expected numbers.")
    if not all(isinstance(name, str) for name in tree.sources):
        raise InputError(f"sources: got {tree.sources!r}, expected names.")
    if tree.origin.dtype.kind not in "iu":
        raise InputError(f"origin: got {tree.origin.dtype} values, expected whole numbers.")
    if tree.origin.shape != two:
        raise InputError(f"origin: got shape {tree.origin.shape}, expected {two}.")
    if tree.q is not None and tree.q.shape[0] != n + 1:
        raise InputError(f"q: got {tree.q.shape[0]} rows, expected {n + 1} (root and nodes).")


def _padded(parents: Ints) -> Ints:
    """Return the parents with the root as node N, its own parent: i64 [N + 1]."""
    n = len(parents)
    jump = np.empty(n + 1, dtype=np.int64)
    jump[:n] = np.where(parents < 0, n, parents)
    jump[n] = n
    return jump
