from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import Drafter, DraftRequest, Prefill
from ragspec.errors import InputError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.rest import RestDrafter
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.methods.hierarchy_drafting import Form, HierarchyDrafter, fill
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, depths, overlay
from tests.support import tiny
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity, expected
from tests.support.spelling import at

REQUEST = DraftRequest((1, 2), 100)
PLACE = at([1, 2])


def names(tree: DraftTree) -> dict[int, str]:
    check(tree, tiny.VOCAB)
    return {int(t): tree.sources[s] for t, s in zip(tree.tokens, tree.source, strict=True)}


def levels(*databases: Drafter, **options: float) -> HierarchyDrafter:
    """Return a hierarchy whose context drafts nothing at `PLACE`."""
    return HierarchyDrafter(*databases, lookahead=False, **options)  # type: ignore[arg-type]


def wide(tokens: range, name: str, accept_prob: float) -> FixedDrafter:
    """Return a drafter of siblings with equal acceptance probabilities."""
    return FixedDrafter(list(tokens), name, accept_prob=[accept_prob] * len(tokens), siblings=True)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
def test_a_broken_source_changes_no_token(settings: str, batch: int) -> None:
    with pytest.warns(RuntimeWarning, match="broken"):
        check_identity(HierarchyDrafter(BrokenDrafter()), settings, batch)


def test_the_first_source_fills_first() -> None:
    drafter = levels(wide(range(10, 16), "a", 0.3), wide(range(20, 26), "b", 0.9), reserve=0.0)
    tree = drafter.open(REQUEST).propose(PLACE, 8)
    assert sorted(names(tree)) == [10, 11, 12, 13, 14, 15, 20, 21]


def test_later_sources_get_their_reserve() -> None:
    nodes = (range(10, 40), "a", 0.9), (range(40, 60), "b", 0.2), (range(60, 80), "c", 0.2)
    trees = [wide(*each).open(REQUEST).propose(PLACE, 10) for each in nodes]
    merged, offers = overlay([(tree, 1 << i) for i, tree in enumerate(trees)])
    chosen = fill(merged, offers, 3, 10, 2)
    assert Counter(offers[node] for node in chosen) == {1: 6, 2: 2, 4: 2}


def test_nodes_below_sure_are_taken_by_accept_prob() -> None:
    unsure, little = wide(range(10, 30), "a", 0.01), wide(range(30, 40), "b", 0.05)
    result = names(levels(unsure, little).open(REQUEST).propose(PLACE, 12))
    assert Counter(result.values()) == {"a": 2, "b": 10}


def test_an_unused_reserve_goes_to_other_sources() -> None:
    drafter = levels(wide(range(10, 30), "a", 0.9), FixedDrafter([1], "b", accept_prob=[0.9]))
    result = names(drafter.open(REQUEST).propose(PLACE, 10))
    assert Counter(result.values()) == {"a": 9, "b": 1}


def test_shared_prefixes_are_counted_once() -> None:
    one = FixedDrafter([5, 6, 7], "a", accept_prob=[0.9, 0.8, 0.7])
    two = FixedDrafter([5, 6, 8], "b", accept_prob=[0.9, 0.8, 0.7])
    tree = levels(one, two).open(REQUEST).propose(PLACE, 4)
    assert names(tree) == {5: "a", 6: "a", 7: "a", 8: "b"}


def test_no_draft_without_proposals_or_budget() -> None:
    assert len(levels(FixedDrafter([], "a")).open(REQUEST).propose(PLACE, 4)) == 0
    assert len(levels(FixedDrafter([5])).open(REQUEST).propose(PLACE, 0)) == 0


def test_kind_and_needs_follow_from_the_levels() -> None:
    plain, coupled = FixedDrafter([1]), FixedDrafter([2], kind=DraftKind.COUPLED)
    assert levels(plain).kind is DraftKind.DETERMINISTIC
    both = HierarchyDrafter(plain, coupled)
    assert isinstance(both, Drafter)
    assert both.kind is DraftKind.COUPLED
    assert both.needs.top_tokens == NeighbourDrafter().needs.top_tokens
    assert both.open(REQUEST).propose(PLACE, 4).kind is DraftKind.COUPLED


