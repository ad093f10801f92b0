"""A machine on which everything takes a set time: budget policies judged without a wall clock.

A `Machine` has true costs, which a policy is scored by, and disturbances, through which it sees
them: noise, outliers, and others that take a share of the processor. Forwards, drafts and the
host's work are spent on it, and it is the clock by which `fuse` times its sources. Everything
follows from the seed. What is measured on it is simulated and must be called so.
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
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree

TIMINGS = 3  # of a forward at start-up, of which the least counts, as `CausalTarget` does it
SLOW = 0.05  # seconds of a forward that is timed once
CLAIMED = 0.6  # exponent of a draft model's claims: they are too large
SPREAD = 0.5  # width of the range in which the chance of its tokens lies


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What a machine adds to the times that a policy sees.

    noise: standard deviation of the logarithm of each time. outliers: share of the times that are
    3 to 10 times as long. steal: share of the time in which all takes twice as long, in periods of
    `period` seconds on average. slice: seconds for which another process holds the core, after as
    many of our own on average; a short look-up is seldom met, and then takes many times as long.
    """

    noise: float = 0.0
    outliers: float = 0.0
    steal: float = 0.0
    period: float = 0.5
    slice: float = 0.0


class Machine:
    """A clock in seconds that goes on when something is spent on it.

    truth: seconds of a forward on the quiet machine. host: seconds of the host's work for a step.
    belief: the curve that a policy is given; None measures it here, disturbances included. now:
    the time that a policy sees. quiet: what the same work takes where nothing disturbs it.
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
        """Return the time, as a performance counter does."""
        return self.now

    def spend(self, seconds: float) -> float:
        """Let work of so many quiet seconds be done; return the seconds that it seemed to take."""
        known = seconds * self._factor() + self._waited(seconds)
        self.quiet += seconds
        self.now += known
        return known

    def forward(self, rows: int, length: int) -> float:
        """Run the target over `rows` positions after `length` tokens; return the seconds seen."""
        return self.spend(self.truth.seconds(rows, length))

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Let fusions read this clock in place of the wall's."""
        with patch.object(fuse, "perf_counter", self):
            yield

    def _timed(self, rows: int, length: int) -> float:
        known = [self.forward(rows, length)]
        while known[0] < SLOW and len(known) < TIMINGS:
            known.append(self.forward(rows, length))
        return min(known)

    def _factor(self) -> float:
        harm, draw = self.disturbance, self._random
        factor = math.exp(draw.gauss(0.0, harm.noise)) if harm.noise else 1.0
        if harm.outliers and draw.random() < harm.outliers:
            factor *= draw.uniform(3.0, 10.0)
        return 2.0 * factor if self._busy() else factor

    def _busy(self) -> bool:
        """Tell whether a neighbour is at work now; its periods are of random length."""
        harm = self.disturbance
        while harm.steal and self.now >= self._until:
            self._stolen = not self._stolen
            share = harm.steal if self._stolen else 1.0 - harm.steal
            self._until += self._random.expovariate(0.5 / (harm.period * share))
        return self._stolen

    def _waited(self, seconds: float) -> float:
        """Return the seconds for which another process held the core meanwhile."""
        slice_ = self.disturbance.slice
        waited, left = 0.0, seconds
        while slice_ and (left := left - self._random.expovariate(1.0 / slice_)) > 0.0:
            waited += slice_
        return waited


class Priced:
    """A drafter whose drafts take a set time on a machine.

    call, node: seconds of a draft, and of each node asked for. teach: seconds of every step,
    drafted or not, as a source takes that learns from the target.
    """

    def __init__(
        self, drafter: Drafter, machine: Machine, call: float, node: float = 0.0, teach: float = 0.0
    ) -> None:
        self.drafter, self.machine = drafter, machine
        self.name, self.kind = drafter.name, drafter.kind
        self.call, self.node, self.teach = call, node, teach
        self.top_logits, self.reads_prompt = 1 if teach else 0, False

    def open(self, request: DraftRequest) -> PricedSession:
        """Return a session of the drafter that also takes its time."""
        session = self.drafter.open(request)
        return (LookingSession if hasattr(session, "expected_acceptance") else PricedSession)(
            self, session
        )


class PricedSession:
    """One row of a `Priced` drafter."""

    def __init__(self, priced: Priced, session: DraftSession) -> None:
        self._priced, self._session = priced, session

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Spend the time of a draft, and return it."""
        self._priced.machine.spend(self._priced.call + self._priced.node * budget)
        return self._session.propose(context, budget)

    def observe(self, step: Step) -> None:
        """Spend the time that teaching takes."""
        if self._priced.teach:
            self._priced.machine.spend(self._priced.teach)
        self._session.observe(step)


class LookingSession(PricedSession):
    """One that can tell its outlook."""

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return what the session tells."""
        message: float | None = self._session.expected_acceptance(context)  # type: ignore[attr-defined]
        return message


class Guesser:
    """A draft model in the place of one: a chain of which each token is right by chance.

    truths: by prompt, the text that follows. right: mean share of right tokens, for all prompts or
    by prompt; single tokens are surer or less sure, and claims follow that, but are too large, as
    those of models are.
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

        self._guesses: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def open(self, request: DraftRequest) -> GuesserSession:
        """Return a session for a prompt whose continuation is known."""
        result = self._guesses.get(request.prompt)
        if result is None:
            result = self._guesses[request.prompt] = self._guess(request.prompt, request.vocab_size)
        return GuesserSession(self, *result)

    def _guess(self, prompt: tuple[int, ...], vocab_size: int) -> tuple[list[int], list[float]]:
        """Return the guess of every token of a text, and its claim; they depend on the place."""
        right = self.right[prompt] if isinstance(self.right, Mapping) else self.right
        noise, half = NoiseStream(self.seed), SPREAD * min(right, 1.0 - right)
        tokens, claims = [], []
        for index, token in enumerate(self.truths[prompt]):
            place = len(prompt) + index
            chance = right + half * (2.0 * noise.uniform(place, NoiseUse.DRAFT, 0) - 1.0)
            wrong = noise.uniform(place, NoiseUse.DRAFT, 1) >= chance
            tokens.append((token + 1) % vocab_size if wrong else token)
            claims.append(chance**CLAIMED)
        return tokens, claims


class GuesserSession:
    """The guesses at one text."""

    def __init__(self, guesser: Guesser, tokens: list[int], claims: list[float]) -> None:
        self._kind, self._name = guesser.kind, guesser.name
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
