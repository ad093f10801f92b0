"""The loop: rows that end independently, steps launched ahead, and mutants that tests detect."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.engine.handle import RequestHandle
from ragspec.rules.base import ALL_KINDS, Rule, Step, TargetView, Verdict
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.penalties import Penalties
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.static.session import StaticSession
from tests.ragspec.engine.test_engine import flat
from tests.support import tiny
from tests.support.calls import failing, noted
from tests.support.noisy import NoisyTrees

PROMPTS = [[5, 6, 7, 8, 9, 5], [40, 41, 3], [9] * 8, [1, 2, 3, 4, 5]]
NEW = 24
SAMPLED = Sampling(temperature=0.9, repetition_penalty=1.3, seed=[3, 4, 5, 6])


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return tokens_of(plain)


@pytest.fixture(scope="module")
def drafted(model: Any, expected: list[list[int]]) -> Engine:
    truth = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
    return Engine(model, drafter=NoisyTrees(truth), budget=10)


def written(engine: Engine, **options: Any) -> Any:
    return engine.generate(PROMPTS, SAMPLED, max_new_tokens=NEW, ignore_eos=True, **options)


def tokens_of(engine: Engine) -> list[list[int]]:
    return [result.tokens for result in written(engine)]


TRUE_INDEX, TRUE_MOVE, TRUE_APPLY = RowView.index, SequenceCache.move, Penalties.apply


def apply_without_drafts(self: Penalties, logits: Any, context: Any, paths: Any) -> torch.Tensor:
    return TRUE_APPLY(self, logits, context, [[] for _ in paths])


@pytest.mark.parametrize(
    "mutant",
    [
        (RowView, "index", lambda view, node: TRUE_INDEX(view, node) + (node >= 0)),
        (SequenceCache, "move", lambda cache, source, start: TRUE_MOVE(cache, source - 1, start)),
        (Penalties, "apply", apply_without_drafts),
    ],
    ids=["noise index off by one", "wrong node in the cache", "penalties without drafted tokens"],
)
def test_wrong_noise_caches_and_penalties_change_tokens(
    mutant: Any, drafted: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    assert tokens_of(drafted) != expected


def test_each_row_ends_at_its_first_end_token(drafted: Engine, expected: list[list[int]]) -> None:
    ends = [tokens[cut] for tokens, cut in zip(expected, (2, 9), strict=False)]
    results = written(drafted, stop_token_ids=ends)
    for result, whole in zip(results, expected, strict=True):
        stops = [place for place, token in enumerate(whole) if token in ends]
        assert result.tokens == (whole[: stops[0] + 1] if stops else whole)
        assert result.finish_reason == ("stop" if stops else "length")
    assert len({len(result.tokens) for result in results}) > 1


class Counting(Rule):
    """A walk that counts its verdicts over a row, and calls every position's excess 0.5."""

    name, label, accepts = "counting", "approximate", ALL_KINDS

    def __init__(self, opened: list[Counting] | None = None) -> None:
        self.opened = [] if opened is None else opened
        self.verdicts = 0
        self.last = Verdict((), None)

    def open(self) -> Counting:
        self.opened.append(Counting(self.opened))
        return self.opened[-1]

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        self.verdicts += 1
        self.label = f"bounded(tv<={self.verdicts})"
        path, token = (result := Walk().judge(tree, target)).path, result.token
        self.last = Verdict(path, token, (0.5,) * (len(path) + (token is not None)))
        return self.last


def test_each_row_opens_its_rule(model: Any, drafted: Engine, expected: list[list[int]]) -> None:
    rule = Counting()
    engine = Engine(model, drafter=drafted.drafter, budget=10, rule=rule)
    results = written(engine, stop_token_ids=[expected[0][4]])
    assert rule.verdicts == 0 and len(rule.opened) == len(results) == 4
    for result, row in zip(results, rule.opened, strict=True):
        assert row.verdicts == len(result.steps)
        assert result.label == f"bounded(tv<={row.verdicts})"
        figures = [figure for step in result.steps for figure in step.excess]
        assert len(figures) == len(result.tokens)  # cut where the text was cut
        assert result.report.tv_excess == 0.5 * (len(figures) - 1) / len(figures)  # less prefill


def test_steps_of_each_row_join_to_its_text(model: Any, drafted: Engine) -> None:
    narrow = Engine(model, drafter=None, max_batch_size=2)
    known: defaultdict[int, list[int]] = defaultdict(list)

    def on_step(row: int, step: Step) -> None:
        known[row].extend(step.tokens)

    for engine, sampling in ((drafted, SAMPLED), (narrow, replace(SAMPLED, n=2))):
        known.clear()
        results = engine.generate(PROMPTS, sampling, max_new_tokens=NEW, on_step=on_step)
        for number, result in enumerate(flat(results)):
            tokens = known[number]
            assert [t for step in result.steps for t in step.tokens] == result.tokens == tokens
            assert len(result.steps) == result.report.forwards + result.report.prefill_forwards


