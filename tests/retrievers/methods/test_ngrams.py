import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftRequest, SourceText
from ragspec.retrievers.methods.ngrams import NGramDrafter, NGramPool, NGramSession
from ragspec.rules.base import Step
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import check, depths, paths
from tests.support.spelling import at

VOCAB = 30
tokens = st.integers(0, 4)


def request(*prompt: int, texts: tuple[SourceText, ...] = ()) -> DraftRequest:
    return DraftRequest(prompt or (0,), VOCAB, texts=texts)


def branches(tree: DraftTree) -> list[tuple[int, ...]]:
    check(tree, VOCAB)
    return [tuple(int(tree.tokens[node]) for node in path) for path in paths(tree.parents)]


def held(session: NGramSession) -> set[tuple[int, ...]]:
    pool = session._pool
    return {(token, *rest) for token in range(VOCAB) for rest in pool.after(token)}


def test_a_full_list_drops_the_ngram_added_longest_ago() -> None:
    pool = NGramPool(level=2, guess=3)
    for last in (1, 2, 3, 1, 4):
        pool.add((9, last))
    assert pool.after(9) == [(4,), (1,), (3,)]
    assert pool.after(8) == []


def test_drafts_come_from_the_prompt_and_the_texts() -> None:
    texts = (SourceText((7, 20, 21)), SourceText((22, 7, 23, 24)))
    drafter = NGramDrafter(level=3, guess=4)
    tree = drafter.open(request(7, 8, 9, 1, 7, texts=texts)).propose(at([7, 8, 9, 1, 7]), 16)
    assert branches(tree) == [(8, 9), (23, 24), (20, 21)]
    assert tree.sources == ("ngrams",)


@given(st.lists(tokens, min_size=5, max_size=40), st.data())
def test_every_ngram_of_the_text_is_in_the_pool_at_once(
    text: list[int], data: st.DataObject
) -> None:
    level = data.draw(st.integers(2, 4))
    session = NGramDrafter(level=level, guess=1000).open(request(text[0]))
    done = 1
    while done < len(text):
        session.propose(at(text[:done]), 4)
        assert held(session) == {tuple(text[i : i + level]) for i in range(done - level + 1)}
        done += data.draw(st.integers(1, 5))


def test_ngrams_with_a_common_prefix_share_its_nodes() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7, 8, 1]
    session = NGramDrafter(level=4, guess=4, lookahead=False).open(request())
    tree = session.propose(at(text), 16)
    assert len(tree) == 7
    assert sorted(branches(tree)) == [(2, 3, 4), (2, 3, 5), (6, 7, 8)]
    prob = dict(zip(tree.tokens.tolist(), tree.accept_prob.tolist(), strict=True))
    assert prob[2] > prob[3] > prob[5] > prob[4]  # shared nodes are claimed for both
    assert len(session.propose(at(text), 3)) == 3
    assert depths(session.propose(at(text, left=3), 16).parents).max() == 2


def test_verified_branches_with_the_best_next_token_become_ngrams() -> None:
    session = NGramDrafter(level=3, guess=4).open(request(1, 2))
    session.propose(at([1, 2]), 4)
    tree = DraftTree.build([5, 6, 8], [-1, 0, -1], "other")
    session.observe(Step(tree, (), (9,), best=TopTokens.of(torch.tensor([[9], [7], [10], [11]]))))
    known = {(1, 2, 9), (2, 5, 7), (5, 6, 10), (2, 8, 11)}
    assert held(session) == known
    more = TopTokens.of(torch.tensor([[13]]))
    session.observe(Step(DraftTree.empty(), (), (12,), best=more))  # nothing proposed
    assert (2, 9, 13) in held(session)


def test_rejections_lower_accept_prob() -> None:
    text = [1, 2, 3, 1]
    session = NGramDrafter(level=3, lookahead=False).open(request(*text))
    known = []
    for turn in range(10):
        tree = session.propose(at(text), 4)
        known.append(float(tree.accept_prob[tree.parents == ROOT].sum()))
        session.observe(Step(tree, (), (20 + turn % 10,)))
        text += [20 + turn % 10, 1]
    assert known[-1] < 0.6 * known[0]


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    session = NGramDrafter(level=3).open(request(texts=(SourceText((1, 2, VOCAB)),)))
    assert session.propose(at([1]), 4).tokens.tolist() == [2]
