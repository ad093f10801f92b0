"""How many draft nodes to verify: the tree that gives the most tokens per second.

A step of n nodes yields 1 + sum of their reach tokens and costs drafting, verifying n + 1 rows
and the host's work. For a fixed n the best tree is the n nodes of largest reach, which is closed
under ancestors since reach never grows downwards; so n alone is searched, over buckets, to keep
shapes few. Reach is calibrated (see `calibration`), costs are measured (see `cost_curve`). n = 0 is
plain decoding. Drafts differ from step to step, so what is maximised is tokens in all over time
in all: sum of reach less time at the present rate (Dinkelbach), not the ratio of one step.

Special cases of the formula: SmartSpec (arXiv 2406.14066), DySpec (2410.11744), the tree size of
Sequoia (2402.12374), the stop rule of SpecDec++ (2405.19715).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ragspec.acceptance.base import Step
from ragspec.budget.base import Adviser, BudgetPolicy, Settings
from ragspec.budget.calibration import Calibration
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.gains import BUCKETS, Experience
from ragspec.budget.shared_forward import SharedCost
from ragspec.budget.tree_size import GoodputSession
from ragspec.errors import InputError, StoreError, UnknownNameError
from ragspec.storage.plain import from_plain, to_plain
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best

FORMAT = 9  # of a profile; another one, too, where ROWS change


def make_budget(spec: int | str | Path | BudgetPolicy) -> BudgetPolicy:
    """Return the policy for "auto", a number of nodes, or the path of a frozen profile (.json).

    Raises InputError for a number below 0, UnknownNameError for any other word, StoreError for a
    profile that cannot be read.
    """
    if isinstance(spec, str) and spec.strip().lstrip("-").isdecimal():
        spec = int(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return FixedBudget(spec)
    if spec == "auto":
        return AutoBudget()
    if isinstance(spec, Path) or (isinstance(spec, str) and spec.endswith(".json")):
        return FrozenBudget.load(Path(spec))
    if isinstance(spec, BudgetPolicy):
        return spec
    raise UnknownNameError(
        f"got budget {spec!r}, expected 'auto', a number of draft nodes (0 = plain decoding) or "
        "the path of a frozen profile ending in .json."
    )


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Always the same number of nodes, the ones of largest reach; 0 never drafts.

    calibration: how far claims are believed, shared by all rows opened here, see `for_one_text`.
    """

    nodes: int
    needs_cost: ClassVar[bool] = False
    calibration: Calibration = field(default_factory=Calibration, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise InputError(
                f"got a budget of {self.nodes} draft nodes, expected 0 or more. Use 0 for plain "
                "decoding or 'auto'."
            )

    @property
    def name(self) -> str:
        """The name by which the policy is reported."""
        return f"fixed-{self.nodes}"

    def open(self, cost: CostCurve | SharedCost | None) -> FixedSession:
        """Return the policy for one row; the cost does not matter to it."""
        return FixedSession(self.nodes, Adviser(self.calibration))


@dataclass(frozen=True, slots=True)
class FixedSession:
    """The same budget at every step."""

    nodes: int
    adviser: Adviser

    @property
    def reason(self) -> str | None:
        """Why speculation is off: it was asked to be."""
        return None if self.nodes else "the budget is 0: plain decoding was asked for"

    def allowance(self, length: int) -> int:
        """Return the fixed number."""
        return self.nodes

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the nodes of largest reach, at most the fixed number of them."""
        if len(tree) > self.nodes:
            tree = self.adviser.appraised(tree)
        return keep_best(tree, self.nodes)

    def observe(self, step: Step, length: int) -> None:
        """Count what became of the claims."""
        self.adviser.learn(step.tokens)


def for_one_text(policy: BudgetPolicy) -> BudgetPolicy:
    """Return the policy for a text whose tokens hang on what is drafted, as under relaxed rules.

    What other texts taught must not reach it, so a fixed number of nodes is chosen by what this
    text alone tells, and equal seeds give equal texts. Policies that go by the clock stay as they
    are, and make no such promise.
    """
    if isinstance(policy, FixedBudget):
        return replace(policy, calibration=Calibration())
    return policy


class AutoBudget:
    """Chooses the size of every draft, and whether to draft at all.

    margin: share by which speculation must be better than plain decoding to be taken up.
    probe_share: share of the time that may be lost to trying again while it is off.
    maximum: the most nodes ever asked for. What is learned is shared by all rows opened here.
    """

    name = "auto"
    needs_cost = True

    def __init__(
        self, *, margin: float = 0.03, probe_share: float = 0.008, maximum: int = BUCKETS[-1]
    ) -> None:
        """Raises InputError for a share outside [0, 1) or a maximum below 1."""
        self.settings = Settings(margin, probe_share, maximum)
        self.experience = Experience()
        self._cost: CostCurve | None = None

    def open(self, cost: CostCurve | SharedCost | None) -> GoodputSession:
        """Return the policy for one row; the curve is refined by what is measured.

        Rows that share forwards are given a `SharedCost`."""
        curve = cost.curve if isinstance(cost, SharedCost) else cost
        self._cost = self._cost or curve or CostCurve.assumed()
        return GoodputSession(self.settings, self.experience, cost or self._cost)

    def freeze(self) -> FrozenBudget:
        """Return a policy of what is known by now, for repeatable runs."""
        cost = self._cost or CostCurve.assumed()
        experience = from_plain(Experience, to_plain(self.experience))
        return FrozenBudget(cost.settled(), experience, self.settings)


@dataclass(frozen=True, slots=True, eq=False)
class FrozenBudget:
    """A profile of costs and acceptance that does not learn: equal runs make equal choices."""

    cost: CostCurve
    experience: Experience
    settings: Settings
    name: ClassVar[str] = "frozen"
    needs_cost: ClassVar[bool] = False

    def open(self, cost: CostCurve | SharedCost | None) -> GoodputSession:
        """Return the policy for one row; the profile's own costs are used, not the target's."""
        return GoodputSession(replace(self.settings, learns=False), self.experience, self.cost)

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON, with a hash that tells a changed one."""
        known = {"settings": self.settings, "experience": self.experience}
        entry = {"format": FORMAT, "cost": self.cost.to_dict()} | to_plain(known)
        text = json.dumps({"sha256": _sha256(entry)} | entry, indent=1)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> FrozenBudget:
        """Read a profile that `save` wrote; raises StoreError where it is missing or changed."""
        try:
            entry = json.loads(Path(path).read_text(encoding="utf-8"))
            if entry["format"] != FORMAT:
                raise ValueError(f"format {entry['format']!r}, expected {FORMAT}")
            if entry.pop("sha256") != _sha256(entry):
                raise ValueError("not the content of its sha256")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"got no budget profile from {path} ({error!r}), expected the JSON that "
                "FrozenBudget.save writes. Make it again with AutoBudget().freeze().save(path)."
            ) from error
        experience = from_plain(Experience, entry["experience"])
        settings = from_plain(Settings, entry["settings"])
        return cls(CostCurve(**entry["cost"]), experience, settings)


def _sha256(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
