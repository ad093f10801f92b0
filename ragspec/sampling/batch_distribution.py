"""The distributions of all rows of a batch at once, where the logits are.

A step of fixed shapes may not wait for the host. So settings and noise keys are tensors written in
place, and a `DistributionShape`, known before the step starts, states the work of a batch. The
tokens are those of `TokenDistribution.select`, which stays the reference. One number of candidates
serves all rows. If survivors of a filter may lie beyond them, a node gets no token here, and the
host computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.distribution import CANDIDATES, TokenDistribution
from ragspec.sampling.noise import exponential_of_keys
from ragspec.sampling.processors import copied
from ragspec.sampling.row_penalties import PenaltyShape, RowPenalties, known, over
from ragspec.sampling.settings import Sampling
from ragspec.sampling.top_tokens import best_tokens


@dataclass(frozen=True, slots=True)
class DistributionShape:
    """The work of a batch's distributions; a captured step serves one such shape alone.

    Attributes:
        candidates: Number of best tokens that the filters look at, 0 if no row has a filter.
        unfiltered: Whether a row samples from the whole vocabulary.
        top_k: Whether a row has this filter.
        near, far: Whether a row's top-p needs the mass of its candidates, or of the vocabulary.
        penalties: The changes of the logits by the texts.
    """

    candidates: int = 0
    unfiltered: bool = False
    top_k: bool = False
    near: bool = False
    far: bool = False
    penalties: PenaltyShape = field(default_factory=PenaltyShape)

    @property
    def greedy(self) -> bool:
        """Whether every row takes the largest score."""
        return not (self.candidates or self.unfiltered)

    def whole(self, vocab_size: int) -> DistributionShape:
        """Return the shape of the same filters over the whole vocabulary."""
        return replace(
            self, candidates=vocab_size, unfiltered=False, near=self.near or self.far, far=False
        )

    @classmethod
    def of(
        cls, distributions: Sequence[TokenDistribution | None], vocab_size: int
    ) -> DistributionShape:
        """Return the shape of rows with these distributions."""
        sample = [
            distribution.sampling
            for distribution in distributions
            if distribution is not None and not distribution.sampling.greedy
        ]
        filtered = [each for each in sample if each.filtered]
        most = max((each.top_k for each in filtered), default=0)
        enough = (k for k in CANDIDATES if most + 16 <= k and 4 * k < vocab_size)
        candidates = next(enough, vocab_size) if filtered else 0
        nuclei = [candidates == vocab_size or each.top_k > 0 for each in filtered if each.top_p < 1]
        return cls(
            candidates,
            unfiltered=len(filtered) < len(sample),
            top_k=most > 0,
            near=any(nuclei),
            far=not all(nuclei),
            penalties=PenaltyShape.of(distributions),
        )


class BatchDistribution:
    """The distributions of B rows as tensors on one device, written in place.

    Args:
        longest: A number above every generated index of a row, such as the slots of its cache.

    Attributes:
        shape: The work of the distributions that are set at present.
    """

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, longest: int
    ) -> None:
        self.shape = DistributionShape()
        self._distributions: list[TokenDistribution | None] = [None] * rows
        self._penalties: RowPenalties | None = None  # made for the first row that has penalties
        self._tokens = torch.arange(vocab_size, device=device)
        self._indices = torch.arange(longest, device=device)
        self._keys = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self._numbers = torch.ones(3, rows, 1, 1, dtype=torch.float64, device=device)
        self._temperature, self._top_p, self._least = self._numbers.unbind()
        self._kinds = torch.zeros(3, rows, 1, dtype=torch.bool, device=device)
        self._filtered, self._unfiltered, self._top_k = self._kinds.unbind()
        self._never, self._ever = torch.tensor([-torch.inf, torch.inf]).to(self._numbers)
        self._kth = torch.zeros(rows, 1, 1, dtype=torch.int64, device=device)
        self._uncertain = torch.tensor(-1).to(self._kth)

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return len(self._tokens)

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self._tokens.device

    @staticmethod
    def takes(distribution: TokenDistribution) -> bool:
        """Return whether the distribution can be computed here; others are left to the host."""
        return known(distribution.processors)

    def set(
        self, row: int, distribution: TokenDistribution | None, text: Sequence[int] = ()
    ) -> None:
        """Write the distribution of a row that joins; None makes it a greedy row of padding.

        Args:
            text: Committed tokens of the row, the root last; for penalties alone.
        """
        self._distributions[row] = distribution
        sampling = Sampling() if distribution is None else distribution.sampling
        sample, filtered = not sampling.greedy, sampling.filtered
        kinds = [sample and filtered, sample and not filtered, sampling.top_k > 0]
        self._write(self._kinds, row, kinds)
        least = torch.log(torch.tensor(sampling.min_p, dtype=torch.float64))
        top_p = sampling.top_p if sampling.top_p < 1.0 else torch.inf  # sums may round to 1 early
        self._write(self._numbers, row, [sampling.temperature or 1.0, top_p, float(least)])
        if distribution is not None and sample:
            self._keys[row] = distribution.noise.keys(self._indices)
        size = self.size
        self.shape = DistributionShape.of(self._distributions, size)
        last = self.shape.candidates
        ks = [dist.sampling.top_k if dist else 0 for dist in self._distributions]
        self._kth.copy_(torch.tensor([max(min(k or last, last), 1) - 1 for k in ks])[:, None, None])
        if self._penalties is None and not self.shape.penalties.nothing:
            self._penalties = RowPenalties(len(self._distributions), size, self._keys.device)
        if self._penalties is not None:
            self._penalties.set(row, distribution, text)

    def grow(self, tokens: Tensor) -> None:
        """Add tokens i64 [B, m] to the rows' texts; entries of `size` add nothing."""
        if self._penalties is not None and self.shape.penalties.texts:
            self._penalties.grow(tokens)

    def choose(
        self, logits: Tensor, indices: Tensor, tokens: Tensor, see: Tensor, *, whole: bool = False
    ) -> Tensor:
        """Return the tokens after all nodes i64 [B, n], -1 for an uncertain one.

        Args:
            logits: The target's logits [B, n, V].
            indices: The generated index of the token after each node, i64 [B, n].
            tokens: The nodes' own tokens, the root's first, i64 [B, n].
            see: The ancestors of each node, itself among them, bool [B, n, n].
            whole: Let filters look at the whole vocabulary, which is slower and leaves no token
                uncertain. The tokens of rows without a filter are then invalid.
        """
        shape = self.shape.whole(self.size) if whole else self.shape
        if self._penalties is not None and not shape.penalties.nothing:
            logits = self._penalties.apply(logits, shape.penalties, indices, tokens, see)
        best: Tensor = logits.argmax(-1)
        if shape.greedy:
            return best
        keys = self._keys.gather(1, indices)[..., None]
        scaled = self._scaled(logits) if shape.unfiltered or shape.far else None
        noise = None
        if shape.unfiltered and scaled is not None:
            noise = exponential_of_keys(keys, self._tokens)
            sample = (scaled - noise).argmax(-1)
            best = torch.where(self._unfiltered, sample, best)
        if shape.candidates:
            sample = self._samples(shape, logits, scaled, keys, noise)
            best = torch.where(self._filtered, sample, best)
        return best

    def _samples(
        self,
        shape: DistributionShape,
        logits: Tensor,
        everything: Tensor | None,
        keys: Tensor,
        noise: Tensor | None,
    ) -> Tensor:
        """Return tokens i64 [B, n] under filters, -1 for uncertain ones.

        `everything` and `noise` are the scaled scores of the whole vocabulary and their noise, None
        if the shape needs none.
        """
        values, tokens = best_tokens(logits, shape.candidates)
        scaled = self._scaled(values)
        near = scaled
        if shape.top_k:
            kth = scaled.gather(-1, self._last(shape).expand(*scaled.shape[:-1], 1))
            near = torch.where(scaled < kth, self._never, scaled)
        survivors = torch.where(near < self._floor(shape, near, everything), self._never, near)
        noise = exponential_of_keys(keys, tokens) if noise is None else noise.gather(-1, tokens)
        best, place = (survivors - noise).max(-1, keepdim=True)
        settled = best.abs() < torch.inf  # neither nan nor a node without any survivor
        if shape.candidates < self.size:
            last = survivors[..., -1:]  # a survivor may lie beyond it, or a tie that counts
            if shape.top_k:
                last = torch.where(self._top_k[..., None], near[..., -1:], last)
            settled = settled & (last == -torch.inf)
        return torch.where(settled, tokens.gather(-1, place), self._uncertain).squeeze(-1)

    def _last(self, shape: DistributionShape) -> Tensor:
        """Return the place of the last candidate within top-k: i64 [B, 1, 1]."""
        if shape.candidates == self.shape.candidates:
            return self._kth
        return torch.where(self._top_k[..., None], self._kth, shape.candidates - 1)

    def _floor(self, shape: DistributionShape, near: Tensor, everything: Tensor | None) -> Tensor:
        """Return the least score f64 [B, n, 1] that passes top-p and min-p.

        `near` f64 [B, n, K], in descending order, are the scores that passed top-k.
        """
        top = near[..., :1]
        floor = top + self._least
        if not (shape.near or shape.far):
            return floor
        share = (near - (self._mass(shape, near, everything).log() + top)).exp()
        inside = share.cumsum(-1) - share < self._top_p
        return torch.maximum(floor, torch.where(inside, near, self._ever).amin(-1, keepdim=True))

    def _mass(self, shape: DistributionShape, near: Tensor, everything: Tensor | None) -> Tensor:
        """Return the whole mass under top-p, f64 [B, n, 1], in units of the best token's."""
        top = near[..., :1]
        if everything is None or not shape.far:
            return _sum(near, top)
        whole = _sum(everything, top)
        if not shape.near:
            return whole
        return torch.where(self._top_k[..., None], _sum(near, top), whole)

    def _scaled(self, scores: Tensor) -> Tensor:
        return over(scores, self._temperature)

    @staticmethod
    def _write(buffer: Tensor, row: int, values: Sequence[float]) -> None:
        buffer[:, row].view(-1).copy_(torch.tensor(values, dtype=buffer.dtype))


