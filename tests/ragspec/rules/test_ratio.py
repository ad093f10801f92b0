from __future__ import annotations

import pytest

from ragspec.rules.ratio import Ratio


def test_a_claim_is_believed_until_something_is_known() -> None:
    assert Ratio().share(8.0) == 1.0
    assert Ratio().share(8.0, 0.6) == pytest.approx(0.6)


def test_counts_fade_and_the_share_follows_what_came_true() -> None:
    ratio = Ratio()
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
