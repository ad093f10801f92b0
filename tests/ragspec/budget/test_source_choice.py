from __future__ import annotations

import pytest

from ragspec.acceptance.base import Step
from ragspec.budget.calibration import Calibration
from ragspec.budget.experience import Experience
from ragspec.budget.gains import LEVELS
from ragspec.budget.source_choice import COSTLY_NODES, Claims, Economy
from ragspec.trees.draft_tree import DraftTree

NONE = DraftTree.empty()
SURE = DraftTree.chain([1, 2], "context", reach=[0.99, 0.98])
OTHER = DraftTree.chain([5, 6, 7], "model", reach=[0.9, 0.8, 0.7])
PLAIN = 5.0


def free(nodes: int) -> float:
    """Verify nodes at no price."""
    return 0.0


def ask(
    economy: Economy,
    before: DraftTree,
    after: DraftTree,
    tokens: tuple[int, ...],
    milliseconds: float = PLAIN,
    node: float = 0.0,
) -> int:
    """Play one step: a first source, then one that takes time; return how many nodes it is asked.

    The step's time is counted as the engine does.
    """
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
    if len(before):
        economy.appraise(before, 0)
    economy.spent("context", 0.01)
    asked = economy.allowance("model", 32)
    if asked:
        if len(after):
            economy.appraise(after, 0)
        economy.spent("model", milliseconds)
    step = Step(after if asked and len(after) else before, (), tokens)
    economy.learn_step(step, lambda nodes: nodes * node)
    return asked


def curious(experience: Experience) -> Economy:
    """Return an economy whose sources have waited long enough to be tried."""
    for source in ("silent", "failing", "model"):
        experience.source(source).passed = [10**6] * (len(LEVELS) + 1)
    return Economy(experience, probe_share=0.0)


def test_a_costly_source_that_adds_nothing_is_asked_seldom() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    asked = [ask(economy, NONE, OTHER, (9, 9, 9)) for _ in range(400)]
    assert asked[0] == 32, "its cost is not known yet"
    assert sum(map(bool, asked[1:60])) == 3, "little is known of it, so it is tried more often"
    assert 340 * 0.02 / 4 <= sum(map(bool, asked[60:])) <= 340 * 0.02, "pauses grow"


def test_a_source_that_proposes_nothing_adds_nothing() -> None:
    economy = Economy(Experience(), probe_share=0.0)
    asked = [ask(economy, SURE, NONE, (1, 2, 3)) for _ in range(30)]
    assert sum(map(bool, asked)) <= 4


def test_a_costly_source_that_pays_is_asked_every_time_but_for_little() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    asked = [ask(economy, NONE, OTHER, (5, 6, 7, 8)) for _ in range(50)]
    assert asked[1:17] == [0] * 16, "one of unknown use may not take all the time"
    assert asked[17:] == [COSTLY_NODES] * 33


def test_it_is_asked_only_where_the_others_promise_little() -> None:
    economy = Economy(Experience(), probe_share=0.0)
    for _ in range(60):
        ask(economy, SURE, SURE, (1, 2, 3))
        ask(economy, NONE, OTHER, (5, 6, 7, 8))
    assert [ask(economy, SURE, SURE, (1, 2, 3)) for _ in range(10)] == [0] * 10
    assert [ask(economy, NONE, OTHER, (5, 6, 7, 8)) for _ in range(10)] == [COSTLY_NODES] * 10


def test_what_a_source_adds_is_counted_beyond_what_there_was() -> None:
    experience = Experience()
    experience.source("model").cost.learn(8, PLAIN)
    economy = curious(experience)
    longer = DraftTree.chain([1, 2, 3, 4], "model", reach=[0.9, 0.8, 0.7, 0.6])
    ask(economy, SURE, longer, (1, 2, 3, 9))
    assert experience.source("model").gains[len(LEVELS)] == 1.0


