import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftRequest, Prefill
from ragspec.engine.engine import Engine
from ragspec.retrievers.methods.token_recycling import (
    MOST_TABLES,
    SUREST,
    NeighbourDrafter,
    NeighbourTable,
    last_place,
    rank_rates,
)
from ragspec.rules.base import Step
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import ROOT, DraftTree
from tests.support.identities import PROMPTS, SAMPLINGS, target
from tests.support.spelling import at, check_draft, spelled

VOCAB = 12
REQUEST = DraftRequest((1, 2), VOCAB)


def table(rows: dict[int, list[int]], k: int = 3) -> NeighbourTable:
    instance = NeighbourTable(k, orders=1)
    for token, best in rows.items():
        instance.learn((-1, -1, token), best)
    return instance


def step(tree: DraftTree, path: tuple[int, ...], last: int, top: list[list[int]]) -> Step:
    tokens = (*(int(tree.tokens[node]) for node in path), last)
    return Step(tree, path, tokens, best=TopTokens.of(torch.tensor(top)))


def test_a_repeated_answer_takes_fewer_steps_for_the_same_owner() -> None:
    def steps(engine: Engine, tenant: str = "one") -> int:
        engine.prefix_cache.clear()  # so that rows are learned from the prompt again
        options: Any = {"max_new_tokens": 20, "ignore_eos": True, "tenant": tenant}
        return len(engine.generate(PROMPTS[0], SAMPLINGS["greedy"], **options).steps)

    engine = Engine(target(), drafter="recycling", budget=8)
    first = steps(engine)
    assert steps(engine) <= 7 < first
    assert steps(engine, "another") == steps(copy.deepcopy(engine)) == first
    changed = Engine(target(), drafter="recycling", budget=8, rule="typical")
    assert steps(changed) == steps(changed)  # its text depends on drafts


@pytest.mark.parametrize(
    ("table", "owners", "others"),
    [(None, (None, None), []), (None, ("a", "b"), []), (None, ("a", "a"), [7])]
    + [(table({}), (None, "a"), [7])],
)
def test_texts_share_rows_only_with_texts_of_the_same_owner(
    table: NeighbourTable | None, owners: tuple[str | None, ...], others: list[int]
) -> None:
    drafter = NeighbourDrafter(table, k=3)
    one, other = (drafter.open(replace(REQUEST, owner=owner)) for owner in owners)
    one.propose(at([1, 2]), 4)
    one.observe(step(DraftTree.empty(), (), 4, [[7, 8, 9]]))
    assert one.propose(at([1, 2, 4, 1, 2]), 1).tokens.tolist() == [7]
    assert other.propose(at([1, 2, 4, 1, 2]), 1).tokens.tolist() == others
    smaller = drafter.open(replace(REQUEST, owner=owners[0], vocab_size=7))  # another model's
    assert table is not None or not len(smaller.propose(at([1, 2, 4, 1, 2]), 1))


def test_the_least_recently_used_table_is_dropped() -> None:
    drafter = NeighbourDrafter(k=3)
    first = drafter.open(replace(REQUEST, owner="0"))
    first.propose(at([1, 2]), 4)
    first.observe(step(DraftTree.empty(), (), 4, [[7, 8, 9]]))
    first.propose(at([1, 2, 4]), 0)  # steps are learned at the next draft at the latest
    for count, known in ((MOST_TABLES, [7]), (MOST_TABLES + 1, [])):
        for owner in range(1, count):
            drafter.open(replace(REQUEST, owner=f"{count}, {owner}"))
        again = drafter.open(replace(REQUEST, owner="0"))
        assert again.propose(at([1, 2]), 1).tokens.tolist() == known


def test_of_equal_tokens_the_accepted_node_is_learned() -> None:
    # Token 4 occurs in the tree three times.
    tree = DraftTree.build([4, 5, 4, 6, 4], [-1, -1, 1, 1, 3], "recycling")
    top = [[1, 0, 2], [7, 8, 9], [1, 0, 2], [3, 8, 9], [1, 0, 2], [10, 8, 9]]
    for accepted, best in (((1, 2), 3), ((), 7), ((1, 3, 4), 10)):
        known = table({2: [4, 5, 6]})
        session = NeighbourDrafter(known).open(REQUEST)
        session.propose(at([1, 2]), 8)
        session.observe(step(tree, accepted, 11, top))
        row = known.find((-1, -1, 4))
        assert row is not None
        assert row.tokens[0] == best  # if none is accepted, that of the likeliest node


def test_rows_are_learned_from_the_prompt() -> None:
    session = NeighbourDrafter(k=2).open(REQUEST)
    top = torch.tensor([[3, 4, 9], [5, 6, 9], [7, 8, 9]])
    session.observe_prefill(Prefill(np.array([1, 2, 3]), TopTokens.of(top)))
    tree = session.propose(at([9, 1]), 3)
    assert tree.tokens[tree.parents == ROOT].tolist() == [3, 4]
    assert tree.tokens[tree.parents == 0].tolist() == [7]


