"""An index that follows a text drafts what one that is made of the whole text drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, SourceText
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.ngrams import NGramDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter
from ragspec.retrievers.methods.sam_decoding import MatchDrafter
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.trees.draft_tree import DraftTree

VOCAB = 4
DRAFTERS: dict[str, Drafter] = {
    "context": ContextDrafter(),
    "match": MatchDrafter(shortest=1),
    "suffix": SuffixDrafter(),
    "lookup": LookupDrafter(),
    "ngrams": NGramDrafter(level=3, lookahead=False),
}
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def spelled(tree: DraftTree) -> object:
    columns = (tree.tokens, tree.parents, tree.accept_prob, tree.origin)
    return tuple(column.tolist() for column in columns)


@pytest.mark.parametrize("name", DRAFTERS)
@given(texts, texts, st.lists(texts, min_size=1, max_size=5))
def test_what_was_followed_drafts_as_what_is_created_again(
    name: str, source: list[int], prompt: list[int], chunks: list[list[int]]
) -> None:
    request = DraftRequest(tuple(prompt), VOCAB, texts=(SourceText(tuple(source), 5),))
    selected, text = DRAFTERS[name].open(request), list(prompt)
    for piece in chunks:
        selected.propose(DraftContext(text, len(prompt), 50), 8)
        text += piece
        context = DraftContext(text, len(prompt), 50)
        whole = replace(request, prompt=tuple(text))
        fresh = DRAFTERS[name].open(whole).propose(context, 8)
        assert spelled(selected.propose(context, 8)) == spelled(fresh)
        assert spelled(selected.propose(context, 8)) == spelled(fresh), (
            "nor does asking twice matter"
        )
