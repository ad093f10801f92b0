"""The figures of a report, and its label."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.models.device import rounds
from ragspec.reports.generation import report_of
from ragspec.reports.report import Report, distinct_share, kind_of_label, label_of, loop_share
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree


def built() -> Report:
    tree = DraftTree(  # below the root: 5 -> 6 of "context", and 7 of "model"
        tokens=np.array([5, 7, 6]),
        parents=np.array([-1, -1, 0]),
        accept_prob=np.ones(3, np.float32),
        source=np.array([0, 1, 0]),
        origin=np.array([[0, 40], [-1, -1], [0, 41]]),
        sources=("context", "model"),
    )
    times = {"draft": 0.5, "verify": 4.0, "commit": 0.25, "host": 0.25}
    steps = [
        Step(tree, (0, 2), (5, 6, 8), times),
        Step(DraftTree.empty(), (), (9,), {"verify": 3.0}),
        Step(DraftTree.chain([1, 2, 3], "model"), (0, 1, 2), (1, 2), {"verify": 3.0}),
    ]
    facts: Any = {"seed": 7, "prompt_tokens": 11, "budget": "auto", "faults": {"model": 1}}
    return report_of(steps, [5, 6, 8, 9, 1, 2], 0.05, "stop", prefill=(20.0, 1), **facts)


def test_counts_follow_the_definitions() -> None:
    report = built()
    assert (report.tokens, report.forwards, report.steps, report.prefill_forwards) == (6, 3, 3, 1)
    assert report.per_step_drafted == (3, 0, 3)
    # The third step was stopped after two tokens: its third accepted node was never emitted.
    assert report.per_step_accepted == (2, 0, 2)
    assert report.drafted == 6
    assert report.accepted == 4
    assert report.mean_accepted_length == 1 + 4 / 3
    assert report.draft_acceptance_rate == 4 / 6
    assert report.acceptance_histogram == [1, 0, 2]
    assert report.drafted_by_source == {"model": 4, "context": 2}
    assert report.accepted_by_source == {"context": 2, "model": 2}
    assert report.budget_sizes == {3: 2, 0: 1}
    assert report.prompt_tokens == 11 and report.seed == 7 and report.faults == {"model": 1}
    assert report.reason is None


def test_times_add_up() -> None:
    report = built()
    expected = {"prefill": 20.0, "draft": 0.5, "verify": 10.0, "commit": 0.25, "host": 0.25}
    assert report.milliseconds == {"retrieve": 0.0, **expected}
    assert report.decode_seconds == pytest.approx(0.03)
    assert report.tokens_per_second == pytest.approx(6 / 0.03)  # the prompt gave none here
    searched = report.with_retrieval(10.0)
    assert searched.milliseconds["retrieve"] == 10.0
    assert searched.seconds == pytest.approx(0.06)
    assert searched.with_retrieval(10.0).seconds == pytest.approx(0.06)
    assert searched.decode_seconds == report.decode_seconds


def test_dictionary_holds_the_schema_of_vllm_and_comes_back() -> None:
    report = built()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [1, 0, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "per_step_accepted": [2, 0, 2],
        "per_step_drafted": [3, 0, 3],
    }
    assert data["accepted"] == 4 and data["tokens_per_second"] == report.tokens_per_second
    assert Report.from_dict(data) == report
    del data["label"]
    with pytest.raises(InputError, match="label"):
        Report.from_dict(data)


def test_reason_says_why_nothing_was_gained() -> None:
    plain = Step(DraftTree.empty(), (), (9,))
    steps = [plain, Step(DraftTree.chain([1, 2], "context"), (), (9,))]
    assert "nothing was drafted" in str(report_of([plain], [9], 0.1, "length").reason)
    assert "no drafted token of 2" in str(report_of(steps, [9, 9], 0.1, "length").reason)
    assert report_of(steps, [9, 9], 0.1, "length", reason="off").reason == "off"
    accepted = Step(DraftTree.chain([1, 2], "context"), (0, 1), (1, 2, 3))
    assert report_of([accepted], [9, 1, 2, 3], 0.1, "length", reason="off").reason is None


def test_tokens_of_the_prefill_do_not_count_as_decoded() -> None:
    steps = [Step(DraftTree.empty(), (), (9,), {"prefill": 99.0})]
    alone = report_of(steps, [9], 0.1, "length")
    assert (alone.forward_passes, alone.prefill_tokens) == (1, 1)
    assert (alone.tokens_per_second, alone.tokens_per_forward) == (0.0, 1.0)
    assert alone.summary().startswith("1 token in 1 forward pass (1.00 a pass), 0.10 s, label")
    steps.append(Step(DraftTree.empty(), (), (9, 8)))
    later = report_of(steps, [9, 9, 8], 0.199, "length")
    assert later.tokens_per_second == pytest.approx(2 / 0.1)
    assert later.tokens_per_forward == 1.5


def test_an_empty_report_has_no_division_by_zero() -> None:
    report = report_of([], [], 0.0, "cancelled")
    assert report.mean_accepted_length == report.draft_acceptance_rate == 0.0
    assert report.tokens_per_second == report.tokens_per_forward == report.loop_share == 0.0
    assert report.acceptance_histogram == []
    assert report.distinct_4 == 1.0
    assert report.summary()


def test_excess_is_the_mean_over_all_tokens() -> None:
    def on_progress(label: str, *figures: tuple[float, ...]) -> Report:
        tree = DraftTree.chain([1], "model")
        steps = [Step(tree, (0,), (1, 2), excess=excess) for excess in figures]
        return report_of(steps, [7, 1, 2, 1, 2], 0.1, "length", label=label)

    relaxed = on_progress("approximate", (0.5, 0.0), (0.25, 0.25))
    assert relaxed.tv_excess == 0.2  # the token of the prefill counts
    assert "0.200 total variation" in relaxed.summary()
    assert Report.from_dict(json.loads(json.dumps(relaxed.to_dict()))) == relaxed
    assert on_progress("approximate", (), ()).tv_excess is None
    exact = on_progress("exact"), on_progress("exact-for(distribution)", (), ())
    assert [report.tv_excess for report in exact] == [0.0, 0.0]


def test_summary_names_the_main_figures() -> None:
    text = built().summary()
    assert (built().forward_passes, built().tokens_per_forward) == (4, 1.5)
    for part in ("6 tokens", "4 forward passes", "1.50 a pass", "exact", "4 of 6", "model 1"):
        assert part in text


def test_distinct_share() -> None:
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share([1, 1, 1, 1, 1, 1]) == 1 / 3
    assert distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5


def test_loop_share_counts_whole_rounds_and_the_rest() -> None:
    assert loop_share([]) == 0.0
    assert loop_share([1, 1]) == 0.0
    assert loop_share([1, 1, 1]) == 1.0
    assert loop_share([1, 2, 1, 2]) == 0.0
    assert loop_share([9, 8, 1, 2, 1, 2, 1, 2, 1, 7]) == 0.7
    cycle = list(range(32))
    assert loop_share(cycle * 3) == 1.0
    assert loop_share([*cycle, 32] * 3) == 0.0


def naive_loop_share(tokens: list[int], longest: int, repeats: int) -> float:
    inside = [False] * len(tokens)
    for period in range(1, longest + 1):
        for start in range(len(tokens)):
            stop = start + period
            while stop < len(tokens) and tokens[stop] == tokens[stop - period]:
                stop += 1
            if stop - start >= period * repeats:
                inside[start:stop] = [True] * (stop - start)
    return sum(inside) / len(tokens) if tokens else 0.0


@given(st.lists(st.integers(0, 2), max_size=40))
def test_loop_share_equals_the_definition(tokens: list[int]) -> None:
    assert loop_share(tokens, 4, 3) == pytest.approx(naive_loop_share(tokens, 4, 3))


def test_skipped_drafters_are_in_the_summary_and_in_the_json() -> None:
    why = {"model": "12 steps, as it costs more time than it saves"}
    report = report_of([], [9], 0.1, "length", rested=why)
    assert "Not used: model for 12 steps, as it costs more time" in report.summary()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).rested == why
    assert "Not used" not in report_of([], [9], 0.1, "length").summary()


@pytest.mark.parametrize(("precision", "fast"), [("highest", False), ("medium", True)])
def test_numbers_below_float32_and_fast_float32_round(precision: str, fast: bool) -> None:
    before, cpu = torch.get_float32_matmul_precision(), torch.device("cpu")
    kinds = {torch.float64: False, torch.float32: fast, torch.bfloat16: True, torch.float16: True}
    try:
        torch.set_float32_matmul_precision(precision)
        assert {kind: rounds(torch.nn.Linear(2, 2).to(kind), cpu) for kind in kinds} == kinds
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("rule", "label", "kind"),
    [
        ("exact", "exact up to rounding", "exact up to rounding"),
        (
            "exact-for(distribution)",
            "exact-for(distribution) up to rounding",
            "exact-for up to rounding",
        ),
        ("bounded(tv<=0.5)", "bounded(tv<=0.5)", "bounded"),
        ("approximate", "approximate", "approximate"),
    ],
)
def test_rounding_weakens_exact_labels_alone(rule: str, label: str, kind: str) -> None:
    assert label_of(rule, rounded=True) == label
    assert label_of(rule, rounded=False) == rule
    assert kind_of_label(label) == kind
