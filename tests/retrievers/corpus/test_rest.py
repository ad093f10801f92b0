import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.rest import RestDrafter, RestSession
from ragspec.retrievers.indexes.segment import Segment, segment_in_memory
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import check
from tests.support import tiny
from tests.support.spelling import spelled

Texts = Sequence[Sequence[int]]


class Shelf:
    """A corpus of segments in memory."""

    def __init__(self, *groups: Texts, vocab_size: int = 97, depth: int = 32) -> None:
        self.vocab_size = vocab_size
        self.depth = depth
        self.held = tuple(
            segment_in_memory([np.array(text) for text in texts], vocab_size, depth)
            for texts in groups
        )

    def segments(self, scope: str) -> tuple[Segment, ...]:
        return self.held

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        return None


def session(*groups: Texts, vocab_size: int = 97, **options: Any) -> RestSession:
    shelf = Shelf(*groups, vocab_size=vocab_size)
    return RestDrafter(shelf, **options).open(DraftRequest((), vocab_size))


def propose(
    result: RestSession, tokens: Sequence[int], budget: int = 16, remaining: int = 99
) -> DraftTree:
    tree = result.propose(DraftContext(list(tokens), 0, remaining), budget)
    check(tree, 2**31)
    return tree


def test_the_longest_match_decides() -> None:
    texts = [[1, 2, 3, 4, 50, 51], [9, 3, 4, 60, 61], [9, 3, 4, 60, 61]]
    result = session(texts, shorter=())
    assert propose(result, [7, 1, 2, 3, 4]).tokens.tolist() == [50, 51]
    assert result.matched == 4
    assert propose(result, [8, 3, 4]).tokens.tolist()[0] == 60  # twice as often
    assert result.matched == 2
    assert propose(result, [4]).tokens.tolist()[0] == 60
    assert result.matched == 1
    paper = session(texts, shorter=(), shortest=2)
    assert len(propose(paper, [4])) == 0
    assert paper.matched == 0


def test_shorter_matches_fill_the_tree() -> None:
    texts = [[1, 2, 3, 4, 50, 51], [9, 3, 4, 60, 61]]
    accept_prob = spelled(propose(session(texts), [1, 2, 3, 4]))
    assert accept_prob[(50,)] > accept_prob[(60,)] > 0
    assert (60, 61) in accept_prob


def test_no_draft_runs_into_the_next_document() -> None:
    texts = [[1, 2, 3], [4, 5, 6], [7, 1, 2]]
    assert propose(session(texts), [1, 2]).tokens.tolist() == [3]
    assert len(propose(session(texts), [2, 3])) == 0
    assert propose(session(texts), [2, 3, 4]).tokens.tolist() == [5, 6]  # after 4, not 3
    assert len(propose(session(texts, shortest=2), [2, 3, 4])) == 0


def test_the_most_frequent_continuation_wins_whatever_its_id() -> None:
    # 6,000 rows begin with small ids; the paper's code reads the first 5,000 only.
    rare = [[1, 2, 3 + i % 60] for i in range(6000)]
    often = [[1, 2, 96]] * 3000
    assert propose(session([*rare, *often]), [1, 2], 4).tokens.tolist()[0] == 96


def test_drafts_respect_budget_depth_and_remaining_tokens() -> None:
    text = [list(range(40))]
    for budget, remaining, nodes in ((5, 99, 5), (50, 99, 16), (50, 4, 3), (50, 1, 0), (0, 99, 0)):
        assert len(propose(session(text), [0, 1], budget, remaining)) == nodes
    assert len(propose(session(text, depth=4), [0, 1], 50)) == 4
    assert len(propose(session(), [0, 1])) == len(propose(session(text), [])) == 0


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=2, max_size=8)


@given(WORDS, st.integers(1, 7), st.lists(st.integers(0, 3), min_size=2, max_size=5))
@settings(max_examples=300)
def test_segments_answer_as_one_text(texts: Texts, cut: int, context: list[int]) -> None:
    """Compare segments of equal matches; a segment with a shorter match only adds nodes."""
    groups = [group for group in (texts[:cut], texts[cut:]) if group]
    whole = session(texts, shorter=(), vocab_size=4, shortest=1)
    parts = session(*groups, shorter=(), vocab_size=4, shortest=1)
    selection = spelled(propose(whole, context, 500))
    result = spelled(propose(parts, context, 500))
    matches = {s.longest_match(context, 16).length for s in Shelf(*groups, vocab_size=4).held}
    if len(matches) == 1:
        assert parts.matched == whole.matched
        assert result == pytest.approx(selection, rel=1e-5)
    for path, accept_prob in selection.items():
        assert result[path] >= accept_prob - 1e-6


