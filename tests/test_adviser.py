from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.adviser import COSTLY_NODES, Claims, Economy, followed, level_of
from ragspec.calibration import Calibration
from ragspec.draft import DraftTree
from ragspec.economics import Experience

NONE = DraftTree.empty()
PLAIN = 5.0


def ask(economy: Economy, before: DraftTree, after: DraftTree, tokens: tuple[int, ...]) -> int:
    """Play one step of a source that costs one plain step; return how many nodes it was asked."""
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
    asked = economy.allowance("model", 32, before)
    if asked:
        economy.spent("model", PLAIN)
        economy.added("model", after)
    economy.learn(tokens)
    return asked


def test_a_costly_source_that_adds_nothing_is_asked_seldom() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    chain = DraftTree.chain([1, 2], "model", reach=[0.9, 0.8])
    asked = [ask(economy, NONE, chain, (7, 7, 7)) for _ in range(400)]
    assert asked[0] == 32, "its cost is not known yet"
    assert sum(map(bool, asked[10:])) == pytest.approx(400 * 0.02, abs=3)


def test_a_costly_source_that_pays_is_asked_every_time_but_for_little() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    chain = DraftTree.chain([1, 2, 3], "model", reach=[0.9, 0.8, 0.7])
    asked = [ask(economy, NONE, chain, (1, 2, 3, 4)) for _ in range(50)]
    assert asked[1:] == [COSTLY_NODES] * 49


def test_it_is_asked_only_where_the_others_promise_little() -> None:
    economy = Economy(Experience(), probe_share=0.01)
    sure = DraftTree.chain([1, 2], "context", reach=[0.99, 0.98])
    chain = DraftTree.chain([5, 6, 7], "model", reach=[0.9, 0.8, 0.7])
    for _ in range(30):
        ask(economy, sure, sure, (1, 2, 3))
        ask(economy, NONE, chain, (5, 6, 7, 8))
    assert [ask(economy, sure, sure, (1, 2, 3)) for _ in range(10)] == [0] * 10
    assert [ask(economy, NONE, chain, (5, 6, 7, 8)) for _ in range(10)] == [COSTLY_NODES] * 10


def test_a_cheap_source_is_always_asked_for_all() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    for _ in range(20):
        economy.begin(rate=0.2, plain=PLAIN, budget=32)
        assert economy.allowance("context", 32, NONE) == 32
        economy.spent("context", 0.001 * PLAIN)
        economy.added("context", NONE)
        economy.learn((7,))


def test_what_does_not_learn_never_probes() -> None:
    experience = Experience()
    experience.source("model").cost.learn(8, PLAIN)
    economy = Economy(experience, probe_share=0.5, learns=False)
    chain = DraftTree.chain([1, 2], "model", reach=[0.9, 0.8])
    assert not any(ask(economy, NONE, chain, (1, 2, 3)) for _ in range(100))
    assert economy.rate == 0.0


def test_a_fixed_budget_asks_everyone_and_still_corrects_claims() -> None:
    claims = Claims(Calibration())
    liar = DraftTree.chain([1], "a", reach=[1.0])
    for _ in range(20):
        assert claims.allowance("a", 5, NONE) == 5
        claims.appraise(liar, 0)
        claims.learn((2,))
    assert claims.appraise(liar, 0).reach[0] < 0.2


def test_levels_rise_with_the_promise() -> None:
    trees = [DraftTree.chain([1], "a", reach=[r]) for r in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)]
    assert [level_of(tree) for tree in trees] == [0, 1, 2, 3, 4, 5]
    assert level_of(NONE) == 0


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 2)), max_size=6), st.data())
def test_followed_is_the_longest_path_that_was_emitted(
    nodes: list[tuple[int, int]], data: st.DataObject
) -> None:
    parents = [min(parent, i - 1) for i, (parent, _) in enumerate(nodes)]
    pairs = list(dict.fromkeys(zip(parents, (token for _, token in nodes), strict=True)))
    if len(pairs) < len(nodes):
        return
    tokens = [token for _, token in nodes]
    tree = DraftTree.build(tokens, parents, "a")
    text = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    paths: dict[tuple[int, ...], int] = {(): -1}
    for node, parent in enumerate(parents):
        above = next(path for path, at in paths.items() if at == parent)
        paths[(*above, tokens[node])] = node
    longest = max(n for n in range(len(text)) if tuple(text[:n]) in paths)
    assert followed(tree, text) == longest
