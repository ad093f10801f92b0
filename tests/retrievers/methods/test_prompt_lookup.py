"""Prompt lookup, the `auto` drafter, and indexes that follow a growing text."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, SourceText
from ragspec.drafters.build import build_drafter
from ragspec.engine.engine import Engine
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.ngrams import NGramDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter, LookupSession
from ragspec.retrievers.methods.sam_decoding import MatchDrafter
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check
from ragspec.verification.causal import CausalTarget
from tests.support import tiny
from tests.support.fixed import FixedDrafter, fake_clock
from tests.support.identities import PROMPTS
from tests.support.noisy import NoisyTrees
from tests.support.spelling import at

VOCAB = 5
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def propose(prompt: list[int], budget: int = 10, left: int = 50, **knobs: Any) -> DraftTree:
    session = LookupDrafter(**knobs).open(DraftRequest(tuple(prompt), 100))
    return session.propose(at(prompt, left), budget)


def searched(text: list[int], longest: int, shortest: int, n: int) -> list[int]:
    """Search every n-gram size at every position."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        at = [i for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
        if at:
            start = at[0] + size
            return text[start : start + n]
    return []


@given(tokens, st.integers(1, 4), st.integers(1, 4))
def test_the_copy_is_that_of_a_naive_search(text: list[int], longest: int, shortest: int) -> None:
    shortest = min(longest, shortest)
    tree = propose(text, longest=longest, shortest=shortest, tokens=6)
    check(tree, VOCAB)
    assert tree.tokens.tolist() == searched(text, longest, shortest, 6)


def test_overlapping_spans_give_each_token_one_origin() -> None:
    prompt = (1, 2, 3, 4, 9, 1, 2)
    request = DraftRequest(prompt, 50, spans=((0, 3, 0, 10), (2, 4, 1, 50)))
    tree = LookupDrafter().open(request).propose(at(prompt), 3)
    assert tree.origin.tolist() == [[1, 50], [1, 51], [-1, -1]]


@pytest.mark.parametrize("name", ["context", "match", "suffix", "lookup"])
def test_a_copy_of_a_further_text_has_its_origin_and_ends_with_it(name: str) -> None:
    texts = (SourceText((7, 8, 9, 6), 3, 40), SourceText((1, 2), 4))
    session: Any = DRAFTERS[name].open(DraftRequest((5, 7, 8), 100, texts=texts))
    tree = session.propose(at([5, 7, 8]), 10)
    assert tree.tokens.tolist() == [9, 6]
    assert tree.origin.tolist() == [[3, 42], [3, 43]]
    assert tree.sources == (name,) and tree.kind is DraftKind.DETERMINISTIC
    assert name == "context" or session.matched == 2


def test_lookup_respects_the_budget_and_reports_its_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert len(propose(text, budget=2)) == 2
    assert len(propose(text, left=3)) == 2
    assert len(propose(text, left=1)) == len(propose(text, budget=0)) == 0
    session = LookupDrafter().open(DraftRequest(tuple(text), 100))
    assert isinstance(session, LookupSession)
    session.propose(at(text), 4)
    assert session.matched == 2


def test_accept_prob_never_rises_and_is_larger_for_longer_matches() -> None:
    short, long = propose([1, 2, 3, 9, 2], 3), propose([1, 2, 3, 9, 1, 2], 1)
    assert (short.accept_prob[1:] <= short.accept_prob[:-1]).all()
    assert long.accept_prob[0] > short.accept_prob[0] > 0


def test_auto_fuses_all_available_sources() -> None:
    drafter = AutoDrafter(NoisyTrees({}))
    assert [each.name for each in drafter.drafters] == ["context", "noisy", "recycling"]
    target = CausalTarget(tiny.model())
    built = build_drafter("auto", tiny.model(num_hidden_layers=1), tiny.tokenizer(), target)
    assert [each.name for each in getattr(built, "drafters")] == ["context", "recycling", "model"]  # noqa: B009


def test_auto_needs_no_top_tokens_of_the_prompt() -> None:
    drafter = AutoDrafter()
    assert drafter.needs.top_tokens > 0 and not drafter.needs.prompt_top_tokens


def test_a_source_that_stalls_is_counted_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_clock(monkeypatch)
    drafter = AutoDrafter(FixedDrafter([1], "stalling", [0.1], seconds=1.0, clock=clock))
    plain = Engine(tiny.model(), drafter=None).generate(PROMPTS[0], max_new_tokens=40)
    engine = Engine(tiny.model(), drafter=drafter, budget=6)
    with pytest.warns(RuntimeWarning, match="'stalling' is switched off"):
        result = engine.generate(PROMPTS[0], max_new_tokens=40)
    assert result.tokens == plain.tokens
    assert result.report.faults == {"stalling": 3} and clock == [4.0]


GROWING_TEXT_VOCAB = 4
DRAFTERS: dict[str, Drafter] = {
    "context": ContextDrafter(),
    "match": MatchDrafter(),
    "suffix": SuffixDrafter(),
    "lookup": LookupDrafter(),
    "ngrams": NGramDrafter(level=3, lookahead=False),
}
texts = st.lists(st.integers(0, GROWING_TEXT_VOCAB - 1), min_size=1, max_size=12)


def spelled(tree: DraftTree) -> object:
    columns = (tree.tokens, tree.parents, tree.accept_prob, tree.origin)
    return tuple(column.tolist() for column in columns)


@pytest.mark.parametrize("name", DRAFTERS)
@given(texts, texts, st.lists(texts, min_size=1, max_size=5))
def test_a_session_that_followed_a_text_drafts_as_a_fresh_session(
    name: str, source: list[int], prompt: list[int], chunks: list[list[int]]
) -> None:
    request = DraftRequest(tuple(prompt), GROWING_TEXT_VOCAB, texts=(SourceText(tuple(source), 5),))
    selected, text = DRAFTERS[name].open(request), list(prompt)
    for piece in chunks:
        selected.propose(DraftContext(text, len(prompt), 50), 8)
        text += piece
        context = DraftContext(text, len(prompt), 50)
        whole = replace(request, prompt=tuple(text))
        fresh = DRAFTERS[name].open(whole).propose(context, 8)
        for _ in range(2):  # a repeated proposal is the same
            assert spelled(selected.propose(context, 8)) == spelled(fresh)
