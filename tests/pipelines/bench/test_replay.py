"""Known texts in the place of a model: the counts are those of a real run."""

from __future__ import annotations

import pytest

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.bench.replay import Known, Replay
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter
from tests.support import tiny
from tests.support.fixed import FixedDrafter

PROMPTS = [(5, 6, 7, 8, 9, 5, 6, 7), (3, 4, 3, 4, 3), (50, 51, 52)]


@pytest.mark.parametrize("budget", [0, 2, 9])
@pytest.mark.parametrize("several", [False, True])
def test_the_counts_are_those_of_the_engine(budget: int, several: bool) -> None:
    def drafters() -> list[ContextDrafter | LookupDrafter]:
        return [ContextDrafter(), LookupDrafter()] if several else [ContextDrafter()]

    engine = Engine(tiny.model("llama"), drafter=drafters(), budget=budget)
    replay = Replay(drafters(), budget, tiny.VOCAB)
    tokens = forwards = positions = 0
    accepted: dict[str, int] = {}
    for prompt in PROMPTS:
        made = engine.generate(list(prompt), max_new_tokens=24)
        report = made.report
        steps = replay.play(Known(prompt, tuple(made.tokens), room=24))
        assert steps == report.forwards
        tokens += report.tokens
        forwards += report.forwards + report.prefill_forwards
        positions += report.forwards + report.drafted
        for name, number in report.accepted_by_source.items():
            accepted[name] = accepted.get(name, 0) + number
    found = replay.result
    assert (found.tokens, found.texts, found.positions) == (tokens, 3, positions)
    assert found.tokens_per_forward == pytest.approx(tokens / forwards)
    assert found.accepted == accepted
    assert bool(accepted) == (budget > 0)


def test_without_a_drafter_every_token_is_a_step() -> None:
    replay = Replay(None, 4, 20)
    assert replay.play(Known((1, 2), (3, 4, 5))) == 2
    assert replay.result.tokens_per_step == replay.result.tokens_per_forward == 1.0
    assert replay.result.nodes == 1.0


def test_a_perfect_chain_and_a_useless_one() -> None:
    replay = Replay(FixedDrafter([4, 5, 6]), 3, 20)
    assert replay.play(Known((1,), (3, 4, 5, 6, 7))) == 1
    assert replay.result.tokens_per_step == 4.0
    assert replay.result.nodes == 4.0
    assert replay.play(Known((1,), (3, 9, 9, 9))) == 3
    assert replay.play(Known((1,), (3,))) == 0


def test_the_room_limits_the_depth_of_drafts() -> None:
    for room, positions in ((None, 2), (10, 4)):
        replay = Replay(FixedDrafter([4, 5, 6]), 3, 20)
        replay.play(Known((1,), (3, 4, 5), room=room))
        assert replay.result.positions == positions


def test_faults_are_counted_and_bad_settings_refused() -> None:
    replay = Replay(FixedDrafter([99]), 3, 20)  # no such token
    with pytest.warns(RuntimeWarning, match="switched off"):
        replay.play(Known((1,), (3, 4, 5, 6, 7)))
    assert replay.result.faults == {"fixed": 3}
    with pytest.raises(InputError, match="costs"):
        Replay(ContextDrafter(), "auto", 20)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="empty"):
        replay.play(Known((1,), ()))
