from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.engine.engine import Engine
from ragspec.sampling.top_tokens import BLOCK, SMALL, TopTokens, best_token, best_tokens
from tests.ragspec.verification.test_hidden_states import BEST, PROMPTS, Watcher, texts
from tests.support import tiny
from tests.support.architectures import build
from tests.support.calls import noted
from tests.support.fixed import BrokenDrafter


def best_after(model: Any, text: list[int], k: int) -> list[list[int]]:
    return tiny.logits(model, text).topk(k, -1).indices.tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_and_prompts_come_with_the_best_tokens(batch: int) -> None:
    model, drafter = tiny.model("llama", dtype=torch.float64), Watcher(BEST)
    engine = Engine(model, drafter=[BrokenDrafter(), drafter], budget=3)
    with pytest.warns(RuntimeWarning):
        results = engine.generate(PROMPTS[:batch], max_new_tokens=5, ignore_eos=True)
    for session, prompt in zip(drafter.sessions, PROMPTS, strict=False):
        (tokens, top), *more = session.prompts
        assert not more
        assert tokens.tolist() == prompt
        assert top.tolist() == best_after(model, prompt, 3)
        assert session.steps
        for root, step, top in session.steps:
            assert top is not None
            best = [best_after(model, text, 3)[-1] for text in texts(root, step.tree)]
            assert top.tolist() == best
    assert all(step.top is None for result in results for step in result.steps)


@pytest.mark.parametrize("selected", [True, False])
def test_scores_are_searched_late_unless_processors_change_them(
    selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = list[int]()
    search = noted(torch.topk, searched, lambda logits, k: k)
    monkeypatch.setattr("ragspec.sampling.top_tokens.best_tokens", search)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 1.0, 2.0]])
    (top_tokens,) = TopTokens.ranked([logits], 2, [2], selected)
    assert searched == ([] if selected else [2])
    if not selected:
        logits.zero_()
    assert top_tokens.host().tolist() == top_tokens.there().tolist() == [[1, 3], [0, 3]]
    assert searched == [2], "one search for both readers"


def test_many_scores_are_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragspec.sampling.top_tokens.LATE", 7)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 1.0, 2.0]])
    (top_tokens,) = TopTokens.ranked([logits], 1, [2], True)
    logits.zero_()
    assert top_tokens.host().tolist() == [[1], [0]]


def test_best_tokens_are_those_before_processors() -> None:
    model, drafter = tiny.model("llama", dtype=torch.float64), Watcher(BEST)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[..., : tiny.VOCAB // 2] = -1e9  # in place, unlike processors of transformers
        return scores

    engine = Engine(model, drafter=drafter, budget=3)
    engine.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True, logits_processor=[spoil])
    (session,) = drafter.sessions
    assert session.steps
    for root, _, top in session.steps:
        assert top is not None
        assert top[0].tolist() == best_after(model, root, 3)[-1]


def test_path_targets_report_best_tokens_of_steps_alone() -> None:
    drafter = Watcher(BEST)
    model = build("qwen3_5_text")
    engine = Engine(model, drafter=drafter, budget=3)
    result = engine.generate([3, 4, 5, 6], max_new_tokens=6, ignore_eos=True)
    (session,) = drafter.sessions
    assert session.prompts == []
    assert len(session.steps) > 0
    for _, step, top in session.steps:
        assert top is not None and top.shape == (len(step.tree) + 1, 3)
    plain = Engine(model, drafter=None).generate([3, 4, 5, 6], max_new_tokens=6, ignore_eos=True)
    assert result.tokens == plain.tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(97,), (1, 97), (2, 3, 97), (5, 8192)])
def test_the_best_token_is_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    result = best_token(scores)
    assert result.dtype is torch.int64 and torch.equal(result, scores.argmax(-1))


@given(st.lists(st.sampled_from([0.0, 1.0, float("inf"), float("-inf"), float("nan")]), min_size=1))
def test_best_token_of_ties_and_non_finite_scores_is_that_of_torch(scores: list[float]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        value_scores = torch.tensor([scores, scores[::-1]], dtype=dtype)
        assert best_token(value_scores).tolist() == value_scores.argmax(-1).tolist()


def test_best_token_of_scores_with_gradients_and_of_views() -> None:
    scores = torch.tensor([[0.0, 1.0, 5.0], [3.0, 2.0, 9.0]], requires_grad=True)
    assert best_token(scores[:, :2]).tolist() == [1, 0]
    assert best_token(scores.T).tolist() == [1, 1, 1]


@pytest.mark.parametrize("small", [0, SMALL])
@given(st.data())
@settings(max_examples=60)
def test_best_tokens_are_those_of_topk(small: int, data: st.DataObject) -> None:
    """By blocks, the last tokens of a vocabulary that is no multiple of a block among them."""
    size = data.draw(st.one_of(st.integers(1, 40_000), st.integers(BLOCK, 40 * BLOCK)))
    k = data.draw(st.integers(1, 12))
    levels = data.draw(st.sampled_from([3, 50, 10**6]))  # few levels: many ties
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(levels, (2, 1, size), generator=generator).float()
    if data.draw(st.booleans()):
        values[..., 1::2] = float("-inf")
    values[1, 0, -1] = levels
    with patch("ragspec.sampling.top_tokens.SMALL", small):
        top, places = best_tokens(values, k)
    assert torch.equal(top, values.topk(min(k, size)).values)
    assert torch.equal(values.gather(-1, places), top)
    assert all(len(set(row)) == min(k, size) for row in places[:, 0].tolist())
