"""A simulated machine with fixed costs, to compare budget policies without a wall clock.

A `Machine` has true costs, which score a policy, and disturbances, which distort the times that the
policy observes: noise, outliers, and neighbours that take a share of the processor. It is also the
clock by which `fuse` times its sources. The seed determines everything. Label its figures as
simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from ragspec.budget.cost_curve import CostCurve, measure
from ragspec.drafters import fuse
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.needs import Needs
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree

TIMINGS = 3  # timings of a forward at start-up; the least counts, as in `CausalTarget`
SLOW = 0.05  # seconds from which a forward is timed once
OVERCONFIDENCE = 0.6  # exponent of a draft model's probabilities, which are too large
SPREAD = 0.5  # relative width of the range of its accept probabilities


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Distortions of the times that a policy observes.

    Attributes:
        noise: Standard deviation of the logarithm of each time.
        outliers: Share of the times that are 3 to 10 times as long.
        steal: Share of the time in which all work takes twice as long.
        period: Mean seconds of a cycle of `steal`.
        slice: Seconds for which another process holds the core, after as many of ours on average.
            It seldom hits a short look-up, which then takes many times as long.
    """

    noise: float = 0.0
    outliers: float = 0.0
    steal: float = 0.0
    period: float = 0.5
    slice: float = 0.0