@given(st.data())
def test_drafts_respect_their_limits_and_follow_the_rows(data: st.DataObject) -> None:
    k, orders = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    known = NeighbourTable(k, orders=orders)
    text = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40))
    best = data.draw(
        st.lists(st.permutations(range(VOCAB)), min_size=len(text), max_size=len(text))
    )
    known.learn_text(text, [row[:k] for row in best])
    session = NeighbourDrafter(known).open(REQUEST)
    budget, left = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 6))
    tree = session.propose(at(text, left), budget)
    check_draft(tree, VOCAB, budget, left)
    assert (np.diff(tree.accept_prob) <= 1e-6).all()
    for path in spelled(tree):
        row = known.find(last_place([*text, *path[:-1]]))
        assert row is not None
        assert path[-1] in row.tokens


def test_the_expected_acceptance_is_the_accept_prob_of_the_first_draft() -> None:
    session = NeighbourDrafter(table({2: [5, 6, 7]})).open(REQUEST)
    tree = session.propose(at([1, 2]), 4)
    assert session.expected_acceptance(at([1, 2])) == pytest.approx(float(tree.accept_prob[0]))
    assert session.expected_acceptance(at([1, 9])) == 0.0


def test_steps_without_a_draft_are_learned_before_the_next_draft() -> None:
    session = NeighbourDrafter(table({2: [4, 5, 6]})).open(REQUEST)
    session.propose(at([1, 2]), 4)
    text = [1, 2]
    for token in [7, 3] * 20:
        session.observe(step(DraftTree.empty(), (), token, [[token, 8, 9]]))
        text.append(token)
    assert session.propose(at(text), 2).tokens.tolist() == [7, 3]


TABLE_VOCAB, K = 6, 3
tokens = st.integers(0, TABLE_VOCAB - 1)
table_texts = st.lists(
    st.tuples(tokens, st.permutations(range(TABLE_VOCAB))), min_size=1, max_size=30
)


def naive(text: list[tuple[int, list[int]]], ending: list[int], orders: int) -> list[int] | None:
    """Return the best tokens after the last occurrence of the longest suffix of `ending`."""
    whole = [t for t, _ in text]
    for order in range(min(orders, len(ending)), 0, -1):
        for end in range(len(whole), order - 1, -1):
            if whole[end - order : end] == ending[-order:]:
                return list(text[end - 1][1][:K])
    return None


@given(table_texts, st.lists(tokens, min_size=1, max_size=3), st.integers(1, 3))
def test_the_longest_known_key_is_detected(
    text: list[tuple[int, list[int]]], ending: list[int], orders: int
) -> None:
    table = NeighbourTable(K, orders=orders)
    table.learn_text([t for t, _ in text], [best[:K] for _, best in text])
    result = table.find(last_place(ending))
    assert (None if result is None else list(result.tokens)) == naive(text, ending, orders)


def test_chances_rise_with_confirmations_of_the_best_token() -> None:
    table = NeighbourTable(K)
    assert table.find(last_place([1, 2])) is None
    for times in range(7):
        table.learn(last_place([1, 2]), [4, times % TABLE_VOCAB, 5])
        one, two = table.find(last_place([2])), table.find(last_place([1, 2]))
        assert one is not None and two is not None
        sure = min(times, SUREST)
        assert one.chances == rank_rates(1, sure, K) < two.chances == rank_rates(2, sure, K)
    table.learn(last_place([1, 2]), [3, 4, 5])
    assert table.find(last_place([1, 2])) == ([3, 4, 5], rank_rates(2, 0, K))
    assert table.find(last_place([2])) == ([3, 4, 5], rank_rates(1, 0, K))


def test_rows_are_dropped_oldest_first() -> None:
    table = NeighbourTable(1, orders=1, most=2)
    for token, best in ((1, 3), (2, 4), (1, 5), (3, 0)):
        table.learn(last_place([token]), [best])
    known = [table.find(last_place([token])) for token in (1, 2, 3)]
    assert [row and row.tokens for row in known] == [[5], None, [0]]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_rank_rates_rise_with_confirmations_and_key_length(order: int) -> None:
    rates = [rank_rates(order, sure, 8) for sure in range(SUREST + 1)]
    for row in rates:
        assert list(row) == sorted(row, reverse=True) and row[-1] > 0 and sum(row) <= 1
    firsts = [row[0] for row in rates]
    assert firsts == sorted(firsts)
    assert order == 1 or firsts[0] > rank_rates(order - 1, 0, 8)[0]
