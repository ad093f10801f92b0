from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftRequest
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.trees.draft_tree import DraftTree
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.spelling import at, check_draft, spelled

VOCAB = 4
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


def propose(prompt: list[int], budget: int = 16, left: int = 50, **settings: Any) -> DraftTree:
    session = SuffixDrafter(**settings).open(DraftRequest(tuple(prompt), VOCAB))
    tree = session.propose(at(prompt, left), budget)
    check_draft(tree, VOCAB, budget, left)
    return tree


def oracle(
    text: list[int], cap_of: Callable[[int], int], least: float
) -> tuple[int, Counter[tuple[int, ...]], int]:
    """Return the best suffix's length, the counts of its continuations, and its occurrences."""
    best, most = (0, Counter[tuple[int, ...]](), 0), 0.0
    for n in range(len(text) - 1, 0, -1):
        ends = [i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        followed = Counter(
            tuple(text[end : end + d]) for end in ends for d in range(1, len(text) - end + 1)
        )
        cap = cap_of(n)
        shares = sorted((probability(p, followed, len(ends)) for p in followed), reverse=True)
        score = sum(share for share in shares[:cap] if share >= least - 1e-12)
        if score > most + 1e-9:
            best, most = (n, followed, len(ends)), score
    return best


def probability(path: tuple[int, ...], followed: Counter[tuple[int, ...]], whole: int) -> float:
    """Return the product of each node's share of the continuations of its parent."""
    share = followed[path[:1]] / whole
    for d in range(2, len(path) + 1):
        siblings = [n for p, n in followed.items() if len(p) == d and p[:-1] == path[: d - 1]]
        share *= followed[path[:d]] / sum(siblings)
    return share


@given(tokens, st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 3.0]))
def test_the_tree_is_that_of_a_naive_count(text: list[int], factor: float, offset: float) -> None:
    settings: dict[str, Any] = {"factor": factor, "offset": offset}
    tree = propose(text, 12, least=0.2, **settings)

    def cap_of(n: int) -> int:
        return min(12, int(factor * n + offset))

    matched, followed, whole = oracle(text, cap_of, 0.2)
    ours = sum([probability(p, followed, whole) for p in spelled(tree)])
    shares = sorted((probability(p, followed, whole) for p in followed), reverse=True)
    best = sum([share for share in shares[: cap_of(matched)] if share >= 0.2 - 1e-12])
    assert ours == pytest.approx(best, abs=1e-6)
    assert len(tree) <= cap_of(matched)


def test_the_most_nodes_are_factor_times_match_plus_offset() -> None:
    text = [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 1, 2]
    assert len(propose(text)) == 3
    assert len(propose(text, factor=2.0)) == 6
    assert len(propose(text, factor=0.0, offset=1.0)) == 1
    assert len(propose(text, budget=2)) == 2
    assert len(propose(text, left=3)) == 2
    assert len(propose(text, left=1)) == 0


def test_unlikely_continuations_are_left_out() -> None:
    text = [1, 2] * 9 + [1, 3, 1]
    assert set(propose(text, left=2, factor=8.0).tokens.tolist()) == {2, 3}
    assert set(propose(text, left=2, factor=8.0, least=0.2).tokens.tolist()) == {2}


def test_the_source_with_more_expected_tokens_drafts() -> None:
    prompt = [0, 1, 2, 3, 0, 1]
    past = FixedDrafter([3, 3, 3, 3], "past", matched=2, accept_prob=[0.9, 0.9, 0.9, 0.9])
    request = DraftRequest(tuple(prompt), VOCAB)
    tree = SuffixDrafter(past).open(request).propose(at(prompt), 8)
    assert tree.sources == ("past",)
    assert len(tree) == 2  # as the match allows
    weak = FixedDrafter([3], "past", matched=9, accept_prob=[0.1])
    assert SuffixDrafter(weak).open(request).propose(at(prompt), 8).sources == ("suffix",)
    session = SuffixDrafter(BrokenDrafter()).open(request)
    with pytest.warns(RuntimeWarning, match="switched off"):
        for _ in range(3):
            assert session.propose(at(prompt), 8).sources == ("suffix",)
