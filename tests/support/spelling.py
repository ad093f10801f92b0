"""Trees as tests read them: by the tokens that lead to their nodes."""

from ragspec.retrievers.indexes.segment import Draft
from ragspec.trees.draft_tree import ROOT, DraftTree


def spelled(tree: DraftTree | Draft) -> dict[tuple[int, ...], float]:
    """Return the acceptance probability of every node by its path of tokens."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    assert len(set(paths)) == len(paths), "a path stands twice"
    return dict(zip(paths, tree.accept_prob.tolist(), strict=True))
