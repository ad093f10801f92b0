"""The distributions of all rows of a batch at once, where the logits are.

A step of fixed shapes may not wait for the host. So settings and noise keys are tensors written in
place, and a `DistributionShape`, known before the step starts, states the work of a batch. The
tokens are those of `TokenDistribution.select`. One number of candidates serves all rows. If
survivors of a filter may lie beyond them, a node gets no token here, and the host computes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.sampling.distribution import Filters, TokenDistribution, candidate_counts
from ragspec.sampling.noise import NoiseStream, exponential_of_keys
from ragspec.sampling.penalties import BatchPenalties, Penalties, PenaltyShape
from ragspec.sampling.settings import Sampling

FRESH = 64  # new tokens of a row's text that a step can take


@dataclass(frozen=True, slots=True)
class DistributionShape:
    """The work of a batch's distributions; a captured step serves one such shape alone.

    Attributes:
        candidates: Number of best tokens that the filters look at, 0 if no row has a filter.
        unfiltered: Whether a row samples from the whole vocabulary.
        top_k, top_p: Whether a row has this filter.
        total: Whether a row's top-p needs the mass of the whole vocabulary.
        penalties: The changes of the logits by the texts.
    """

    candidates: int = 0
    unfiltered: bool = False
    top_k: bool = False
    top_p: bool = False
    total: bool = False
    penalties: PenaltyShape = field(default_factory=PenaltyShape)

    @property
    def greedy(self) -> bool:
        """Whether every row takes the largest score."""
        return not (self.candidates or self.unfiltered)

    @classmethod
    def of(cls, distributions: Sequence[TokenDistribution], vocab_size: int) -> "DistributionShape":
        """Return the shape of rows with these distributions."""
        sampled = [each.sampling for each in distributions if not each.sampling.greedy]
        filtered = [each for each in sampled if each.filtered]
        most = max((each.top_k for each in filtered), default=0)
        candidates = candidate_counts(most, vocab_size)[0] if filtered else 0
        nuclei = [each for each in filtered if each.top_p < 1.0]
        parts = [part.shape for each in distributions for part in _penalties(each)]
        return cls(
            candidates,
            unfiltered=len(filtered) < len(sampled),
            top_k=most > 0,
            top_p=bool(nuclei),
            total=candidates < vocab_size and any(not each.top_k for each in nuclei),
            penalties=PenaltyShape(*map(any, zip(*parts, strict=True))),
        )


class BatchDistribution:
    """The distributions of B rows as tensors on one device, written in place by `notify`.

    Args:
        longest: A number above every generated index of a row, such as the slots of its cache.

    Attributes:
        size: Size of the vocabulary.
        shape: The work of the distributions that are set at present.
        fresh: New tokens of each text for `grow`, i64 [B, FRESH]. The vocabulary size, which is no
            token, pads the rows.
    """

    def __init__(self, rows: int, size: int, device: torch.device | str, longest: int) -> None:
        self.size, self.shape = size, DistributionShape()
        self._padding = TokenDistribution(Sampling(), NoiseStream(0))
        self._distributions = [self._padding] * rows
        self._known: list[int | None] = [0] * rows  # tokens of each text that are passed on
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), size)
        self._penalties: BatchPenalties | None = None  # made for the first row that has penalties
        self._tokens = torch.arange(size, device=device)
        self._indices = torch.arange(longest, device=device)
        self._keys = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self._numbers = torch.ones(3, rows, 1, 1, dtype=torch.float64, device=device)
        self._kinds = torch.zeros(3, rows, 1, dtype=torch.bool, device=device)
        self._filtered, self._unfiltered, self._limited = self._kinds.unbind()
        # The places within top-k, among the candidates and among the vocabulary.
        self._kth = torch.zeros(2, rows, 1, 1, dtype=torch.int64, device=device)
        self._uncertain = torch.tensor(-1, device=device)
        self._filters = [Filters.of(Sampling())] * 2  # over the candidates, and the vocabulary

    @staticmethod
    def takes(distribution: TokenDistribution) -> bool:
        """Return whether the distribution can be computed here; others are left to the host."""
        parts = _penalties(distribution)
        others = [part for part in parts if not part.forbids]
        return len(parts) == len(distribution.processors) and len(others) <= 1

    def notify(
        self, rows: Mapping[int, tuple[TokenDistribution, Sequence[int]]]
    ) -> DistributionShape:
        """Set the distributions and texts of the next step; all other rows are padding.

        If a row keeps its distribution, only the new tokens of its text are passed on.
        """
        self.fresh[:] = self.size
        for row, known in enumerate(self._known):
            distribution, text = rows.get(row, (None, ()))
            same = self._distributions[row] is (distribution or self._padding)
            if same and known is not None and len(new := text[known:]) <= FRESH:
                self.fresh[row, : len(new)] = new
            else:
                self.set(row, distribution, text)
            self._known[row] = len(text)
        return self.shape

    def forget(self) -> None:
        """Pass all tokens again before the next step, because the last one may not have run."""
        self._known = [None] * len(self._known)

    def set(
        self, row: int, distribution: TokenDistribution | None, text: Sequence[int] = ()
    ) -> None:
        """Write the distribution of a row that joins; None makes it a greedy row of padding.

        Args:
            text: Committed tokens of the row, the root last; for penalties alone.
        """
        distribution = self._distributions[row] = distribution or self._padding
        sampling = distribution.sampling
        filters, filtered = Filters.of(sampling), sampling.filtered and not sampling.greedy
        numbers = [filters.temperature, filters.top_p, filters.log_min_p]
        kinds = [filtered, not (filtered or sampling.greedy), sampling.top_k > 0]
        self._numbers[:, row, 0, 0].copy_(torch.tensor(numbers, dtype=torch.float64))
        self._kinds[:, row, 0].copy_(torch.tensor(kinds))
        self._kth[1, row] = min(sampling.top_k or self.size, self.size) - 1
        if not sampling.greedy:
            self._keys[row] = distribution.noise.keys(self._indices)
        shape = self.shape = DistributionShape.of(self._distributions, self.size)
        limited = self._limited[..., None] if shape.top_k else False
        temperature, top_p, least = self._numbers.unbind()
        self._kth[0] = self._kth[1].clamp(max=max(shape.candidates, 1) - 1)
        self._filters = [
            Filters(temperature, top_p, least, kth, limited, shape.top_p) for kth in self._kth
        ]
        if self._penalties is None and any(shape.penalties):
            rows, device = len(self._distributions), self._tokens.device
            self._penalties = BatchPenalties(rows, self.size, device)
        if self._penalties is not None:
            self._penalties.set(row, _penalties(distribution), text, distribution.prompt_length)

    def grow(self, tokens: Tensor) -> None:
        """Add tokens i64 [B, m] to the rows' texts; entries of `size` add nothing."""
        if self._penalties is not None and self.shape.penalties.reads_texts:
            self._penalties.grow(tokens)

    def choose(
        self, logits: Tensor, indices: Tensor, tokens: Tensor, see: Tensor, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the token after each node i64 [B, n], -1 for an uncertain one, and its top score.

        Where the top score is not finite, the token is invalid.

        Args:
            logits: The target's logits [B, n, V].
            indices: The generated index of the token after each node, i64 [B, n].
            tokens: The nodes' own tokens, the root's first, i64 [B, n].
            see: The ancestors of each node, itself among them, bool [B, n, n].
            whole: Let filters look at the whole vocabulary, which is slower and leaves no token
                uncertain. The tokens of rows without a filter are then invalid.
        """
        shape, filters = self.shape, self._filters[whole]
        if whole:
            shape = replace(shape, candidates=self.size, unfiltered=False, total=False)
        if self._penalties is not None and any(shape.penalties):
            logits = self._penalties.apply(logits, shape.penalties, indices, tokens, see)
        top, best = logits.max(-1)
        if shape.greedy:
            return best, top
        keys = self._keys.gather(1, indices)[..., None]
        noise = None
        scaled = filters.scale(logits) if shape.unfiltered or shape.total else None
        if shape.unfiltered and scaled is not None:
            noise = exponential_of_keys(keys, self._tokens)
            best = torch.where(self._unfiltered, (scaled - noise).argmax(-1), best)
        if shape.candidates:
            everything = scaled if shape.total else None
            survivors, few, certain = filters.apply(logits, shape.candidates, everything)
            noise = exponential_of_keys(keys, few) if noise is None else noise.gather(-1, few)
            value, place = (survivors - noise).max(-1, keepdim=True)
            settled = value.abs() < torch.inf  # neither nan nor a node without any survivor
            settled = settled if certain is None else settled & certain
            sample = torch.where(settled, few.gather(-1, place), self._uncertain)
            best = torch.where(self._filtered, sample.squeeze(-1), best)
        return best, top


def _penalties(distribution: TokenDistribution) -> list[Penalties]:
    return [part for part in distribution.processors if isinstance(part, Penalties)]
