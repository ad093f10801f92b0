from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.base import DraftContext, DraftRequest, Feedback, Prefill, top_logits_needed
from ragspec.drafters.fuse import Fuse
from ragspec.engine.engine import Engine
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftKind, DraftTree, Ints
from tests.support import tiny
from tests.support.architectures import build
from tests.support.fixed import BrokenDrafter, FixedDrafter

PROMPTS = [tiny.prompt(12, seed=1), tiny.prompt(5, seed=2), tiny.prompt(20, seed=3)]


class Learner:
    """Drafts a chain and keeps what it is told."""

    name = "learner"
    kind = DraftKind.DETERMINISTIC

    def __init__(self, k: int = 3) -> None:
        self.top_logits = k
        self.sessions: list[Learning] = []

    def open(self, request: DraftRequest) -> Learning:
        self.sessions.append(Learning(list(request.prompt)))
        return self.sessions[-1]


class Learning:
    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.root: list[int] = []
        self.prompts: list[tuple[Ints, Ints]] = []
        self.known: list[tuple[list[int], Step, Ints | None]] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.root = list(context.tokens)
        return DraftTree.build([5, 6, 7][:budget], [-1, 0, -1][:budget], "learner")

    def observe(self, feedback: Feedback) -> None:
        if isinstance(feedback, Prefill):
            assert feedback.best is not None and feedback.hidden is None
            self.prompts.append((feedback.tokens, feedback.best.host()))
        else:
            self.known.append((self.root, feedback, feedback.top))


def best_after(model: Any, text: list[int], k: int) -> list[list[int]]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    result: list[list[int]] = logits.topk(k, -1).indices.tolist()
    return result


def test_the_largest_wish_counts() -> None:
    plain = FixedDrafter([1])
    assert top_logits_needed([plain, None]) == 0
    assert top_logits_needed([plain, Learner(3), Learner(5)]) == 5
    assert Fuse([plain, Learner(4)]).top_logits == 4
    assert Fuse([plain]).top_logits == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_and_prompts_come_with_the_best_tokens(batch: int) -> None:
    model, drafter = tiny.model("llama", dtype=torch.float64), Learner()
    engine = Engine(model, drafter=[BrokenDrafter(), drafter], budget=3)
    with pytest.warns(RuntimeWarning):
        results = engine.generate(PROMPTS[:batch], max_new_tokens=5, ignore_eos=True)
    for session, prompt in zip(drafter.sessions, PROMPTS, strict=False):
        (tokens, top), *more = session.prompts
        assert not more
        assert tokens.tolist() == prompt
        assert top.tolist() == best_after(model, prompt, 3)
        assert session.known
        for text, step, known in session.known:
            assert known is not None
            whole = [text]
            for parent, token in zip(step.tree.parents, step.tree.tokens.tolist(), strict=True):
                whole.append([*whole[parent + 1], token])
            assert known.tolist() == [best_after(model, t, 3)[-1] for t in whole]
    assert all(step.top is None for result in results for step in result.steps)


def test_samples_of_one_prompt_all_receive_of_it() -> None:
    model, drafter = tiny.model("llama", dtype=torch.float64), Learner()
    engine = Engine(model, drafter=drafter, budget=3)
    engine.generate(PROMPTS[:2], Sampling(temperature=1.0, n=2, seed=1), max_new_tokens=3)
    heard = [session.prompts[0] for session in drafter.sessions]
    assert [tokens.tolist() for tokens, _ in heard] == [p for p in PROMPTS[:2] for _ in range(2)]
    assert heard[0][1].tolist() == heard[1][1].tolist() == best_after(model, PROMPTS[0], 3)


def test_nothing_is_worked_out_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr("ragspec.sampling.top_tokens.best_tokens", refuse)
    monkeypatch.setattr("ragspec.verification.causal.TreeSession.read_prompts", refuse)
    engine = Engine(tiny.model("llama", dtype=torch.float64), drafter="context", budget=4)
    engine.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("selected", [True, False])
def test_only_scores_that_nobody_changes_are_searched_when_they_are_read(
    selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def search(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        searched.append(k)
        values, places = logits.topk(k, -1)
        return values, places

    monkeypatch.setattr("ragspec.sampling.top_tokens.best_tokens", search)
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 1.0, 2.0]]])
    (top_tokens,) = TopTokens.ranked(logits, 2, [2], selected)
    assert searched == ([] if selected else [2])
    if not selected:
        logits.zero_()
    assert top_tokens.host().tolist() == top_tokens.there().tolist() == [[1, 3], [0, 3]]
    assert searched == [2], "once, whoever asks"


def test_many_scores_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragspec.sampling.top_tokens.LATE", 7)
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 1.0, 2.0]]])
    (top_tokens,) = TopTokens.ranked(logits, 1, [2], True)
    logits.zero_()
    assert top_tokens.host().tolist() == [[1], [0]]


def test_what_processors_do_to_scores_is_not_what_the_target_thought() -> None:
    model, drafter = tiny.model("llama", dtype=torch.float64), Learner()

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[..., : tiny.VOCAB // 2] = -1e9  # in place, which transformers' own never do
        return scores

    engine = Engine(model, drafter=drafter, budget=3)
    engine.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True, logits_processor=[spoil])
    (session,) = drafter.sessions
    assert session.known
    for text, _, known in session.known:
        assert known is not None
        assert known[0].tolist() == best_after(model, text, 3)[-1]


def test_path_targets_report_of_steps_only() -> None:
    drafter = Learner()
    model = build("qwen3_5_text")
    engine = Engine(model, drafter=drafter, budget=3)
    result = engine.generate([3, 4, 5, 6], max_new_tokens=6, ignore_eos=True)
    (session,) = drafter.sessions
    assert session.prompts == []
    assert len(session.known) > 0
    assert all(
        top is not None and top.shape == (len(step.tree) + 1, 3) for _, step, top in session.known
    )
    plain = Engine(model, drafter=None).generate([3, 4, 5, 6], max_new_tokens=6, ignore_eos=True)
    assert result.tokens == plain.tokens