def test_a_cheap_source_is_always_asked_for_all() -> None:
    economy = Economy(Experience(), probe_share=0.02)
    asked = [ask(economy, NONE, NONE, (7,), milliseconds=0.001 * PLAIN) for _ in range(20)]
    assert asked == [32] * 20
    assert economy.extra == 0.0


def test_one_of_middling_price_must_pay_too_but_may_draft_much() -> None:
    economy = Economy(Experience(), probe_share=0.0)
    asked = [ask(economy, NONE, OTHER, (5, 6, 7, 8), 0.05 * PLAIN) for _ in range(20)]
    assert asked[2:] == [32] * 18
    assert economy.extra == pytest.approx(0.05 * PLAIN)
    vain = [ask(economy, SURE, OTHER, (1, 2, 3), 0.05 * PLAIN) for _ in range(20)]
    assert sum(map(bool, vain)) == 3


def test_what_does_not_learn_never_probes() -> None:
    experience = Experience()
    experience.source("model").cost.learn(8, PLAIN)
    economy = Economy(experience, probe_share=0.5, learns=False)
    assert not any(ask(economy, NONE, OTHER, (5, 6, 7, 8)) for _ in range(100))
    assert economy.rate == 0.0


def test_a_fixed_budget_asks_everyone_and_still_corrects_claims() -> None:
    claims = Claims(Calibration())
    liar = DraftTree.chain([1], "a", reach=[1.0])
    for _ in range(20):
        assert claims.allowance("a", 5) == 5
        claims.appraise(liar, 0)
        assert claims.learn((2,)) == 0
    assert claims.appraise(liar, 0).reach[0] < 0.2


def test_nothing_is_left_of_a_step_that_was_never_learned() -> None:
    claims = Claims(Calibration())
    claims.appraise(SURE, 0)
    assert claims.used and claims.learn((1, 2, 3)) == 2
    assert not claims.used and claims.learn((1, 2, 3)) == 0


def test_a_source_that_proposes_nothing_takes_no_credit_for_the_next_one() -> None:
    experience = Experience()
    for source in ("silent", "model"):
        experience.source(source).cost.learn(8, PLAIN)
    economy = curious(experience)
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
    assert economy.allowance("silent", 32)
    economy.spent("silent", PLAIN)
    assert economy.allowance("failing", 32)  # nothing is spent where it fails
    assert economy.allowance("model", 32)
    economy.appraise(OTHER, 0)
    economy.spent("model", PLAIN)
    economy.learn_step(Step(NONE, (), (5, 6, 7, 8)), free)
    gains = {name: experience.source(name).gains[0] for name in ("silent", "failing", "model")}
    assert gains == {"silent": 0.0, "failing": 0.0, "model": 3.0}


def test_a_source_pays_for_the_nodes_that_only_it_offered() -> None:
    experience = Experience()
    experience.source("model").cost.learn(8, PLAIN)
    economy = curious(experience)
    ask(economy, NONE, OTHER, (5, 6, 9), node=0.25)
    assert experience.source("model").gains[0] == pytest.approx(2 - 3 * 0.25)


def draft_at(economy: Economy, outlook: float | None, gain: float) -> bool:
    """Play one step that wins `gain` plain steps where it drafts, at 0.1 plain steps a draft."""
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=8)
    asked = economy.promising(outlook)
    economy.learn_gain(gain)
    return asked


def drafting(milliseconds: float) -> Experience:
    experience = Experience()
    for _ in range(20):
        experience.draft.learn(8, milliseconds)
    return experience


def test_where_drafts_did_not_pay_none_is_made_but_now_and_then() -> None:
    economy = Economy(drafting(0.1 * PLAIN), probe_share=0.02)
    poor = [draft_at(economy, 0.05, 0.0) for _ in range(300)]
    rich = [draft_at(economy, 0.95, 1.5) for _ in range(300)]
    assert all(poor[:3]), "little is known yet"
    assert 297 * 0.2 / 4 - 2 <= sum(poor[3:]) <= 297 * 0.2, "pauses grow"
    assert all(rich)
    assert all(draft_at(economy, None, 0.0) for _ in range(9)), "nobody can tell"


