"""Relaxed rules by name, with settings that fit the size of the code-book.

The published settings are for 16,384 codes: LANTERN k 1000, delta 0.1; LANTERN++ k 10, lambda 5 to
20. A code of a smaller book carries more of the probability, so the same numbers relax far more:
at 256 codes delta 0.1 accepts nearly every draft. The defaults for V codes are

    lantern    k = V / 25 (655 at 16,384; 41 at 1,024; 10 at 256)
               delta = 0.1 sqrt(V / 16384) (0.1; 0.025; 0.0125)
    lantern++  k = V / 25, at most 10;  lam = 1 + 4 (V / 16384)^(1/4) (5; 3; 2.4)
    gsd        V / 8 clusters (2,048; 128; 32)

They are where to start: what a setting costs is measured in every run (`tv_excess`), and a budget
keeps it.
"""

from __future__ import annotations

from inspect import signature
from numbers import Real
from typing import Any

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import names, resolve, unknown
from ragspec.rules.base import Rule
from ragspec.visual.rules.codebook import CodeNeighbours, CodePartition
from ragspec.visual.rules.tv_budget import TVBudget

PUBLISHED_CODES = 16_384
EXACT = "exact"  # what the walk is called where images are drawn


def relaxed() -> dict[str, str]:
    """Return the relaxed rules by name, each with the setting that says how far it relaxes.

    A rule's class declares it as `relaxed_by`; its settings are those that it is made with.
    """
    every = {name: getattr(resolve("rule", name), "relaxed_by", None) for name in names("rule")}
    return {name: setting for name, setting in every.items() if setting is not None}


def settings_of(rule: Any) -> set[str]:
    """Return what a relaxed rule may be set to; the size of its table comes with the table."""
    return set(signature(rule).parameters) - {"k"} if hasattr(rule, "relaxed_by") else set()


def default_neighbours(codes: int, rule: str = "lantern") -> int:
    """Return k for a code-book of so many codes; LANTERN++ looks at 10 at most."""
    k = max(1, min(codes - 1, round(codes / 25)))
    return min(k, 10) if rule.startswith("lantern++") else k


def default_delta(codes: int) -> float:
    """Return LANTERN's delta for a code-book of so many codes."""
    return float(0.1 * (codes / PUBLISHED_CODES) ** 0.5)


def default_lam(codes: int) -> float:
    """Return LANTERN++'s lambda for a code-book of so many codes."""
    return float(1.0 + 4.0 * (codes / PUBLISHED_CODES) ** 0.25)


def default_clusters(codes: int) -> int:
    """Return the number of GSD's clusters for a code-book of so many codes."""
    return max(1, codes // 8)


def make_rule(
    name: str,
    codebook: Any,
    *,
    neighbours: int | CodeNeighbours | None = None,
    partition: int | CodePartition | None = None,
    tv_budget: TVBudget | float | None = None,
    positions: int | None = None,
    normalised: bool = True,
    marks: int = 0,
    **settings: Any,
) -> Rule:
    """Return a rule by its name, for a target that chooses among the codes of `codebook` [V, d].

    Args:
        name: "exact" (the walk), a name of `relaxed`, or any other rule's.
        neighbours: K, or a table that was built before;
        partition: A number of clusters, or a partition.
        tv_budget: See `TVBudget`; with `positions`, the codes of an image, a number is spread
            evenly over them.
        normalised: See `CodeNeighbours.build`.
        marks: As many ids behind those of the codes are none, such as the end of a row.
        settings: Delta, lam, least_gain, residual, nu, mu or length, of the rules that have them;
            None stands for the default.

    Raises:
        InputError: For a setting that the rule has not, or a table of another code-book.
        UnknownNameError: What is wrong, and a remedy.
    """
    inputs = {**settings, "neighbours": neighbours, "partition": partition, "tv_budget": tv_budget}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    if name != EXACT and name not in names("rule"):
        raise UnknownNameError(unknown("rule", name, [EXACT, *names("rule")]))
    rule_class = resolve("rule", "walk" if name == EXACT else name)
    known = settings_of(rule_class)
    foreign = sorted(inputs.keys() - known)
    if foreign:
        raise InputError(
            f"rule {name!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(known)) or 'no settings'}."
        )
    if "neighbours" in known:
        table = _table(name, codebook, neighbours, normalised)
        inputs["neighbours"] = table.with_marks(marks) if marks else table
        for setting, default in (("lam", default_lam), ("delta", default_delta)):
            if setting in known:
                inputs.setdefault(setting, default(len(codebook)))
    if "partition" in known:
        clusters = _partition(codebook, partition, normalised)
        inputs["partition"] = clusters.with_marks(marks) if marks else clusters
    if isinstance(tv_budget, Real):
        inputs["tv_budget"] = TVBudget(float(tv_budget), positions)
    elif tv_budget is not None and not isinstance(tv_budget, TVBudget):
        raise InputError(f"got tv_budget={tv_budget!r}; expected a number, a TVBudget or None.")
    rule: Rule = rule_class(**inputs)
    return rule


def _table(
    name: str, codebook: Any, selection: int | CodeNeighbours | None, normalised: bool
) -> CodeNeighbours:
    if isinstance(selection, CodeNeighbours):
        selection.check(codebook)
        return selection
    k = default_neighbours(len(codebook), name) if selection is None else selection
    return CodeNeighbours.build(codebook, k, normalised)


def _partition(
    codebook: Any, selection: int | CodePartition | None, normalised: bool
) -> CodePartition:
    if isinstance(selection, CodePartition):
        if selection.size != len(codebook):
            raise InputError(
                f"got a partition of {selection.size} codes for a code-book of {len(codebook)}; "
                "expected one made from it."
            )
        return selection
    clusters = default_clusters(len(codebook)) if selection is None else selection
    return CodePartition.build(codebook, clusters, normalised=normalised)