@st.composite
def drafts(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    accept_prob: list[float] = []
    for parent in parents:
        accept_prob.append(draw(st.floats(0, 1)) * (1.0 if parent < 0 else accept_prob[parent]))
    tokens = draw(st.permutations(range(10)))[:n]
    return DraftTree.build(tokens, parents, "test", accept_prob=accept_prob)


@given(st.lists(drafts(), min_size=1, max_size=3), st.integers(1, 12), st.floats(0, 0.3))
def test_the_budget_is_filled_with_whole_paths(
    trees: list[DraftTree], budget: int, reserve: float
) -> None:
    merged, offers = overlay([(tree, 1 << i) for i, tree in enumerate(trees)])
    chosen = fill(merged, offers, len(trees), budget, int(reserve * budget))
    assert len(chosen) == min(budget, len(merged))
    assert all(merged.parents[node] in {-1, *chosen} for node in chosen)


VOCAB = tiny.VOCAB
FORMS: tuple[Form, ...] = ("trie", "ngram")
ANSWERS, TEXT = (
    FixedDrafter(range(first, first + 4), name, accept_prob=[0.5, 0.4, 0.3, 0.2])
    for first, name in ((20, "answers"), (30, "statistics"))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of answers with one wrong token each, and one of prompts."""
    root = tmp_path_factory.mktemp("stores")
    answers = [tokens for settings in SAMPLINGS for tokens in expected(settings, 4)]
    texts = [[*p[-3:], *a[:9], 0, *a[10:]] for p, a in zip(2 * PROMPTS, answers, strict=True)]
    CorpusIndex.build(texts, VOCAB, root / "m.store").close()
    CorpusIndex.build(PROMPTS, VOCAB, root / "c.store").close()
    return root


def drafted(drafter: HierarchyDrafter, text: list[int], budget: int = 16) -> DraftTree:
    return drafter.open(DraftRequest(tuple(text), VOCAB)).propose(at(text), budget)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("method", [*FORMS, "rest", "auto"])
def test_stores_change_no_token(method: str, settings: str, batch: int, folder: Path) -> None:
    drafter: Drafter
    if method in FORMS:
        form: Any = method
        stores = (CorpusIndex.open(folder / name) for name in ("m.store", "c.store"))
        drafter = HierarchyDrafter(*stores, form=form)
    else:
        drafter = CorpusIndex.open(folder / "m.store").drafter()
        drafter = AutoDrafter(drafter) if method == "auto" else drafter
    check_identity(drafter, settings, batch)


@pytest.mark.parametrize("form", FORMS)
def test_every_level_drafts_under_its_name(form: Form) -> None:
    drafter = HierarchyDrafter(ANSWERS, TEXT, form=form)
    result = names(drafted(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 1]))
    first = "context" if form == "trie" else "ngrams"
    assert (result[2], result[20], result[30]) == (first, "answers", "statistics")


def test_later_levels_get_their_reserve_beside_a_full_context() -> None:
    context = [token for i in range(7) for token in (1, *range(40 + 5 * i, 45 + 5 * i))] + [1]
    result = names(drafted(HierarchyDrafter(ANSWERS, TEXT, form="ngram"), context, 64))
    counts = Counter(result.values())
    assert counts.total() == 28  # seven n-grams of four more tokens
    assert counts["ngrams"] >= 14 and counts["answers"] >= 2 and counts["statistics"] >= 3


def test_the_ngram_form_queries_the_corpus_with_two_tokens_then_one(folder: Path) -> None:
    corpus = CorpusIndex.open(folder / "c.store")
    plain, paper = (HierarchyDrafter(None, corpus, form=form) for form in FORMS)
    rest = paper.drafters[-1]
    assert isinstance(rest, RestDrafter)
    assert (rest.options.max_match, rest.shortest, rest.options.max_depth) == (2, 1, 4)
    assert rest.name == plain.drafters[1].name == "statistics"


def test_ngrams_of_answers_are_looked_up_by_the_last_token(folder: Path) -> None:
    with CorpusIndex.open(folder / "m.store") as store:
        text = expected("greedy", 4)[0]
        tree = drafted(HierarchyDrafter(store, form="ngram"), [90, text[0]])
    assert set(tree.sources) == {"answers"}
    assert depths(tree.parents).max() == 4
    assert text[1] in tree.tokens[tree.parents < 0]


def test_levels_may_be_left_out() -> None:
    for form in FORMS:
        drafter = HierarchyDrafter(form=form, lookahead=False)
        assert drafter.needs.top_tokens == 0
        assert drafter.kind is DraftKind.DETERMINISTIC
        assert isinstance(drafter, Drafter)
        assert len(drafted(drafter, [1, 2, 3, 4, 5, 6, 1])) > 0
    assert HierarchyDrafter(form="trie").needs.top_tokens == 8
    assert HierarchyDrafter(form="ngram").needs.top_tokens == 1


def test_token_recycling_replaces_lookahead_in_the_trie_form() -> None:
    session = HierarchyDrafter(form="trie").open(DraftRequest((1, 2), VOCAB))
    session.observe_prefill(
        Prefill(np.array([1, 2]), TopTokens.of(torch.tensor([[7, 8], [9, 10]])))
    )
    tree = session.propose(at([1, 2]), 4)
    assert names(tree) == {9: "recycling", 10: "recycling"}


def test_hierarchy_drafting_settings_are_checked() -> None:
    with pytest.raises(InputError, match=r"got str as a drafter.*expected.*store\.drafter\(\)"):
        HierarchyDrafter("m.store")  # type: ignore[arg-type]
