"""Whether to draft, and whom to ask: by what it brought."""

from __future__ import annotations

import pytest

from ragspec.budget.base import Adviser, Settings
from ragspec.budget.calibration import Calibration
from ragspec.budget.cost_curve import ROWS, CostLine
from ragspec.budget.gains import BUCKETS, PAUSE, PROB_EDGES, Experience
from ragspec.budget.source_choice import COSTLY_NODES, EXPLORING, MIN_UPDATES, TRIED, SourceChoice
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree

NONE = DraftTree.empty()
SURE = DraftTree.chain([1, 2], "context", accept_prob=[0.99, 0.98])
OTHER = DraftTree.chain([5, 6, 7], "model", accept_prob=[0.9, 0.8, 0.7])
PLAIN = 5.0
LARGEST = BUCKETS[-1]


def line(node: float) -> CostLine:
    """Return the seconds of forwards in which every node is worth as many tokens, at rate 1."""
    return CostLine([0.001 * node * n for n in ROWS])


def choice(experience: Experience, share: float = 0.02) -> SourceChoice:
    return SourceChoice(experience, Settings(0.03, share, LARGEST))


def ask(
    adviser: SourceChoice,
    before: DraftTree,
    after: DraftTree,
    tokens: tuple[int, ...],
    milliseconds: float = PLAIN,
    node: float = 0.0,
) -> int:
    """Play one step: a first source, then one that takes time; return how many nodes it is asked.

    The step's time is counted as the engine does.
    """
    adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
    adviser.nodes(0.95, 32)
    if len(before):
        adviser.appraise(before, 0)
    adviser.spent("context", 0.01)
    request = adviser.allowance("model", 32)
    if request:
        if len(after):
            adviser.appraise(after, 0)
        adviser.spent("model", milliseconds)
    step = Step(after if request and len(after) else before, (), tokens)
    adviser.learn_step(step, line(node), 1.0)
    return request


def curious(experience: Experience) -> SourceChoice:
    """Return an adviser whose sources have waited long enough to be tried."""
    for source in ("silent", "failing", "model"):
        for gain in experience.source(source).gains:
            gain.passed = 10**6
    return choice(experience, share=0.02)


def test_a_costly_source_that_adds_nothing_is_requested_seldom() -> None:
    adviser = choice(Experience())
    requests = [ask(adviser, NONE, OTHER, (9, 9, 9)) for _ in range(600)]
    assert requests[0] == 32, "its cost is not known yet"
    exploring = int(PAUSE / EXPLORING) + 1
    assert sum(map(bool, requests[1 : 3 * exploring])) == 2, "little is known, so it is tried more"
    assert sum(map(bool, requests[3 * exploring :])) <= 500 * 0.02 / PAUSE


def test_a_costly_source_that_pays_is_requested_every_time_but_for_little() -> None:
    adviser = choice(Experience())
    requests = [ask(adviser, NONE, OTHER, (5, 6, 7, 8)) for _ in range(50)]
    assert requests[1:] == [COSTLY_NODES] * 49


def test_it_is_requested_only_where_the_others_promise_little() -> None:
    adviser = choice(Experience(), share=0.0)
    for _ in range(120):
        ask(adviser, SURE, SURE, (1, 2, 3))
        ask(adviser, NONE, OTHER, (5, 6, 7, 8))
    assert [ask(adviser, SURE, SURE, (1, 2, 3)) for _ in range(10)] == [0] * 10
    assert [ask(adviser, NONE, OTHER, (5, 6, 7, 8)) for _ in range(10)] == [COSTLY_NODES] * 10


def test_what_a_source_adds_is_counted_beyond_what_there_was() -> None:
    experience = Experience()
    experience.source("model").cost.learn(8, PLAIN)
    longer = DraftTree.chain([1, 2, 3, 4], "model", accept_prob=[0.9, 0.8, 0.7, 0.6])
    ask(curious(experience), SURE, longer, (1, 2, 3, 9))
    assert experience.source("model").gains[len(PROB_EDGES)].mean == 1.0


def test_a_cheap_source_is_always_asked_for_all() -> None:
    adviser = choice(Experience())
    requests = [ask(adviser, NONE, NONE, (7,), milliseconds=0.001 * PLAIN) for _ in range(20)]
    assert requests == [32] * 20


def test_one_of_middling_price_must_pay_too_but_may_draft_much() -> None:
    adviser = choice(Experience(), share=0.0)
    requests = [ask(adviser, NONE, OTHER, (5, 6, 7, 8), 0.05 * PLAIN) for _ in range(20)]
    assert requests[2:] == [32] * 18
    assert adviser.extra == pytest.approx(0.05 * PLAIN)
    vain = [ask(adviser, SURE, OTHER, (1, 2, 3), 0.05 * PLAIN) for _ in range(60)]
    assert sum(map(bool, vain)) == 3


def test_a_fixed_budget_asks_everyone_and_still_corrects_claims() -> None:
    claims = Adviser(Calibration())
    liar = DraftTree.chain([1], "a", accept_prob=[1.0])
    for _ in range(20):
        assert claims.allowance("a", 5) == claims.nodes(0.0, 5) == 5
        claims.appraise(liar, 0)
        assert claims.learn((2,)) == [0]
    assert claims.appraise(liar, 0).accept_prob[0] < 0.2