class Machine:
    """A clock in seconds that advances with simulated work.

    Args:
        truth: Seconds of a forward on the quiet machine.
        disturbance: Distortions of observed times; None for none.
        host: Seconds of the host's work for a step.
        belief: Cost curve of the policy; None to measure it here, disturbances included.
        seed: Seed of the disturbances.

    Attributes:
        now: Observed time.
        quiet: Time of the same work without disturbances.
    """

    def __init__(
        self,
        truth: CostCurve,
        disturbance: Disturbance | None = None,
        *,
        host: float = 0.0002,
        belief: CostCurve | None = None,
        seed: int = 0,
    ) -> None:
        self.truth = truth
        self.disturbance = disturbance or Disturbance()
        self.host = host
        self._random = random.Random(seed)
        self._stolen, self._until = False, 0.0
        self.now = self.quiet = 0.0
        if belief is None:
            belief, _ = measure(self._timed, truth.lengths, seconds=math.inf)
        self.belief = belief
        self.quiet = 0.0

    def __call__(self) -> float:
        """Return the observed time, as a performance counter does."""
        return self.now

    def spend(self, seconds: float) -> float:
        """Advance the clock by work of `seconds` quiet seconds; return the observed seconds."""
        observed = seconds * self._factor() + self._waited(seconds)
        self.quiet += seconds
        self.now += observed
        return observed

    def forward(self, rows: int, length: int) -> float:
        """Run the target over `rows` positions after `length` tokens; return observed seconds."""
        return self.spend(self.truth.seconds(rows, length))

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Replace the wall clock of fusions by this clock."""
        with patch.object(fuse, "perf_counter", self):
            yield

    def _timed(self, rows: int, length: int) -> float:
        times = [self.forward(rows, length)]
        while times[0] < SLOW and len(times) < TIMINGS:
            times.append(self.forward(rows, length))
        return min(times)

    def _factor(self) -> float:
        disturbance, rng = self.disturbance, self._random
        factor = math.exp(rng.gauss(0.0, disturbance.noise)) if disturbance.noise else 1.0
        if disturbance.outliers and rng.random() < disturbance.outliers:
            factor *= rng.uniform(3.0, 10.0)
        return 2.0 * factor if self._is_busy() else factor

    def _is_busy(self) -> bool:
        """Return whether a neighbour works now; its periods have random lengths."""
        disturbance = self.disturbance
        while disturbance.steal and self.now >= self._until:
            self._stolen = not self._stolen
            share = disturbance.steal if self._stolen else 1.0 - disturbance.steal
            self._until += self._random.expovariate(0.5 / (disturbance.period * share))
        return self._stolen

    def _waited(self, seconds: float) -> float:
        """Return the seconds for which another process held the core."""
        slice_ = self.disturbance.slice
        waited, left = 0.0, seconds
        while slice_ and (left := left - self._random.expovariate(1.0 / slice_)) > 0.0:
            waited += slice_
        return waited


class PricedDrafter(Drafter):
    """A drafter whose drafts take a fixed time on a machine.

    Args:
        drafter: Drafter that proposes the trees.
        machine: Machine that takes the time.
        call: Seconds of a draft.
        node: Seconds of each node of the budget.
        teach: Seconds of every step, drafted or not, of a source that learns from the target.
    """

    def __init__(
        self, drafter: Drafter, machine: Machine, call: float, node: float = 0.0, teach: float = 0.0
    ) -> None:
        self.drafter, self.machine = drafter, machine
        self.name, self.kind = drafter.name, drafter.kind
        self.call, self.node, self.teach = call, node, teach
        self.needs = Needs(top_tokens=1 if teach else 0)

    def open(self, request: DraftRequest) -> PricedSession:
        """Return a session of the drafter whose work takes time."""
        return PricedSession(self, self.drafter.open(request))


class PricedSession(DraftSession):
    """One sequence of a `PricedDrafter`."""

    def __init__(self, priced: PricedDrafter, session: DraftSession) -> None:
        self._priced, self._session = priced, session

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Spend the time of a draft and return its tree."""
        self._priced.machine.spend(self._priced.call + self._priced.node * budget)
        return self._session.propose(context, budget)

    def observe(self, step: Step) -> None:
        """Spend the time of learning and pass the step on."""
        if self._priced.teach:
            self._priced.machine.spend(self._priced.teach)
        self._session.observe(step)

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the estimate of the session."""
        return self._session.expected_acceptance(context)


class SimulatedModel(Drafter):
    """A simulated draft model: a chain of which each token is right with some probability.

    Claimed probabilities follow those of single tokens but are too large, as those of models are.

    Args:
        truths: Text that follows each prompt.
        right: Mean share of right tokens, for all prompts or by prompt.
        name: Name of the source.
        seed: Seed of the tokens.
        kind: Kind of the draft trees.
    """

    def __init__(
        self,
        truths: Mapping[tuple[int, ...], Sequence[int]],
        right: float | Mapping[tuple[int, ...], float],
        name: str = "model",
        seed: int = 0,
        kind: DraftKind = DraftKind.COUPLED,
    ) -> None:
        self.truths, self.right, self.seed = truths, right, seed
        self.name, self.kind = name, kind
        self._chains: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def open(self, request: DraftRequest) -> SimulatedSession:
        """Return a session for a prompt of `truths`."""
        chain = self._chains.get(request.prompt)
        if chain is None:
            chain = self._chains[request.prompt] = self._draft(request.prompt, request.vocab_size)
        return SimulatedSession(self, *chain)

    def _draft(self, prompt: tuple[int, ...], vocab_size: int) -> tuple[list[int], list[float]]:
        """Return drafted tokens of a whole text and their claimed probabilities."""
        right = self.right[prompt] if isinstance(self.right, Mapping) else self.right
        noise, half = NoiseStream(self.seed), SPREAD * min(right, 1.0 - right)
        tokens, claims = [], []
        for index, token in enumerate(self.truths[prompt]):
            place = len(prompt) + index
            chance = right + half * (2.0 * noise.uniform(place, NoiseUse.DRAFT, 0) - 1.0)
            wrong = noise.uniform(place, NoiseUse.DRAFT, 1) >= chance
            tokens.append((token + 1) % vocab_size if wrong else token)
            claims.append(chance**OVERCONFIDENCE)
        return tokens, claims


class SimulatedSession(DraftSession):
    """The drafts of a `SimulatedModel` for one text."""

    def __init__(self, model: SimulatedModel, tokens: list[int], claims: list[float]) -> None:
        self._kind, self._name = model.kind, model.name
        self._tokens, self._claims = tokens, claims

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` nodes."""
        first = context.generated
        last = min(first + min(budget, context.remaining - 1), len(self._tokens))
        accept_prob, claim = [], 1.0
        for index in range(first, last):
            claim *= self._claims[index]
            accept_prob.append(claim)
        return DraftTree.chain(
            self._tokens[first:last], self._name, accept_prob=accept_prob, kind=self._kind
        )

    def observe(self, step: Step) -> None:
        """Learn nothing."""
