"""Rules by name: defaults for the size of the code-book, settings and errors."""

from inspect import signature
from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import NAMES, resolve
from ragspec.rules.base import ALL_KINDS, Rule
from ragspec.rules.walk import Walk
from ragspec.visual.checks import RULE_SETTINGS, relaxed
from ragspec.visual.rules.by_name import default_settings, make_rule
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import Lantern, LanternPlus, RelaxedWalk
from ragspec.visual.rules.tv_budget import TVBudget
from tests.support.codes import codebook

BOOK = codebook(64)


def test_defaults_fit_the_code_book() -> None:
    def of(name: str, rule: str, *sizes: int) -> list[float]:
        return [default_settings(rule, size)[name] for size in sizes]

    assert of("neighbours", "lantern", 16384, 1024, 256, 2) == [655, 41, 10, 1]
    assert of("neighbours", "lantern++", 16384, 1024, 256) == [10, 10, 10]
    assert of("delta", "lantern", 16384, 1024, 256) == pytest.approx([0.1, 0.025, 0.0125])
    assert of("lam", "lantern++", 16384, 1024) == pytest.approx([5.0, 3.0])
    assert of("partition", "gsd", 16384, 1024, 4) == [2048, 128, 1]


@pytest.mark.parametrize("name", relaxed())
def test_every_relaxed_rule_is_created_by_its_name(name: str) -> None:
    rule = make_rule(name, BOOK)
    for each in (rule, rule.open()):
        assert isinstance(each, Rule) and each.accepts == ALL_KINDS
        assert each.name == name and each.label == ("approximate" if each is rule else "exact")
    assert name in NAMES["rule"]
    settings = set(signature(resolve("rule", name)).parameters) - {"k"}
    assert settings == {*RULE_SETTINGS[name]} and rule.relaxed_by == RULE_SETTINGS[name][0]


def test_settings_go_to_the_rule() -> None:
    lantern = make_rule("lantern", BOOK, neighbours=7, delta=0.2, tv_budget=0.5, positions=64)
    assert isinstance(lantern, Lantern)
    assert (len(lantern.near[0]), lantern.bound(1.0)) == (7, 0.2)
    assert lantern.tv_budget == TVBudget(0.5, 64)
    half: Any = np.float32(0.5)
    lantern = make_rule("lantern", BOOK, tv_budget=half)
    assert isinstance(lantern, Lantern) and lantern.tv_budget == TVBudget(0.5)
    plus = make_rule("lantern++", BOOK, lam=3.5, delta=None)
    assert isinstance(plus, LanternPlus)
    assert (len(plus.near[0]), plus.bound(1.0)) == (3, 2.5)
    gsd = make_rule("gsd", BOOK, partition=4, tv_budget=TVBudget(2.0))
    assert isinstance(gsd, RelaxedWalk) and gsd.tv_budget == TVBudget(2.0)
    assert isinstance(make_rule("exact", BOOK), Walk)
    assert make_rule("rejection", BOOK).name == "rejection"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lantern", {"lam": 2.0}, r"'lantern' has no lam; it takes delta, least_gain, nei"),
        ("lantern++", {"delta": 0.1}, "has no delta"),
        (
            "exact",
            {"delta": 0.1, "tv_budget": 0.1},
            "rule 'exact' has no delta, tv_budget; it takes no settings",
        ),
        ("lantern", {"neighbours": 2.5}, "got neighbours=2.5"),
        ("lantern", {"neighbours": CodeNeighbours.build(BOOK, 9)}, "from 1 to 63"),
        ("lantern", {"delta": "big"}, "got delta='big'"),
        *(("lantern++", {"lam": lam}, f"got lam={lam!r}") for lam in ("big", True)),
        ("lantern", {"least_gain": "much"}, "got least_gain='much'"),
        ("gsd", {"partition": 2.5}, "got partition=2.5"),
        ("lantern", {"tv_budget": "0.1"}, "tv_budget='0.1'; expected a number"),
        ("gsd", {"tv_budget": [0.1], "positions": 4}, "expected a number"),
    ],
)
def test_foreign_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_rule(name, BOOK, **settings)


def test_an_unknown_rule_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'lantern'"):
        make_rule("lanter", BOOK)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'exact'.*Known: block, exact, gsd,"):
        make_rule("exct", BOOK)