def _sum(scaled: Tensor, top: Tensor) -> Tensor:
    """Return the sum of exp(scaled - top) f64 [B, n, 1], as `logsumexp` computes it."""
    return (scaled - top).exp_().sum(-1, keepdim=True)


class BatchRows:
    """The rows of one call as transformers has them, padding included.

    Args:
        ids, mask: Token ids i64 [R, T] and their mask [R, T] or None, of R = B * n rows.
        n: Rows of each prompt.
        shared: Objects that copies of processors share.
    """

    def __init__(self, ids: Tensor, mask: Tensor | None, n: int, shared: Sequence[Any]) -> None:
        self.ids, self.n, self.shared = ids, n, shared
        self._lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()

    def whole(self, row: int, ids: Tensor) -> Tensor:
        """Return a row's ids as transformers has them, from the engine's ids i64 [1, T']."""
        new = ids[:, self._lengths[row] :]
        return torch.cat([self.ids[row : row + 1].to(ids.device), new], dim=1)


@dataclass(frozen=True)
class RowProcessors:
    """Makes the processors of single rows from those of a batch."""

    rows: BatchRows
    processors: Sequence[Any]

    def of_row(self, row: int) -> Any:
        """Return a processor that calls the row's processors with the ids of transformers."""
        memo = {id(thing): thing for thing in self.rows.shared}
        processors = list(self.processors)
        if len(self.rows.ids) > 1:
            processors = [_of_row(each, row, self.rows, memo) for each in processors]

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            whole = self.rows.whole(row, ids)
            for processor in processors:
                scores = processor(whole, scores)
            return scores

        return process


