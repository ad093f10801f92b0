from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget.cost_curve import ROWS, CostCurve, CostLine, cached, context_lengths, measure
from ragspec.errors import InputError
from ragspec.storage import json_cache

LENGTHS = (128, 1000, 1900)
KEY: dict[str, str | int] = {
    "model": "m",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "torch": "2",
}


def true_seconds(n: int, length: int) -> float:
    return 1e-4 * (10 + 0.5 * n + 0.002 * length)


CHECKS = 7  # forwards that tell whether a curve has the shape of the machine,
ACCEPTED_CHECKS = 3  # and whether a kept one still has, where it does


class Timer:
    """A clock of a model whose costs are known; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, n: int, length: int) -> float:
        self.calls.append((n, length))
        return true_seconds(n, length)


def create() -> CostCurve:
    table = [[true_seconds(n, length) for n in ROWS] for length in LENGTHS]
    return CostCurve(LENGTHS, table)


def test_measured_points_are_interpolated_in_rows_and_length() -> None:
    curve, trusted = measure(Timer(), LENGTHS)
    assert trusted
    for length in (128, 500, 1900, 3000):
        for n in (1, 5, 9, 40, 64, 65):
            assert curve.seconds(n, length) == pytest.approx(true_seconds(n, length), rel=1e-6)
        assert curve.line(length).seconds == [curve.seconds(n, length) for n in ROWS]
    assert curve.seconds(3, 5) == curve.seconds(3, 128)
    assert curve.seconds(130, 128) == pytest.approx(true_seconds(130, 128), rel=1e-6)


def test_every_size_is_set_against_one_row_timed_right_before_it() -> None:
    timer = Timer()
    measure(timer, LENGTHS)
    assert len(timer.calls) == 1 + 3 * (2 * len(ROWS) - 1) * len(LENGTHS) + CHECKS
    for before, (n, length) in itertools.pairwise(timer.calls[1:-CHECKS]):
        assert n == 1 or before == (1, length)


@given(st.integers(1, 400))
def test_costs_go_on_in_a_line_between_and_beyond_the_points(n: int) -> None:
    assert CostLine([4.0 + rows for rows in ROWS]).at(n) == pytest.approx(4.0 + n)
    bent = [5.0 if rows <= 8 else 5.0 + (rows - 8) ** 2 for rows in ROWS]
    beyond = CostLine(bent).at(64 + n)
    assert beyond == pytest.approx(bent[-1] + n * 56), "the slope from 8 rows to 64"


def test_a_machine_that_others_share_does_not_bend_the_curve() -> None:
    timer = Timer()

    def run(n: int, length: int) -> float:
        slow = 1.0 + (len(timer.calls) // 50) % 2  # half as fast for 50 forwards, then as before
        return slow * timer(n, length)

    curve, _ = measure(run, LENGTHS)
    for n in ROWS:
        share = true_seconds(n, 1000) / true_seconds(1, 1000)
        assert curve.seconds(n, 1000) / curve.seconds(1, 1000) == pytest.approx(share, rel=0.02)


def test_measuring_keeps_to_its_time_and_fills_the_rest() -> None:
    timer = Timer()
    curve, _ = measure(timer, LENGTHS, seconds=0.0)
    assert timer.calls[1:-CHECKS] == [(1, 1000), (1, 1000), (64, 1000), (1, 1000), (12, 1000)]
    assert curve.seconds(64, 1000) == pytest.approx(true_seconds(64, 1000))
    assert curve.seconds(24, 1000) == pytest.approx(true_seconds(24, 1000))
    assert curve.seconds(64, 128) == pytest.approx(true_seconds(64, 1000))


@given(st.lists(st.tuples(st.integers(1, 65), st.floats(1e-5, 10.0)), max_size=60))
def test_the_curve_stays_monotone_in_rows_whatever_is_observed(
    steps: list[tuple[int, float]],
) -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.3, (len(LENGTHS), len(ROWS)))
    curve = CostCurve(LENGTHS, np.array(create().table) * np.exp(noise))
    for i, (n, seconds) in enumerate(steps):
        curve.refine(n, 100 + 50 * i, seconds)
    for length in (1, 128, 700, 1900, 5000):
        costs = np.array(curve.line(length).seconds)
        assert np.isfinite(costs).all() and (costs > 0).all()
        assert (np.diff(costs) >= -1e-14 * costs[1:]).all()  # equal ones differ by rounding


def test_refining_follows_the_median_of_a_noisy_machine() -> None:
    curve, random = create(), np.random.default_rng(1)
    for i in range(400):
        n = int(random.choice([1, 9, 17]))
        spike = 20.0 if i % 17 == 0 else 1.0
        noisy = true_seconds(n, 1000) * float(np.exp(0.1 * random.normal())) * spike
        curve.refine(n, 1000, noisy)
    for n in (1, 9, 17):
        assert curve.seconds(n, 1000) == pytest.approx(true_seconds(n, 1000), rel=0.08)


def test_the_level_and_the_shape_are_those_of_all_lengths() -> None:
    """A busy machine slows everything, and what was read wrong of a size was so at every length."""
    curve = create()
    for _ in range(200):
        for n in (1, 17):
            curve.refine(n, 1000, true_seconds(n, 1000) * (1.5 if n == 1 else 2.2))
    level = curve.seconds(1, 128) / true_seconds(1, 128)
    assert curve.seconds(1, 1000) == pytest.approx(1.5 * true_seconds(1, 1000), rel=0.1)
    assert curve.seconds(17, 1000) / curve.seconds(1, 1000) == pytest.approx(
        2.2 / 1.5 * true_seconds(17, 1000) / true_seconds(1, 1000), rel=0.03
    )
    assert level == pytest.approx(1.5, rel=0.1)
    dearer = curve.seconds(17, 128) / true_seconds(17, 128) / level
    assert dearer == pytest.approx(2.2 / 1.5, rel=0.03)


READ_FLAT = CostCurve((128,), [[0.019 if n == 1 else 0.026 for n in ROWS]])


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_shape_that_was_read_wrong_at_the_start_is_learned_from_pairs(
    noise: float, seed: int
) -> None:
    """19 ms for one row and 26 for all others, where each row really costs 0.9 ms more."""
    curve, random = CostCurve(**READ_FLAT.to_dict()), np.random.default_rng(seed)
    busy = 1.0
    for step in range(400):
        busy = 2.0 if step // 40 % 2 else 1.0  # a neighbour comes and goes
        n = int(random.choice([1, 5, 9, 17, 33]))
        factor = busy * math.exp(noise * random.normal())
        curve.refine(n, 128, (0.019 + 0.0009 * (n - 1)) * factor)
    for n in (9, 17, 33):
        share = curve.seconds(n, 128) / curve.seconds(1, 128)
        assert share == pytest.approx((19 + 0.9 * (n - 1)) / 19, rel=0.05 + 0.5 * noise)


def test_one_outlier_hardly_moves_the_shape() -> None:
    curve = create()
    for n in (1, 17) * 10:
        curve.refine(n, 128, true_seconds(n, 128))
    before = curve.seconds(17, 128) / curve.seconds(1, 128)
    curve.refine(17, 128, 30 * true_seconds(17, 128))
    curve.refine(1, 128, true_seconds(1, 128))
    assert curve.seconds(17, 128) / curve.seconds(1, 128) == pytest.approx(before, rel=0.1)


def test_a_lasting_change_is_believed_after_three_steps() -> None:
    curve = create()
    for _ in range(2):
        curve.refine(1, 128, 5 * true_seconds(1, 128))
    assert curve.seconds(1, 128) < 1.1 * true_seconds(1, 128)
    curve.refine(1, 128, 5 * true_seconds(1, 128))
    assert curve.seconds(1, 128) == pytest.approx(5 * true_seconds(1, 128))
    for seconds in (40, 0.1, 40, 0.1, 40):  # far, but not all on one side
        curve.refine(1, 128, seconds * true_seconds(1, 128))
    assert curve.seconds(1, 128) < 8 * true_seconds(1, 128)


def test_impossible_observations_are_ignored() -> None:
    curve = create()
    before = curve.line(128)
    for n, seconds in ((1, 0.0), (1, -1.0), (1, math.nan), (0, 1.0), (999, 1.0)):
        curve.refine(n, 128, seconds)
    assert curve.line(128) == before


def test_an_assumed_curve_takes_its_scale_from_the_first_step() -> None:
    curve = CostCurve.assumed()
    curve.refine(1, 300, 0.5)
    assert curve.seconds(1, 300) == pytest.approx(0.5)
    assert curve.seconds(1, 5000) == pytest.approx(0.5)


def test_batched_counts_the_rows_of_all() -> None:
    batched = create().batched(4)
    assert batched.seconds(2, 128) == pytest.approx(true_seconds(8, 128))
    assert batched.seconds(64, 128) == pytest.approx(true_seconds(256, 128))


WIDTHS = (1, 4, 8, 16, 32, 64)


class Padded(Timer):
    """A clock of forwards that are padded to few widths."""

    def __call__(self, n: int, length: int) -> float:
        assert n in WIDTHS, "only what can be run is timed"
        return super().__call__(n, length)


def test_forwards_of_few_widths_cost_what_the_next_one_does() -> None:
    timer = Padded()
    curve, trusted = measure(timer, LENGTHS, widths=WIDTHS)
    assert trusted
    assert {n for n, _ in timer.calls} == set(WIDTHS)
    for n in range(1, 65):
        width = next(each for each in WIDTHS if each >= n)
        assert curve.seconds(n, 128) == pytest.approx(true_seconds(width, 128), rel=1e-6)
    again = CostCurve(**curve.to_dict())
    assert again.seconds(33, 128) == curve.seconds(64, 128)


def test_a_forward_teaches_of_the_width_it_was_padded_to() -> None:
    curve = CostCurve(LENGTHS, create().table, WIDTHS)
    exact = CostCurve(LENGTHS, create().table, WIDTHS)
    for n, padding in ((1, 1), (20, 32), (1, 1), (30, 32)):
        curve.refine(n, 128, 1.3 * true_seconds(padding, 128))
        exact.refine(padding, 128, 1.3 * true_seconds(padding, 128))
    assert curve.line(128) == exact.line(128) != create().line(128)


def test_cached_round_trip(tmp_path: Path) -> None:
    first = cached(tmp_path / "new", KEY, Timer(), LENGTHS)
    again = Timer()
    second = cached(tmp_path / "new", KEY, again, LENGTHS)
    assert len(again.calls) == ACCEPTED_CHECKS
    assert np.array_equal(first.table, second.table)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


def test_a_curve_that_names_its_rows_was_preserved_by_another_version(tmp_path: Path) -> None:
    old = {"rows": [1, 2], "lengths": list(LENGTHS), "seconds": [[1.0, 2.0]] * len(LENGTHS)}
    cached(tmp_path, KEY, Timer(), LENGTHS)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"curve": old}))
    json_cache.write(tmp_path, "cost", KEY, {"curve": create().to_dict()})
    timer = Timer()
    assert cached(tmp_path, KEY, timer, LENGTHS).seconds(8, 128) == pytest.approx(
        true_seconds(8, 128)
    )
    assert len(timer.calls) > ACCEPTED_CHECKS, "it was measured again"


def test_a_preserved_curve_of_another_shape_is_measured_again(tmp_path: Path) -> None:
    def flat(n: int, length: int) -> float:
        return 0.01  # what a busy moment may have looked like

    cached(tmp_path, KEY, flat, LENGTHS)
    curve = cached(tmp_path, KEY, Timer(), LENGTHS)
    assert curve.seconds(16, 128) == pytest.approx(true_seconds(16, 128))

    def slower(n: int, length: int) -> float:
        return 3.0 * true_seconds(n, length)  # the same shape: kept, `refine` follows the level

    selected = cached(tmp_path, KEY, slower, LENGTHS)
    assert np.array_equal(selected.table, curve.table)


def test_a_curve_that_forwards_disagree_with_is_measured_again_before_it_is_preserved(
    tmp_path: Path,
) -> None:
    timer = Timer()

    def busy_at_first(n: int, length: int) -> float:
        quiet = timer(n, length)
        flat = 1.4 * true_seconds(1, length)
        return quiet if n == 1 or len(timer.calls) > 1 + 3 * 3 * (2 * len(ROWS) - 1) else flat

    curve, trusted = measure(busy_at_first, LENGTHS)
    assert trusted
    assert curve.seconds(32, 128) / curve.seconds(1, 128) == pytest.approx(
        true_seconds(32, 128) / true_seconds(1, 128), rel=0.25
    )

    def never_twice_the_same(n: int, length: int) -> float:
        timer(n, length)
        return 0.01 * (1.0 + n * (len(timer.calls) % 7))

    cached(tmp_path, KEY, never_twice_the_same, LENGTHS)
    assert not list(tmp_path.iterdir()), "it is used, but not kept"


@pytest.mark.parametrize("change", ["model", "device", "dtype", "torch"])
def test_another_key_or_length_is_measured_again(tmp_path: Path, change: str) -> None:
    cached(tmp_path, KEY, Timer(), LENGTHS)
    timer = Timer()
    cached(tmp_path, {**KEY, change: "other"}, timer, LENGTHS)
    cached(tmp_path, KEY, timer, (64,))
    assert {(1, 1000), (1, 64)} <= set(timer.calls)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "binary", "nan", "swapped"])
@pytest.mark.filterwarnings("error")
def test_a_corrupt_cache_is_measured_again_silently(tmp_path: Path, damage: str) -> None:
    cached(tmp_path, KEY, Timer(), LENGTHS)
    (path,) = tmp_path.iterdir()
    entry = json.loads(path.read_text())
    if damage == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif damage == "nan":
        entry["curve"]["seconds"][0][0] = math.nan
        path.write_text(json.dumps(entry))
    elif damage == "swapped":
        entry["key"]["model"] = "other"
        path.write_text(json.dumps(entry))
    else:
        path.write_text(damage)
    timer = Timer()
    curve = cached(tmp_path, KEY, timer, LENGTHS)
    assert timer.calls
    assert curve.seconds(8, 128) == pytest.approx(true_seconds(8, 128))
    cached(tmp_path, KEY, again := Timer(), LENGTHS)
    assert len(again.calls) == ACCEPTED_CHECKS


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    curve = cached(tmp_path / "file", KEY, Timer(), LENGTHS)
    assert curve.seconds(1, 128) == pytest.approx(true_seconds(1, 128))


def test_context_lengths_fit_the_limit() -> None:
    assert context_lengths(2048) == (128, 992, 2048 - ROWS[-1])
    assert context_lengths(100) == (18, 36)
    assert context_lengths(8) == (1,)


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [
        ((10,), [[1.0] * 11]),
        ((10, 11), [[1.0] * 12]),
        ((10, 10), [[1.0] * 12] * 2),
        ((10, 9), [[1.0] * 12] * 2),
        ((10,), [[0.0, *[1.0] * 11]]),
        ((10,), [[*[1.0] * 11, math.inf]]),
    ],
)
def test_an_unusable_grid_is_refused(lengths: tuple[int, ...], seconds: list[list[float]]) -> None:
    with pytest.raises(InputError, match="Measure it again"):
        CostCurve(lengths, seconds)
