"""Contexts for drafters, and trees as dictionaries of paths, and checks of trees."""

from collections.abc import Sequence

import numpy as np

from ragspec.drafters.base import DraftContext
from ragspec.retrievers.indexes.segment import Draft
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import check, depths


def at(prompt: Sequence[int], left: int = 50) -> DraftContext:
    """Return the context of a text that has a prompt alone."""
    return DraftContext([*prompt], len(prompt), left)


def spelled(tree: DraftTree | Draft) -> dict[tuple[int, ...], float]:
    """Return the acceptance probability of every node by its path of tokens."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    assert len(set(paths)) == len(paths), "a path occurs twice"
    return dict(zip(paths, tree.accept_prob.tolist(), strict=True))


def check_draft(tree: DraftTree, vocab_size: int, budget: int, left: int = 50) -> None:
    """Assert that a tree is valid, fits its limits, and no node is likelier than its parent."""
    check(tree, vocab_size)
    assert len(tree) <= budget
    assert depths(tree.parents).max(initial=0) < left
    above = np.where(tree.parents == ROOT, 1.0, tree.accept_prob[tree.parents])
    assert (tree.accept_prob <= above).all()
