from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, Prefill
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.methods.hierarchy_drafting import Form, HierarchyDrafter
from ragspec.retrievers.methods.ngrams import NGramPool
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, depths
from tests.support import tiny
from tests.support.fixed import FixedDrafter
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity, expected

VOCAB = tiny.VOCAB
FORMS: tuple[Form, ...] = ("trie", "ngram")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of the answers, one of other text, and a pool of n-grams."""
    root = tmp_path_factory.mktemp("stores")
    answers = [tokens for settings in SAMPLINGS for tokens in expected(settings, 4)]
    CorpusIndex.build(answers, None, root / "m.store", vocab_size=VOCAB).close()
    CorpusIndex.build(PROMPTS, None, root / "c.store", vocab_size=VOCAB).close()
    NGramPool.common(answers).save(root / "n.store")
    return root


def names(tree: DraftTree) -> dict[int, str]:
    check(tree, VOCAB)
    return {int(t): tree.sources[s] for t, s in zip(tree.tokens, tree.source, strict=True)}


def drafted(drafter: HierarchyDrafter, text: list[int], budget: int = 16) -> DraftTree:
    session = drafter.open(DraftRequest(tuple(text), VOCAB))
    return session.propose(DraftContext(list(text), len(text), 50), budget)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("form", FORMS)
def test_the_text_stays_as_it_is(form: Form, settings: str, batch: int, folder: Path) -> None:
    drafter = HierarchyDrafter(folder / "m.store", str(folder / "c.store"), form=form)
    check_identity(drafter, settings, batch)


def pool(*ngrams: tuple[int, ...]) -> NGramPool:
    instance = NGramPool()
    for ngram in ngrams:
        instance.add(ngram)
    return instance


@pytest.mark.parametrize("form", FORMS)
def test_every_level_drafts_under_its_name(form: Form) -> None:
    context = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    corpus = FixedDrafter([30, 31, 32, 33], accept_prob=[0.5, 0.4, 0.3, 0.2])
    result = names(drafted(HierarchyDrafter(pool((1, 20, 21, 22, 23)), corpus, form=form), context))
    assert result[2] == ("context" if form == "trie" else "ngrams")
    assert result[20] == "answers"
    assert result[30] == "statistics"


def test_a_full_context_starves_no_other_level() -> None:
    context = [token for i in range(7) for token in (1, *range(40 + 5 * i, 45 + 5 * i))] + [1]
    corpus = FixedDrafter([30, 31, 32, 33], accept_prob=[0.5, 0.4, 0.3, 0.2])
    answers = pool((1, 20, 21, 22, 23))
    result = names(drafted(HierarchyDrafter(answers, corpus, form="ngram"), context, 64))
    counts = [list(result.values()).count(name) for name in ("ngrams", "answers", "statistics")]
    assert sum(counts) == 28  # seven n-grams of four more tokens
    assert counts[0] >= 14
    assert counts[1] >= 2
    assert counts[2] >= 3


def test_the_common_ngrams_of_the_answers_come_first() -> None:
    answers = [[1, 9, 9, 9, 9], *[[1, 20 + i, 2, 2, 2] for i in range(8)], [1, 9, 9, 9, 9]]
    tree = drafted(HierarchyDrafter(NGramPool.common(answers), form="ngram"), [3, 1], 2)
    assert tree.tokens.tolist() == [9, 9]


def test_the_ngram_form_asks_the_corpus_as_the_paper_does() -> None:
    requests: list[dict[str, Any]] = []

    class Store:
        def drafter(self, **options: Any) -> Drafter:
            requests.append(options)
            return FixedDrafter([5])

    HierarchyDrafter(None, Store(), form="ngram")
    HierarchyDrafter(None, Store(), form="trie")
    assert requests == [{"longest": 2, "shortest": 1, "shorter": (1,), "depth": 4}, {}]


def test_a_corpus_of_answers_becomes_the_models_ngrams(folder: Path) -> None:
    with CorpusIndex.open(folder / "m.store") as store:
        text = expected("greedy", 4)[0]
        for answers in (store, folder / "n.store"):
            tree = drafted(HierarchyDrafter(answers, form="ngram"), [90, text[0]])
            assert set(tree.sources) == {"answers"}
            assert depths(tree.parents).max() == 4
            assert text[1] in tree.tokens[tree.parents < 0]


def test_levels_may_be_left_out() -> None:
    for form in FORMS:
        drafter = HierarchyDrafter(form=form, lookahead=False)
        assert drafter.top_logits == 0
        assert drafter.kind is DraftKind.DETERMINISTIC
        assert isinstance(drafter, Drafter)
        assert len(drafted(drafter, [1, 2, 3, 4, 5, 6, 1])) > 0
    assert HierarchyDrafter(form="trie").top_logits == 8
    assert HierarchyDrafter(form="ngram").top_logits == 1


def test_second_choices_stand_in_for_lookahead() -> None:
    session = HierarchyDrafter(form="trie").open(DraftRequest((1, 2), VOCAB))
    session.observe(Prefill(np.array([1, 2]), TopTokens.of(torch.tensor([[7, 8], [9, 10]]))))
    tree = session.propose(DraftContext([1, 2], 2, 50), 4)
    assert names(tree) == {9: "recycling", 10: "recycling"}


def test_stores_of_another_model_or_tokenizer_are_refused(tmp_path: Path) -> None:
    right, wrong = tiny.model("llama"), tiny.model("llama", seed=7)
    texts = [[1, 2, 3, 4, 5, 6]]
    CorpusIndex.build(texts, tiny.tokenizer(), tmp_path / "c.store", model=right).close()
    pool((1, 2, 3, 4, 5)).save(tmp_path / "n.store", model=right)
    for name in ("c.store", "n.store"):
        drafter = HierarchyDrafter(tmp_path / name)
        drafter.fits(right, tiny.tokenizer())
        drafter.fits(None, tiny.tokenizer())
        with pytest.raises(StoreError, match="another model"):
            drafter.fits(wrong, tiny.tokenizer())
    with pytest.raises(StoreError, match="another tokenizer"):
        HierarchyDrafter(tmp_path / "c.store").fits(right, tiny.bpe_tokenizer())


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="form"):
        HierarchyDrafter(form="tree")  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        HierarchyDrafter(tmp_path / "nothing")
