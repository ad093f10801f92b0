from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftRequest
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter, SuffixSession
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import check, depths
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.spelling import at, spelled

VOCAB = 4
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


def propose(prompt: list[int], budget: int = 16, left: int = 50, **settings: Any) -> DraftTree:
    session = SuffixDrafter(**settings).open(DraftRequest(tuple(prompt), VOCAB))
    tree = session.propose(at(prompt, left), budget)
    check(tree, VOCAB)
    return tree


def oracle(
    text: list[int], cap_of: Callable[[int], int], least: float
) -> tuple[int, Counter[tuple[int, ...]], int]:
    """Return match, occurrences of every continuation of the best suffix, and the cap, naively."""
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
    """Shares along the path: of the places where the parent was followed by anything at all."""
    share = 1.0
    for d in range(1, len(path) + 1):
        if d == 1:
            parent = whole
        else:
            parent = sum(n for p, n in followed.items() if len(p) == d and p[:-1] == path[: d - 1])
        share *= followed[path[:d]] / parent
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
    assert len(tree) <= max(cap_of(matched), 0)


def test_a_match_of_m_tokens_gives_m_nodes_times_the_factor() -> None:
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


def test_a_shorter_suffix_wins_where_it_promises_more() -> None:
    # "3 1" occurred once, "1" was followed by 2 and then 0 each time.
    text = [1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 1, 3, 1]
    session = SuffixDrafter(offset=4.0, factor=0.0).open(DraftRequest(tuple(text), VOCAB))
    assert isinstance(session, SuffixSession)
    session.propose(at(text), 16)
    assert session.matched in (1, 2)


def test_the_better_of_text_and_past_drafts() -> None:
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


@given(tokens, st.integers(0, 9), st.integers(1, 5))
def test_trees_keep_their_promises(text: list[int], budget: int, left: int) -> None:
    tree = propose(text, budget, left, factor=4.0, least=0.0)
    assert len(tree) <= budget
    assert depths(tree.parents).max(initial=0) <= left - 1
    for node, parent in enumerate(tree.parents.tolist()):
        assert parent == ROOT or tree.accept_prob[node] <= tree.accept_prob[parent]
