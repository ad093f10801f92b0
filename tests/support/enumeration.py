"""Exact enumeration: the distribution of a rule's output, from every outcome of every draw.

The code under test runs unchanged. Only its noise differs: a uniform number is an interval that
is cut in two where the code compares it, Gumbel noise waits for the weights it is added to. Each
undecided answer is a branch. Every branch is run; the weights of the runs are the distribution.

The noise also refuses to serve one value twice. A rule that passes draws only independent
numbers, in one step and across steps, so that real noise gives it this distribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ragspec.sampling.noise import NoiseStream, NoiseUse

Tokens = tuple[int, ...]
Outcomes = dict[Tokens, float]


class NoiseUsedTwiceError(AssertionError):
    """Two draws use the same noise, so they are not independent."""


@dataclass
class Branches:
    """One run through the tree of decisions: follows a script, then takes first answers."""

    script: list[int] = field(default_factory=list)
    open: list[list[int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    served: set[tuple[int, NoiseUse, int]] = field(default_factory=set)
    uniforms: dict[tuple[int, NoiseUse, int], BranchingUniform] | None = None
    weight: float = 1.0

    def choose(self, weights: dict[int, float]) -> int:
        """Return one of the answers, of which each is taken in some run."""
        answers = list(weights)
        step = len(self.taken)
        answer = self.script[step] if step < len(self.script) else answers[0]
        self.open.append(answers[answers.index(answer) + 1 :])
        self.taken.append(answer)
        self.weight *= weights[answer] / sum(weights.values())
        return answer

    def serve(self, index: int, stream: NoiseUse, lanes: Sequence[int]) -> None:
        """Record the use of these values of noise; uniforms and Gumbels share them."""
        for lane in lanes:
            key = (index, stream, lane)
            if key in self.served:
                raise NoiseUsedTwiceError(f"index {index}, stream {stream.name}, lane {lane}")
            self.served.add(key)

    def following(self) -> list[int] | None:
        """Return the script of the next run, or None after the last one."""
        for step in range(len(self.taken) - 1, -1, -1):
            if self.open[step]:
                return [*self.taken[:step], self.open[step][0]]
        return None


class BranchingUniform:
    """A number in (0, 1) that is known only by its comparisons so far."""

    def __init__(self, branches: Branches) -> None:
        self.branches, self.low, self.high = branches, 0.0, 1.0

    def __lt__(self, bound: float) -> bool:
        if bound <= self.low or bound >= self.high:
            return bound > self.low
        below = self.branches.choose({1: bound - self.low, 0: self.high - bound})
        self.low, self.high = (self.low, bound) if below else (bound, self.high)
        return bool(below)

    def __le__(self, bound: float) -> bool:
        if bound == self.low:  # has probability zero, but a run all the same
            return bool(self.branches.choose({1: 0.0, 0: 1.0}))
        return self < bound

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    def __gt__(self, bound: float) -> bool:
        return not self <= bound


class BranchingGumbel:
    """Gumbel noise plus log weights; stands where torch expects a tensor."""

    def __init__(self, branches: Branches, logits: torch.Tensor) -> None:
        self.branches, self.logits = branches, logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ in ("add", "__add__", "__radd__"):
            self, other = args if isinstance(args[0], cls) else args[::-1]
            return cls(self.branches, self.logits + other)
        if func.__name__ == "argmax":
            return torch.tensor(args[0].ranked(1)[0])
        if func.__name__ == "topk":
            places = args[0].ranked(args[1])
            rest = [place for place in range(len(args[0].logits)) if place not in places]
            some = torch.arange(args[1], 0, -1, dtype=torch.float64)  # falling, as scores would be
            some[len(places) :] = float("-inf")
            return some, torch.tensor([*places, *rest][: args[1]])
        raise TypeError(f"no branches for {func.__name__}")

    def ranked(self, k: int) -> list[int]:
        """Return the places of the k largest scores, by draws without replacement.

        Fewer where the others have no weight.
        """
        weights = {
            place: weight
            for place, weight in enumerate(torch.softmax(self.logits, -1).tolist())
            if weight > 0.0
        }
        places: list[int] = []
        for _ in range(min(k, len(weights))):
            places.append(self.branches.choose(weights))
            del weights[places[-1]]
        return places


@dataclass(frozen=True, slots=True)
class BranchingNoise(NoiseStream):
    """Noise that branches wherever a draw can come out in several ways."""

    branches: Branches = field(default_factory=Branches)

    def gumbel(
        self, indices: Sequence[int], tokens: torch.Tensor, stream: NoiseUse = NoiseUse.TARGET
    ) -> torch.Tensor:
        (index,) = indices
        self.branches.serve(index, stream, tokens.tolist())
        zeros = torch.zeros(len(tokens), dtype=torch.float64)
        return cast(torch.Tensor, BranchingGumbel(self.branches, zeros))

    def uniform(self, index: int, stream: NoiseUse, lane: int = 0) -> float:
        number = BranchingUniform(self.branches)
        if self.branches.uniforms is None:
            self.branches.serve(index, stream, [lane])
        else:
            number = self.branches.uniforms.setdefault((index, stream, lane), number)
        return cast(float, number)


def enumerate_outcomes(run: Callable[[NoiseStream], Tokens], reuse: bool = False) -> Outcomes:
    """Return the probability of everything that `run` can return.

    reuse: return the same uniform number on a second use, instead of raising an error.
    """
    outcomes: defaultdict[Tokens, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        branches = Branches(script, uniforms={} if reuse else None)
        outcomes[run(BranchingNoise(0, 0, branches))] += branches.weight
        script = branches.following()
    return dict(outcomes)
