"""The synthetic drafter: right with a set probability, for ceilings and for tests.

It knows the true continuation (from a plain run) and spoils each token with a set probability, so
it tells what any drafter of that acceptance would be worth on this device. Its figures are
simulated and must be labelled so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftTree

_IS_RIGHT, _WHICH_WRONG = 0, 1


class SyntheticDrafter(Drafter):
    """Proposes the true continuation as a chain, each token right with probability `acceptance`.

    continuation: the token ids that plain decoding generates; or, for several prompts, these by
    the prompt's ids. Which tokens are wrong depends on seed and generated index alone.
    Raises InputError where there is no continuation or the acceptance lies outside 0 .. 1.
    """

    name = "synthetic"

    def __init__(
        self,
        acceptance: float = 0.8,
        continuation: Sequence[int] | Mapping[tuple[int, ...], Sequence[int]] | None = None,
        seed: int = 0,
    ) -> None:
        if continuation is None:
            raise InputError(
                "got no continuation; expected the token ids of a plain run. Use "
                "SyntheticDrafter(acceptance, continuation=result.tokens)."
            )
        if not 0.0 <= acceptance <= 1.0:
            raise InputError(f"acceptance is {acceptance}; expected a probability from 0 to 1.")
        self.acceptance = acceptance
        self.continuation = continuation
        self.seed = seed

    def open(self, request: DraftRequest) -> SyntheticSession:
        """Return a session for one prompt; raises InputError where its continuation is unknown."""
        truth = self.continuation
        if isinstance(truth, Mapping):
            if request.prompt not in truth:
                raise InputError(
                    f"no continuation is known for this prompt of {len(request.prompt)} tokens; "
                    "expected one for every prompt."
                )
            truth = truth[request.prompt]
        noise = NoiseStream(self.seed)
        return SyntheticSession(truth, self.acceptance, noise, request.vocab_size)


class SyntheticSession(DraftSession):
    """The true continuation of one row."""

    def __init__(
        self, truth: Sequence[int], acceptance: float, noise: NoiseStream, vocab_size: int
    ) -> None:
        self._truth = truth
        self._acceptance = acceptance
        self._noise = noise
        self._vocab_size = vocab_size

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` nodes, as far as the continuation is known."""
        first = context.generated
        last = min(first + min(budget, context.remaining - 1), len(self._truth))
        tokens = [self._token(index) for index in range(first, last)]
        accept_prob = [self._acceptance ** (depth + 1) for depth in range(len(tokens))]
        return DraftTree.chain(tokens, SyntheticDrafter.name, accept_prob=accept_prob)

    def _token(self, index: int) -> int:
        right = int(self._truth[index])
        if self._noise.uniform(index, NoiseUse.DRAFT, _IS_RIGHT) < self._acceptance:
            return right
        draw = self._noise.uniform(index, NoiseUse.DRAFT, _WHICH_WRONG)
        return (right + 1 + int(draw * (self._vocab_size - 1))) % self._vocab_size
