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

from ragspec.errors import UnknownNameError
from ragspec.registry import names, resolve, unknown
from ragspec.rules.base import Rule, expect_rule
from ragspec.visual.checks import EXACT, check_settings
from ragspec.visual.rules.codebook import Book, CodeNeighbours, CodePartition
from ragspec.visual.rules.tv_budget import TVBudget

PUBLISHED_CODES = 16_384


def default_neighbours(codes: int, rule: str = "lantern") -> int:
    """Return k for a code-book of `codes` codes; at most 10 for LANTERN++."""
    k = max(1, min(codes - 1, round(codes / 25)))
    return min(k, 10) if rule.startswith("lantern++") else k


def default_delta(codes: int) -> float:
    """Return LANTERN's delta for a code-book of so many codes."""
    return float(0.1 * (codes / PUBLISHED_CODES) ** 0.5)


def default_lam(codes: int) -> float:
    """Return LANTERN++'s lambda for a code-book of so many codes."""
    return float(1.0 + 4.0 * (codes / PUBLISHED_CODES) ** 0.25)


def default_clusters(codes: int) -> int:
    """Return the number of GSD's clusters for a code-book of `codes` codes."""
    return max(1, codes // 8)


def make_rule(
    name: str,
    codebook: Book,
    *,
    neighbours: int | None = None,
    partition: int | None = None,
    tv_budget: TVBudget | float | None = None,
    positions: int | None = None,
    normalised: bool = True,
    marks: int = 0,
    **settings: object,
) -> Rule:
    """Return a rule by its name, for a target over the codes of `codebook` [V, d].

    Args:
        name: "exact" (the walk), a name of `relaxed`, or any other rule's.
        neighbours: k; None for a number that fits the code-book.
        partition: The number of clusters, likewise.
        tv_budget: See `TVBudget`. A number is spread evenly over `positions`, if set.
        positions: Codes per image.
        normalised: See `CodeNeighbours.build`.
        marks: How many ids behind those of the codes are no codes, such as the end of a row.
        settings: Those of the rule, such as delta, lam and least_gain; None for the default.

    Raises:
        InputError: The rule has no such setting, or it is out of range.
        UnknownNameError: There is no such rule.
    """
    inputs = {**settings, "neighbours": neighbours, "partition": partition, "tv_budget": tv_budget}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    if name != EXACT and name not in names("rule"):
        raise UnknownNameError(unknown("rule", name, [EXACT, *names("rule")]))
    rule_class = resolve("rule", "walk" if name == EXACT else name)
    allowed = set[str]()
    if rule_class.relaxed_by is not None:
        allowed = set(signature(rule_class).parameters) - {"k"}  # which the table determines
    check_settings(name, inputs, allowed)
    if "neighbours" in allowed:
        k = default_neighbours(len(codebook), name) if neighbours is None else neighbours
        inputs["neighbours"] = CodeNeighbours.build(codebook, k, normalised, marks)
        for setting, default in (("lam", default_lam), ("delta", default_delta)):
            if setting in allowed:
                inputs.setdefault(setting, default(len(codebook)))
    if "partition" in allowed:
        count = default_clusters(len(codebook)) if partition is None else partition
        inputs["partition"] = CodePartition.build(
            codebook, count, normalised=normalised, marks=marks
        )
    if tv_budget is not None and not isinstance(tv_budget, TVBudget):
        inputs["tv_budget"] = TVBudget(tv_budget, positions)
    return expect_rule(rule_class(**inputs))
