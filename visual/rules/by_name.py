"""Relaxed rules by name, with settings that fit the size of the code-book.

The published settings are for 16,384 codes: LANTERN k 1000, delta 0.1; LANTERN++ k 10, lambda 5 to
20. A code of a smaller code-book has more probability, so the same settings relax far more: at 256
codes delta 0.1 accepts nearly every draft. The defaults for V codes are

    lantern    k = V / 25 (655 at 16,384; 41 at 1,024; 10 at 256)
               delta = 0.1 sqrt(V / 16384) (0.1; 0.025; 0.0125)
    lantern++  k = V / 25, at most 10;  lam = 1 + 4 (V / 16384)^(1/4) (5; 3; 2.4)
    gsd        V / 8 clusters (2,048; 128; 32)

They are starting points. Every run measures their cost (`tv_excess`), and a budget limits it.
"""

from inspect import signature
from typing import Any

from ragspec.registry import expect_known, names, resolve
from ragspec.rules.base import Rule, expect_rule
from ragspec.visual.checks import EXACT, check_settings
from ragspec.visual.rules.codebook import Book, CodeNeighbours, CodePartition
from ragspec.visual.rules.tv_budget import TVBudget

PUBLISHED_CODES = 16_384


def default_settings(rule: str, codes: int) -> dict[str, float]:
    """Return the settings that fit a code-book of `codes` codes, whether the rule has them or not.

    The numbers of neighbours and of clusters are "neighbours" and "partition".
    """
    k, share = max(1, min(codes - 1, round(codes / 25))), codes / PUBLISHED_CODES
    return {
        "neighbours": min(k, 10) if rule.startswith("lantern++") else k,
        "partition": max(1, codes // 8),
        "delta": 0.1 * share**0.5,
        "lam": 1.0 + 4.0 * share**0.25,
    }


def make_rule(
    name: str,
    codebook: Book,
    *,
    tv_budget: TVBudget | float | None = None,
    positions: int | None = None,
    normalised: bool = True,
    marks: int = 0,
    **settings: object,
) -> Rule:
    """Return a rule by its name, for a target over the codes of `codebook` [V, d].

    Args:
        name: "exact" (the walk), a name of `relaxed`, or any other rule's.
        tv_budget: See `TVBudget`. A number is spread evenly over `positions`, if set.
        positions: Codes per image.
        normalised: See `CodeNeighbours.build`.
        marks: How many ids behind those of the codes are no codes, such as the end of a row.
        settings: Those of the rule, such as delta, lam and least_gain; None for the default.
            "neighbours" is their number k, "partition" that of the clusters.

    Raises:
        InputError: The rule has no such setting, or it is out of range.
        UnknownNameError: There is no such rule.
    """
    inputs: dict[str, Any] = settings | {"tv_budget": tv_budget}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    expect_known("rule", [name], [EXACT, *names("rule")])
    rule_class = resolve("rule", "walk" if name == EXACT else name)
    allowed = set[str]()
    if rule_class.relaxed_by is not None:
        allowed = set(signature(rule_class).parameters) - {"k"}  # which the table determines
    check_settings(name, inputs, allowed)
    usual = default_settings(name, len(codebook))
    inputs = {key: value for key, value in usual.items() if key in allowed} | inputs
    if (k := inputs.get("neighbours")) is not None:
        inputs["neighbours"] = CodeNeighbours.build(codebook, k, normalised, marks)
    if (k := inputs.get("partition")) is not None:
        inputs["partition"] = CodePartition.build(codebook, k, normalised=normalised, marks=marks)
    if tv_budget is not None and not isinstance(tv_budget, TVBudget):
        inputs["tv_budget"] = TVBudget(tv_budget, positions)
    return expect_rule(rule_class(**inputs))