@pytest.mark.parametrize("count", [2, 4, 7, 11])
def test_a_criterion_inside_a_draft_cuts_its_step(count: int, model: Any, plain: Engine) -> None:
    whole = plain.generate(PROMPTS[0], max_new_tokens=NEW).tokens
    truth, rule = {tuple(PROMPTS[0]): whole}, Counting()
    engine = Engine(model, drafter=NoisyTrees(truth, spoiled=0.0), budget=27, rule=rule)

    def ends(ids: torch.Tensor, scores: Any) -> bool:
        return ids.shape[1] >= len(PROMPTS[0]) + count

    options: Any = {"max_new_tokens": NEW, "logprobs": 1, "stopping_criteria": [ends]}
    result, reference = (using.generate(PROMPTS[0], **options) for using in (engine, plain))
    last = result.steps[-1]
    judged = rule.opened[0].last
    assert len(judged.path) + 1 > len(last.tokens)  # the text ends inside the accepted nodes
    assert result.tokens == reference.tokens == whole[:count]
    assert result.finish_reason == "stop"
    assert [scored.token for scored in result.logprobs] == result.tokens
    assert [scored.token for scored in reference.logprobs] == result.tokens
    assert result.report.tokens == len(result.tokens)
    assert [token for step in result.steps for token in step.tokens] == result.tokens
    assert all(len(step.excess) == len(step.tokens) for step in result.steps)
    assert last.path == judged.path[: len(last.tokens)]
    assert result.report.accepted == sum(len(step.path) for step in result.steps)


@pytest.fixture(scope="module")
def target(model: Any) -> CausalTarget:
    return open_target(model, "eager")


@pytest.fixture(scope="module")
def static(target: CausalTarget, drafted: Engine) -> Engine:
    return Engine(target, tiny.tokenizer(), drafter=drafted.drafter, budget=10)


def ended(handle: RequestHandle) -> tuple[list[int], BaseException | None]:
    """Return all tokens that a caller received, and the error that ended the text."""
    results: list[int] = []
    with contextlib.suppress(ZeroDivisionError):
        for step in handle:
            results += step.tokens
    return results, handle.future.exception()


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record when forwards are launched, settle and are discarded."""
    results: list[str] = []
    for name in ("launch", "settle", "discard_uncommitted"):
        noting = noted(getattr(StaticSession, name), results, lambda *_, name=name: name)
        monkeypatch.setattr(StaticSession, name, noting)
    return results


def test_the_next_forward_runs_while_callbacks_get_tokens(
    static: Engine, expected: list[list[int]], message: list[str]
) -> None:
    known: list[list[str]] = []

    def on_step(row: int, step: Step) -> None:
        known.append(message.copy())
        message.clear()

    assert static.target.open(1, 9).ahead
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "on_step": on_step}
    result = static.generate(PROMPTS[0], replace(SAMPLED, seed=3), **options)
    assert result.tokens == expected[0]
    assert known[0][-1] == "launch", "the prompt is read, and the first step runs"
    assert all(each == ["settle", "launch"] for each in known[1:-1])
    assert known[-1] == ["settle"], "nothing is launched for texts that have ended"


def test_a_row_that_leaves_discards_the_forward_launched_ahead(
    static: Engine, expected: list[list[int]], message: list[str]
) -> None:
    """Callers leave or raise at any time, while a forward runs."""
    rng = random.Random(0)
    with static.with_limits(4) as pool:
        for _ in range(5):
            handles = []
            for seed, prompt in enumerate(PROMPTS, start=3):
                leaves = failing(ZeroDivisionError("a caller"), (rng.choice([1, 2, 3, 99]),))
                options: Any = {"ignore_eos": True, "on_step": leaves}
                sampling = replace(SAMPLED, seed=seed)
                handles.append(pool.submit(prompt, sampling, max_new_tokens=NEW, **options))
            for handle, whole in zip(handles, expected, strict=True):
                result, error = ended(handle)
                assert result == whole[: len(result)]
                assert len(result) == len(whole) or isinstance(error, ZeroDivisionError)
    assert "discard_uncommitted" in message


def test_a_fault_of_a_forward_launched_ahead_loses_no_token(
    target: CausalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, drafter=None)
    whole = engine.generate(PROMPTS[0], max_new_tokens=NEW).tokens
    launch, known = StaticSession.launch, list[int]()

    def failing(self: StaticSession, *inputs: Any) -> None:
        if len(known) == 2:
            raise ZeroDivisionError("a device fault")
        launch(self, *inputs)

    monkeypatch.setattr(StaticSession, "launch", failing)
    with pytest.raises(ZeroDivisionError, match="a device fault"):
        engine.generate(PROMPTS[0], max_new_tokens=NEW, on_step=lambda _, s: known.extend(s.tokens))
    assert known == whole[:3], "the tokens before the fault are delivered first"
    monkeypatch.undo()
    assert engine.generate(PROMPTS[0], max_new_tokens=NEW).tokens == whole
