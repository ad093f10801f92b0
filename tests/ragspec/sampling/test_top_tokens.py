from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.sampling.top_tokens import BLOCK, SMALL, best_token, best_tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(97,), (1, 97), (2, 3, 97), (5, 8192)])
def test_the_best_token_is_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    result = best_token(scores)
    assert result.dtype is torch.int64 and torch.equal(result, scores.argmax(-1))


@given(st.lists(st.sampled_from([0.0, 1.0, float("inf"), float("-inf"), float("nan")]), min_size=1))
def test_ties_and_strange_scores_are_judged_as_torch_does(scores: list[float]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        value_scores = torch.tensor([scores, scores[::-1]], dtype=dtype)
        assert best_token(value_scores).tolist() == value_scores.argmax(-1).tolist()


def test_scores_that_learn_and_views_of_others_are_read_too() -> None:
    scores = torch.tensor([[0.0, 1.0, 5.0], [3.0, 2.0, 9.0]], requires_grad=True)
    assert best_token(scores[:, :2]).tolist() == [1, 0]
    assert best_token(scores.T).tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(97,), (2, 3, 97), (9, 8 * BLOCK), (5, 8192), (40, 8192 + 17)])
@pytest.mark.parametrize("k", [1, 8])
def test_the_best_tokens_are_those_of_a_full_sort(shape: tuple[int, ...], k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    assert torch.equal(best_tokens(logits, k)[1], logits.argsort(-1, descending=True)[..., :k])


def test_the_last_tokens_of_a_ragged_vocabulary_are_detected() -> None:
    size = BLOCK * 20 + 3
    logits = torch.zeros(SMALL // size + 1, size)
    logits[:, -1], logits[:, 4] = 2.0, 1.0
    assert best_tokens(logits, 2)[1].tolist() == [[size - 1, 4]] * len(logits)


def test_no_more_tokens_are_requested_for_than_there_are() -> None:
    assert best_tokens(torch.tensor([0.0, 2.0, 1.0]), 8)[1].tolist() == [1, 2, 0]


@given(st.data())
@settings(max_examples=60)
def test_values_and_places_are_those_of_topk(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40_000))
    k = data.draw(st.integers(1, min(size, 12)))
    levels = data.draw(st.sampled_from([3, 50, 10**6]))  # few levels: many ties
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(levels, (2, size), generator=generator).float()
    if data.draw(st.booleans()):
        values[:, 1::2] = float("-inf")
    top, places = best_tokens(values, k)
    assert torch.equal(top, values.topk(k).values)
    assert torch.equal(values.gather(-1, places), top)
    assert all(len(set(row)) == k for row in places.tolist())