@given(WORDS, st.integers(1, 7), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
@settings(max_examples=200)
def test_accept_prob_is_a_probability(
    texts: Texts, cut: int, context: list[int], data: st.DataObject
) -> None:
    groups = [group for group in (texts[:cut], texts[cut:]) if group]
    result = session(*groups, vocab_size=4, shortest=1)
    for _ in range(3):
        tree = propose(result, context, data.draw(st.integers(1, 40)))
        total: dict[int, float] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            total[parent] = total.get(parent, 0.0) + float(tree.accept_prob[node])
        for parent, accept_prob in total.items():
            above = 1.0 if parent < 0 else float(tree.accept_prob[parent])
            assert accept_prob <= above + 1e-6
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        context = [*context, *tokens]


def test_segments_with_a_shorter_match_add_nodes() -> None:
    result = session([[1, 2, 3, 50]], [[2, 3, 60], [7, 2, 3, 61]])
    accept_prob = spelled(propose(result, [1, 2, 3]))
    assert accept_prob[(50,)] > accept_prob[(60,)] == pytest.approx(accept_prob[(61,)])
    assert result.matched == 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CorpusIndex]:
    with CorpusIndex.build([[1, 2, 3, 4, 5, 6]], 97, tmp_path / "c") as instance:
        yield instance


def test_a_request_reads_the_snapshot_of_its_opening(store: CorpusIndex) -> None:
    request = DraftRequest((), 97)
    before = store.drafter().open(request)
    store.append([20, 21, 22, 23], scope="global")
    store.flush()
    assert len(propose(before, [20, 21])) == 0
    assert propose(before, [1, 2, 3]).tokens.tolist() == [4, 5, 6]
    assert propose(store.drafter().open(request), [20, 21]).tokens.tolist() == [22, 23]


def test_wrong_settings_and_vocabularies_are_refused(store: CorpusIndex) -> None:
    wrong: list[dict[str, Any]] = [{"shortest": 0}, {"shortest": 17}, {"depth": 0}, {"longest": 17}]
    wrong += [{"longest": "3"}, {"scope": 5}]
    for options in wrong:
        with pytest.raises(InputError):
            store.drafter(**options)
    with pytest.raises(StoreError, match="97 token ids, the model 96"):
        store.drafter().open(DraftRequest((), 96))


def test_recorded_answers_are_drafted_for_the_next_request(tmp_path: Path) -> None:
    model = tiny.model(dtype=torch.float64)
    with CorpusIndex.build([], tiny.tokenizer(), tmp_path / "c") as store:
        engine = Engine(model, tiny.tokenizer(), drafter=store.drafter("tenant"), budget=8)
        store.record(engine, scope="tenant")
        first, second = (engine.generate([5, 6, 7, 8, 9], max_new_tokens=40) for _ in range(2))
    assert first.tokens == second.tokens and first.report.faults == second.report.faults == {}
    assert second.report.forwards < 0.5 * first.report.forwards


def test_recording_a_scope_that_the_engine_does_not_read_warns(tmp_path: Path) -> None:
    model = tiny.model(dtype=torch.float64)
    with CorpusIndex.build([], tiny.tokenizer(), tmp_path / "c") as store:
        other = Engine(model, tiny.tokenizer(), drafter=AutoDrafter(store.drafter(name="corpus")))
        with pytest.warns(RuntimeWarning, match="'tenant' is not drafted from .*reads 'global'"):
            store.record(other, scope="tenant")()
        far = HierarchyDrafter(model_store=store)
        with pytest.warns(RuntimeWarning, match="'tenant' is not drafted from"):
            store.record(Engine(model, tiny.tokenizer(), drafter=far), scope="tenant")()
        current = Engine(model, tiny.tokenizer(), drafter=SuffixDrafter(store.drafter("tenant")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.record(current, scope="tenant")()
            store.record(other, scope="global")()  # every drafter reads global text
            # An engine that does not read the corpus.
            store.record(Engine(model, tiny.tokenizer()), scope="tenant")()