def test_a_source_that_proposes_nothing_takes_no_credit_for_the_next_one() -> None:
    experience = Experience()
    for source in ("silent", "model"):
        experience.source(source).cost.learn(8, PLAIN)
    adviser = curious(experience)
    adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
    assert adviser.allowance("silent", 32)
    adviser.spent("silent", PLAIN)
    assert adviser.allowance("failing", 32)  # nothing is spent where it fails
    assert adviser.allowance("model", 32)
    adviser.appraise(OTHER, 0)
    adviser.spent("model", PLAIN)
    adviser.learn_step(Step(NONE, (), (5, 6, 7, 8)), line(0.0), 1.0)
    sources = experience.sources
    assert {name: sources[name].gains[0].mean for name in ("silent", "model")} == {
        "silent": 0.0,
        "model": 3.0,
    }
    assert sources["failing"].gains[0].trials == 0


def drafting(milliseconds: float) -> Experience:
    experience = Experience()
    for _ in range(20):
        experience.draft.learn(8, milliseconds)
        experience.draft.learn(4, milliseconds)
    return experience


def draft_at(adviser: SourceChoice, expected_acceptance: float | None, gain: float) -> bool:
    """Play one step in which a draft brings `gain` tokens, at any size."""
    adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
    nodes = adviser.nodes(expected_acceptance, 64)
    adviser.learn_draft([0.0] + [gain] * BUCKETS.index(nodes), 1)
    return nodes > 0


@pytest.mark.parametrize("poor", [0.05, None])
def test_where_drafts_did_not_pay_none_is_created_but_now_and_then(poor: float | None) -> None:
    adviser = choice(drafting(0.2 * PLAIN))
    tried = [draft_at(adviser, poor, 0.0) for _ in range(600)]
    rich = [draft_at(adviser, 0.95, 1.5) for _ in range(300)]
    assert all(tried[:3]), "little is known yet"
    assert 5 <= sum(tried[300:]) <= 300 * 0.02 / (PAUSE * 0.2) + 2
    assert all(rich), "another outlook is not to suffer for it"


def test_outlooks_that_began_to_pay_are_drafted_at_again() -> None:
    adviser = choice(drafting(0.2 * PLAIN))
    for _ in range(100):
        draft_at(adviser, 0.4, 0.0)
    later = [draft_at(adviser, 0.4, 2.0) for _ in range(80)]
    assert all(later[-30:])


def teach(adviser: SourceChoice, after: tuple[DraftTree, ...], tokens: tuple[int, ...]) -> None:
    """Play a step in which a source that learns drafts OTHER, at 1 ms and as much to be taught."""
    adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
    request = adviser.allowance("learner", 32)
    if request:
        adviser.appraise(OTHER, 0)
        adviser.spent("learner", 1.0)
    for tree in after:
        adviser.appraise(tree, 0)
    adviser.record_cost("learner", 1.0)
    adviser.learn_step(Step(OTHER, (), tokens), line(0.0), 1.0)


def test_a_source_that_learns_is_charged_for_all_its_time_and_credited_beyond_the_others() -> None:
    better = DraftTree.chain([5, 6, 7, 8], "model", accept_prob=[0.9, 0.8, 0.7, 0.6])
    for others, supplied in (((), 3.0), ((better,), 0.0)):
        experience = Experience()
        adviser = choice(experience)
        adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
        adviser.record_cost("learner", 0.0)
        for _ in range(3):
            teach(adviser, others, (5, 6, 7, 8))
        adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
        gain = experience.updates["learner"]
        assert gain.trials == 4, "one a step, and one before"
        assert gain.mean == pytest.approx(3 * (supplied - 2.0 / PLAIN) / 4)


def trained(experience: Experience, steps: int) -> SourceChoice:
    adviser = choice(experience)
    for _ in range(steps + 1):
        adviser.begin(rate=1.0 / PLAIN, plain=PLAIN)
        adviser.record_cost("learner", 0.1)
    return adviser


def test_a_source_rests_where_teaching_it_does_not_pay_but_some_texts_try_it() -> None:
    experience = Experience()
    assert not trained(experience, MIN_UPDATES - 1).should_skip("learner"), "too little is known"
    adviser = trained(experience, 1)
    rested = [adviser.should_skip("learner") for _ in range(3 * TRIED)]
    assert rested == ([True] * (TRIED - 1) + [False]) * 3
    assert not adviser.should_skip("another")
    assert not Adviser(Calibration()).should_skip("learner")


def test_who_was_left_alone_is_reported_with_the_reason() -> None:
    experience = Experience()
    adviser = choice(experience, share=0.0)
    assert adviser.rested == {}
    requests = [ask(adviser, SURE, NONE, (1, 2, 3)) for _ in range(20)]
    assert adviser.rested == {
        "model": f"{requests.count(0)} steps, as it costs more time than it saves"
    }
    resting = trained(experience, MIN_UPDATES)
    assert resting.should_skip("learner")
    assert resting.rested == {
        "learner": "the whole text, as its training costs more time than it saves"
    }
    assert Adviser(Calibration()).rested == {}


def test_what_a_source_brings_lately_counts_most() -> None:
    experience = Experience()
    adviser = trained(experience, 2 * MIN_UPDATES)
    assert adviser.should_skip("learner")
    for _ in range(150):
        teach(adviser, (), (5, 6, 7, 8))
    assert not adviser.should_skip("learner")