def test_a_draft_that_was_not_made_teaches_nothing() -> None:
    experience = drafting(0.1 * PLAIN)
    economy = Economy(experience, probe_share=0.0)
    while draft_at(economy, 0.4, 0.05):
        pass
    before = experience.asking.to_dict()
    assert not draft_at(economy, 0.4, 9.0) and economy.declined
    assert experience.asking.to_dict() == before


def test_outlooks_that_began_to_pay_are_drafted_at_again() -> None:
    economy = Economy(drafting(0.1 * PLAIN), probe_share=0.02)
    for _ in range(100):
        draft_at(economy, 0.4, 0.0)
    later = [draft_at(economy, 0.4, 2.0) for _ in range(40)]
    assert all(later[-20:])


def test_steps_that_were_declined_bring_the_trial_of_a_source_nearer() -> None:
    """Where the outlook is poor nobody is asked: a draft model would else never be tried."""

    def steps_until_asked(declined: int) -> int:
        experience = drafting(0.1 * PLAIN)
        experience.asking.trials[0] = 3
        worth = experience.source("model")
        worth.cost.learn(8, PLAIN)
        worth.trials[0] = 3
        economy = Economy(experience, probe_share=0.02)
        for number in range(declined + 60):
            economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
            experience.asking.passed[0] = 0 if number < declined else 10**6
            assert economy.promising(0.0) == (number >= declined)
            if number >= declined and economy.allowance("model", 32):
                return number - declined
        return 60

    assert steps_until_asked(0) == 50, "a trial in 1 / 0.02 steps"
    assert steps_until_asked(30) == 20
    assert steps_until_asked(100) == 0


def teach(economy: Economy, after: tuple[DraftTree, ...], tokens: tuple[int, ...]) -> None:
    """Play a step in which a source that learns drafts OTHER, at 1 ms and as much to be taught."""
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
    asked = economy.allowance("learner", 32)
    if asked:
        economy.appraise(OTHER, 0)
        economy.spent("learner", 1.0)
    for tree in after:
        economy.appraise(tree, 0)
    economy.learn_step(Step(OTHER, (), tokens), free)
    economy.taught("learner", 1.0)


def test_a_source_that_learns_is_charged_for_all_its_time_and_credited_beyond_the_others() -> None:
    experience = Experience()
    economy = Economy(experience, probe_share=0.02)
    economy.taught("learner", 0.0)
    teach(economy, (), (5, 6, 7, 8))
    books = experience.upkeep["learner"]
    assert books.brought == pytest.approx(3.0, rel=0.01), "the past fades"
    assert books.spent == pytest.approx(2.0 / PLAIN, rel=0.01)
    assert economy.extra == 0.0, "it was asked at no price"
    experience.source("learner").passed = [10**6] * (len(LEVELS) + 1)
    better = DraftTree.chain([5, 6, 7, 8], "model", reach=[0.9, 0.8, 0.7, 0.6])
    teach(economy, (better,), (5, 6, 7, 8, 9))
    assert economy.extra == 1.0, "now it had to be worth it"
    assert books.brought == pytest.approx(3.0, rel=0.01), "the other source knew as much"


def test_a_source_rests_where_teaching_it_does_not_pay() -> None:
    experience = Experience()
    economy = Economy(experience, probe_share=0.02)
    assert not economy.rests("learner")
    economy.begin(rate=1.0 / PLAIN, plain=PLAIN, budget=32)
    for _ in range(200):
        economy.taught("learner", 0.1)
    assert economy.rests("learner") and not economy.rests("another")
    frozen = Economy(experience, probe_share=0.02, learns=False)
    before = experience.upkeep["learner"].to_dict()
    frozen.taught("learner", 5.0)
    assert all(frozen.rests("learner") for _ in range(50)), "equal runs make equal choices"
    assert experience.upkeep["learner"].to_dict() == before
    assert not Claims(Calibration()).rests("learner")