@dataclass(frozen=True)
class RowCriterion:
    """Makes the stopping criterion of single rows from that of a batch."""

    rows: BatchRows
    criterion: Any

    def of_row(self, row: int) -> Any:
        """Return a criterion that calls the batch's one with the ids of transformers."""
        return lambda ids, scores: self.criterion(self.rows.whole(row, ids), scores)


def _of_row(processor: Any, row: int, rows: BatchRows, memo: dict[int, Any]) -> Any:
    """Return a processor of one row, with that row's part of the state for all rows."""
    kind, prompt = type(processor).__name__, row // rows.n
    if kind == "PrefixConstrainedLogitsProcessor":
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(row, ids), 1)
    copy: Any = copied(processor, memo)
    if kind == "RepetitionPenaltyLogitsProcessor" and torch.is_tensor(copy.prompt_ignore_length):
        copy.prompt_ignore_length = copy.prompt_ignore_length[row : row + 1]
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        copy.encoder_input_ids = copy.encoder_input_ids[prompt : prompt + 1]
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        copy.batch_size, copy.generated_ngrams = 1, copy.generated_ngrams[prompt : prompt + 1]
    elif kind == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        context, prompts = copy.unconditional_context, len(rows.ids) // rows.n
        for name in ("input_ids", "attention_mask"):
            if (inputs := context[name]) is not None:
                context[name] = _one_of(inputs, prompt, prompts)
    return copy


def _one_of(negative: Tensor, prompt: int, prompts: int) -> Tensor:
    """Return the negative prompt [1, T] of one prompt, from one for each or one for all."""
    if len(negative) not in (1, prompts):
        raise InputError(
            f"got {len(negative)} rows of negative_prompt_ids for {prompts} prompts; expected one "
            "for each, or one for all"
        )
    return negative if len(negative) == 1 else negative[prompt : prompt + 1]
