"""The target view of a rule: tokens, distributions and ends of nodes, singly or all at once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragspec.drafters.base import Ratio
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.processors import HFProcessor
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule, StopState
from ragspec.trees.draft_tree import ROOT, DraftTree
from tests.support.calls import noted

V = 50
CONTEXT = [3, 4, 5, 6]
TREE = DraftTree.build([7, 8, 9, 7], [-1, -1, 0, 2], "test")
PATHS = [[], [7], [8], [7, 9], [7, 9, 7]]


def logits() -> torch.Tensor:
    return 3 * torch.randn(5, V, generator=torch.Generator().manual_seed(0))


def distribution(**chosen: Any) -> TokenDistribution:
    return TokenDistribution(
        Sampling(**{"temperature": 1.0, **chosen}), NoiseStream(1), prompt_length=2
    )


def view(mine: TokenDistribution, chosen: Sequence[int] | None = None, new: int = 100) -> RowView:
    stop = StopState(StopRule(frozenset({9}), new))
    return RowView(logits(), TREE, mine, stop, CONTEXT, chosen)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"top_k": 5, "presence_penalty": 2.0},
    {"top_p": 0.8, "min_new_tokens": 4},
]


@pytest.mark.parametrize("chosen", SETTINGS)
def test_tokens_of_all_nodes_equal_those_of_single_nodes(chosen: dict[str, Any]) -> None:
    mine = distribution(**chosen)
    alone = [view(mine).token(node) for node in (3, 0, ROOT, 2, 1)]
    together = view(mine).all_tokens().tolist()
    assert [together[node + 1] for node in (3, 0, ROOT, 2, 1)] == alone
    for node, path in zip(range(-1, 4), PATHS, strict=True):
        row = mine.process(logits()[node + 1 : node + 2], CONTEXT, [path])
        assert together[node + 1] == int(mine.select(row, [2 + len(path)]))


def test_plain_rows_are_chosen_with_one_argmax_and_lazy_ones_never_together() -> None:
    def chosen(mine: TokenDistribution) -> list[Sequence[int] | None]:
        stop = StopState(StopRule(frozenset(), 100))
        small = RowView(logits()[1:2], DraftTree.empty(), mine, stop, CONTEXT)
        views = [view(mine), small]
        small.prepare_batch(views)
        return [each.chosen for each in views]

    greedy = TokenDistribution(Sampling(), NoiseStream(0))
    assert chosen(greedy) == [logits().argmax(-1).tolist(), logits()[1:2].argmax(-1).tolist()]
    assert chosen(distribution(no_repeat_ngram_size=2)) == [None, None]


def test_a_node_is_processed_once_however_often_it_is_requested() -> None:
    calls: list[list[int]] = []
    count = noted(lambda ids, scores: scores, calls, lambda ids, scores: ids[0].tolist())
    processors = [HFProcessor(count)]
    known = view(TokenDistribution(Sampling(temperature=1.0), NoiseStream(1), 2, processors))
    known.token(2)
    known.probabilities(2)
    known.logprob(2, 7, 1)
    assert calls == [[*CONTEXT, 7, 9]]


def test_logprobs_are_of_the_processed_logits_at_temperature_one() -> None:
    result = view(distribution(temperature=0.3, top_k=2, logit_bias={7: 5.0})).logprob(0, 7, 3)
    expected = logits()[1].double()
    expected[7] += 5.0
    logp = expected.log_softmax(-1)
    assert result.logprob == pytest.approx(float(logp[7]), abs=1e-6)
    values, tokens = logp.topk(3)
    assert [token for token, _ in result.top] == tokens.tolist()
    assert [value for _, value in result.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_the_text_ends_with_an_end_token_or_at_its_length() -> None:
    known = view(distribution(), new=3)
    assert [known.ends(node) for node in range(-1, 4)] == [False, False, False, True, True]
    assert view(distribution(), new=1).ends(0)


def test_tokens_that_were_chosen_together_are_used_as_they_are() -> None:
    known = view(distribution(), chosen=[1, 2, 3, 4, 5])
    assert [known.token(node) for node in range(-1, 4)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "chosen", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"no_repeat_ngram_size": 2}]
)
def test_a_view_ignores_tokens_committed_later(chosen: dict[str, Any]) -> None:
    """Committed tokens are appended to the list of the view's context."""
    mine, context = distribution(**chosen), list(CONTEXT)
    early = view(mine)
    late = RowView(logits(), TREE, mine, StopState(StopRule(frozenset({9}), 100)), context)
    context.extend([7, 9, 5])
    for node in range(-1, 4):
        assert torch.equal(late.scores(node), early.scores(node))
        assert late.index(node) == early.index(node)
        assert late.token(node) == early.token(node)
        assert late.logprob(node, 8, 2) == early.logprob(node, 8, 2)


def test_ratio_is_the_prior_until_its_counts_follow_the_outcomes() -> None:
    ratio = Ratio()
    assert (ratio.share(8.0), ratio.share(8.0, 0.6)) == pytest.approx((1.0, 0.6))
    for hit in (True, False, False):
        ratio.learn(0.5, hit, 0.9)
    assert (ratio.accepted, ratio.claimed) == pytest.approx((0.81, 0.5 * (0.81 + 0.9 + 1.0)))
    assert ratio.share(2.0) == pytest.approx((2.0 + 0.81) / (2.0 + 1.355))
    for _ in range(300):
        ratio.learn(0.5, False, 0.97)
    assert ratio.share(0.5) < 0.04
    for i in range(300):
        ratio.learn(0.25, i % 2 == 0, 0.99)
    assert ratio.share(1.0) == pytest.approx(2.0, rel=0.1), "half of the time, not a quarter"
