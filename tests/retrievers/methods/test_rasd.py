from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import Drafter, DraftRequest, SourceText
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import RuleError
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.rasd import Rasd, RasdSession
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from tests.support import tiny
from tests.support.fixed import FixedDrafter
from tests.support.identities import target
from tests.support.spelling import at, check_draft, spelled


def propose(rasd: Rasd, budget: int = 16, vocab: int = 100) -> DraftTree:
    tree = opened(rasd, vocab).propose(at([1, 2]), budget)
    check_draft(tree, vocab, budget)
    return tree


def opened(rasd: Rasd, vocab: int = 100) -> RasdSession:
    return rasd.open(DraftRequest((1, 2), vocab))


def model(tokens: Sequence[int], accept_prob: Sequence[float], **more: Any) -> FixedDrafter:
    return FixedDrafter(tokens, "model", accept_prob=accept_prob, kind=DraftKind.COUPLED, **more)


def result(tokens: Sequence[int], accept_prob: Sequence[float], **more: Any) -> FixedDrafter:
    return FixedDrafter(tokens, "result", accept_prob=accept_prob, **more)


DISTRIBUTIONS = [(ROOT, [5, 9, 7], [0.9, 0.05, 0.02]), (0, [6, 4], [0.7, 0.2])]


def test_tokens_outside_the_draft_distribution_are_pruned() -> None:
    draft = model([5, 6], [0.9, 0.6], distributions=DISTRIBUTIONS)
    text = result([5, 3, 8], [0.6, 0.5, 0.4])  # 3 is no likely token after 5
    assert set(spelled(propose(Rasd(draft, [text], grace=None)))) == {(5,), (5, 6)}
    for path in ((7, 8), (5, 6, 8)):  # 7 is third, and no distribution follows 7 or 6
        text = result([*path], [0.6, 0.5, 0.4][: len(path)])
        assert path in spelled(propose(Rasd(draft, [text], grace=None)))


def test_a_branch_survives_by_rank_or_by_probability() -> None:
    draft = model([5], [0.9], distributions=DISTRIBUTIONS)
    text = result([7], [0.6])

    def selected(**settings: Any) -> bool:
        return (7,) in spelled(propose(Rasd(draft, [text], grace=None, **settings)))

    for rank, least, survives in ((3, 1.0, True), (2, 0.03, False), (2, 0.02, True), (0, 0, True)):
        assert selected(prune_rank=rank, prune_probability=least) is survives


def test_a_pruned_branch_keeps_a_share_of_its_accept_prob() -> None:
    draft = model([5, 6], [0.9, 0.27], distributions=DISTRIBUTIONS)
    text = result([5, 3, 8], [0.6, 0.3, 0.24])
    accept_prob = spelled(propose(Rasd(draft, [text], grace=0.25)))
    plain = spelled(propose(Rasd(draft, [text], prune_rank=0, prune_probability=0)))
    assert accept_prob[5, 3] == pytest.approx(0.25 * plain[5, 3])
    assert accept_prob[5, 3, 8] == pytest.approx(0.25 * plain[5, 3, 8])


@pytest.mark.parametrize(("token", "grows"), [(3, True), (6, False)])
def test_the_share_follows_what_the_target_accepts(token: int, grows: bool) -> None:
    draft = model([5, 6], [0.9, 0.6], distributions=DISTRIBUTIONS)
    session = opened(Rasd(draft, [result([5, 3, 8], [0.6, 0.5, 0.4])], grace=0.25))
    before = session.share
    for _ in range(10):
        session.observe(Step(session.propose(at([1, 2]), 8), (), (5, token)))
    assert (session.share > before) is grows
    assert session.pruned == 10


def test_without_a_model_draft_the_retrieved_tree_is_unpruned() -> None:
    tree = propose(Rasd(model([], []), [result([7, 8], [0.7, 0.6])]))
    assert tree.tokens.tolist() == [7, 8]
    assert tree.kind is DraftKind.COUPLED
    assert len(propose(Rasd(model([], []), [result([], [])]))) == 0
    empty = model([], [], distributions=[(ROOT, [5], [0.9])])
    assert propose(Rasd(empty, [result([7, 8], [0.7, 0.6])])).tokens.tolist() == [7, 8]


def test_a_sampled_drafter_is_judged_by_equality() -> None:
    sampled = FixedDrafter([5, 5], "sampled", kind=DraftKind.SAMPLED, siblings=True)
    rasd = Rasd(sampled, [result([7], [0.5])])
    assert rasd.kind is DraftKind.COUPLED
    assert sorted(propose(rasd).tokens.tolist()) == [5, 7]
    with pytest.raises(RuleError):
        Engine(tiny.model(), drafter=rasd, rule="multi-step")


def test_malformed_distributions_prune_nothing() -> None:
    draft = model([5], [0.9], distributions=[(ROOT, [5, 6], [0.9])])
    session = opened(Rasd(draft, [result([7], [0.6])]))
    assert set(spelled(session.propose(at([1, 2]), 8))) == {(5,), (7,)}


@given(
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.tuples(st.integers(-1, 5), st.permutations(range(5))), max_size=4),
    st.integers(0, 8),
)
def test_any_trees_and_distributions_give_a_tree(
    drafted: list[int], copied: list[int], known: list[tuple[int, list[int]]], budget: int
) -> None:
    chances = [0.5, 0.3, 0.1, 0.005, 0.001]
    distributions = [(node, tokens, chances) for node, tokens in known]
    rasd = Rasd(
        model(drafted, [0.9**i for i in range(len(drafted))], distributions=distributions),
        [result(copied, [0.8**i for i in range(len(copied))])],
        prune_rank=2,
    )
    propose(rasd, budget, vocab=5)


def test_the_name_rasd_builds_context_and_recycling() -> None:
    built = Engine(target(), drafter="rasd").drafter
    assert isinstance(built, Rasd)
    assert [each.name for each in built.drafters] == ["context", "recycling"]
    assert forwards(built) < 40


def test_texts_and_model_together_need_no_more_steps_than_either() -> None:
    small = ModelDrafter(target(), depth=2, min_expected_gain=0.0)
    both = forwards(Rasd(small, [ContextDrafter()]))
    assert both <= min(forwards(small), forwards(ContextDrafter()))


def test_a_weak_draft_model_suppresses_texts_only_without_grace() -> None:
    unlike = ModelDrafter(tiny.model(seed=1, dtype=torch.float64), depth=1, min_expected_gain=0.0)
    texts = forwards(ContextDrafter())
    paper = forwards(Rasd(unlike, [ContextDrafter()], grace=None))
    assert texts <= forwards(Rasd(unlike, [ContextDrafter()])) < paper


def forwards(drafter: Drafter) -> int:
    """Return the target's forwards for an answer of which a text with errors is passed."""
    text = tiny.prompt(40, seed=5)
    answer = Engine(target(), drafter=None).generate(text, max_new_tokens=40, ignore_eos=True)
    spoiled = [(t + 1) % tiny.VOCAB if i % 7 == 3 else t for i, t in enumerate(answer.tokens)]
    engine = Engine(target(), drafter=drafter, budget=12)
    inputs = (SourceText(tuple(spoiled)),)
    result = engine.generate(text, max_new_tokens=40, ignore_eos=True, texts=inputs)
    assert result.tokens == answer.tokens
    return int(result.report.forwards)
