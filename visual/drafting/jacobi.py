"""Speculative Jacobi decoding: the target's last forward drafts for its next one, without a model.

A forward verifies a window of drafted codes. Behind the first rejected code, the distributions that
this forward computed under the stale codes yield the next drafts. Two forms:

- "sampled", SJD (Teng et al., arXiv 2410.01699): codes are sampled again from those distributions,
  which the draft carries as q, so that the rejection rules keep the target's distribution;
- "coupled", SCD (So et al., arXiv 2510.24211, the form with shared Gumbel noise): each code is the
  target's choice under the stale codes, made with the noise of its index. A code stays the same
  where its distribution hardly changed, and `walk` generates the codes of plain decoding.

Positions that no forward has reached start as the code to the left, else above, as in SJD.
With branches the coupled form is a tree: each code of the chain gets the target's next choices
under the same noise as siblings.
Deviations: the branches; the start code is a point distribution (q = 1), not a sample; the window
shrinks with the budget. A node's acceptance probability is how often codes of its age were right.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Literal, get_args

import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.sampling.settings import checked_count
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import follow

Form = Literal["coupled", "sampled"]

_RATES = (0.3, 0.5, 0.6, 0.7)
_RATE = 0.1
_BESIDE = 5  # one node in five of the budget, at least, is for branches
_SECOND = 0.3  # how often a branch is right where the chain is wrong, at first


class JacobiDrafter(Drafter):
    """Drafts the target's choices under the last draft.

    Args:
        window: The most codes in a draft.
        form: "coupled" (SCD, for `walk`) or "sampled" (SJD, for `rejection`).
        width: Codes in a row of the image; None for one endless row, as in text.
        branches: Further codes beside each of the chain, in the coupled form alone; 0 for a chain.
        end: The code at the end of every row, if the model has one.

    Raises:
        InputError: An argument is out of range, or the form has no branches.
    """

    method = Method("the target's last forward", "SJD, SCD", listed=False)
    name = "jacobi"

    def __init__(
        self,
        window: int = 16,
        form: Form = "coupled",
        *,
        width: int | None = None,
        branches: int = 0,
        end: int | None = None,
    ) -> None:
        if form not in get_args(Form):
            raise InputError(f"got form {form!r}; expected 'coupled' or 'sampled'.")
        for name, count in (("window", window), ("width", 1 if width is None else width)):
            checked_count(count, name)
        if branches < 0 or (branches and form != "coupled"):
            raise InputError(
                f"got {branches} branches in the form {form!r}; expected 0 or more in the form "
                "'coupled', and 0 in any other."
            )
        self.window, self.width, self.end = window, width, end
        self.form, self.kind, self.branches = form, DraftKind(form), branches

    def open(self, request: DraftRequest) -> "JacobiSession":
        """Return a session for one row; its first window copies codes to the left or above."""
        noise = NoiseStream(0) if request.distribution is None else request.distribution.noise
        return JacobiSession(self, request.vocab_size, noise)


class JacobiSession(DraftSession):
    """Drafts one row from the target's choices under the last draft."""

    def __init__(self, drafter: JacobiDrafter, vocab_size: int, noise: NoiseStream) -> None:
        self._drafter, self._vocab_size, self._noise = drafter, vocab_size, noise
        self._guesses: dict[int, list[int]] = {}  # by generated index: the coupled form's codes
        self._distributions: dict[int, Tensor] = {}  # the sampled form's distributions
        self._ages: dict[int, int] = {}
        self._rates = list(_RATES)
        self._seconds = [_SECOND * 0.5**rank for rank in range(drafter.branches)]
        self._first = 0
        self._drafted: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the window behind the text as a draft of at most `budget` nodes."""
        drafter, first = self._drafter, context.generated
        room = budget - budget // _BESIDE if drafter.branches else budget
        size = max(0, min(drafter.window, room, context.remaining - 1))
        written = context.tokens[context.prompt_length :]
        self._first, self._drafted = first, []
        distributions: list[Tensor] = []
        for node, index in enumerate(range(first, first + size)):
            code = self._fresh([*written, *self._drafted], index, context.tokens[-1])
            if drafter.form == "coupled":
                code = self._guesses.get(index, [code])[0]
            elif (distribution := self._distributions.get(index)) is not None:
                bounds = distribution.cumsum(0)
                number = self._noise.uniform(first, NoiseUse.DRAFT, node)
                code = bisect_right((bounds / bounds[-1]).tolist(), number)
                distributions.append(distribution)
            else:
                distributions.append(torch.zeros(self._vocab_size, dtype=torch.float64))
                distributions[-1][code] = 1.0
            self._drafted.append(code)
        distributions += [torch.zeros_like(each) for each in distributions[:1]]  # below the last
        q = torch.stack(distributions) if distributions else None
        # The probabilities of a chain, which no sampled code influences.
        rates = (self._rates[self._age(index)] for index in range(first, first + size))
        name, kind, accept_prob = drafter.name, drafter.kind, [*accumulate(rates, mul)]
        chain = DraftTree.chain(self._drafted, name, accept_prob=accept_prob, kind=kind, q=q)
        return self._branched(chain, budget) if drafter.branches else chain

    def observe(self, step: Step) -> None:
        """Update the acceptance rates, and store the target's choices behind the text."""
        emitted, drafted = step.tokens, self._drafted
        for i, (code, token) in enumerate(zip(drafted, emitted, strict=False)):
            age = self._age(self._first + i)
            self._rates[age] += _RATE * ((code == token) - self._rates[age])
            if code != token:
                for rank, other in enumerate(self._guesses.get(self._first + i, [])[1:]):
                    self._seconds[rank] += _RATE * ((other == token) - self._seconds[rank])
                break
        ages, self._ages = self._ages, {}
        self._guesses, self._distributions, self._drafted = {}, {}, []
        if step.view is None:
            return
        nodes = follow(step.tree, drafted)[max(0, len(emitted) - 1) :]
        indices = range(self._first + max(1, len(emitted)), self._first + len(drafted) + 1)
        for index, _ in zip(indices, nodes, strict=False):
            self._ages[index] = ages.get(index, 0) + 1
        if self._drafter.form == "sampled":
            distributions = map(step.view.probabilities, nodes)
            self._distributions = dict(zip(indices, distributions, strict=False))
        elif nodes:
            choices = step.view.choices(nodes, 1 + self._drafter.branches)
            self._guesses = dict(zip(indices, choices, strict=False))

    def _branched(self, chain: DraftTree, budget: int) -> DraftTree:
        """Return the chain with the likeliest branches that fit into the budget.

        The chain has priority: its deep codes are mostly wrong, but the forward updates them.
        """
        tokens, parents = chain.tokens.tolist(), chain.parents.tolist()
        accept_prob = chain.accept_prob.tolist()
        offers = []
        for node in range(len(chain)):
            missed = (accept_prob[node - 1] if node else 1.0) - accept_prob[node]
            beside = self._guesses.get(self._first + node, [])[1:]
            for code, second in zip(beside, self._seconds, strict=False):
                if code != tokens[node]:
                    offers.append((missed * second, -node, code))
        for chance, node, code in sorted(offers, reverse=True)[: max(0, budget - len(chain))]:
            tokens.append(code)
            parents.append(-node - 1)
            accept_prob.append(chance)
        return DraftTree.build(
            tokens, parents, chain.sources[0], accept_prob=accept_prob, kind=chain.kind
        )

    def _fresh(self, codes: Sequence[int], index: int, last: int) -> int:
        """Return the start code of a position that no forward has reached."""
        width, end = self._drafter.width, self._drafter.end
        if end is not None and width is not None and index % width == width - 1:
            return end
        left = index - 1 if width is None or index % width else -1
        above = -1 if width is None else index - width
        place = next((at for at in (left, above, index - 1) if at >= 0), -1)
        return codes[place] if place >= 0 else last

    def _age(self, index: int) -> int:
        """Return how many forwards have updated a position, capped at the oldest age."""
        return min(self._ages.get(index, 0), len(self._rates) - 1)
