"""The distributions of all rows of a batch at once, where the logits are.

A step of fixed shapes may ask nothing of the host: settings and noise keys are tensors written in
place, and what work a batch asks for is a `DistributionShape`, known before the step starts. The
tokens are
those of `TokenLaw.select`, which stays the reference. One number of candidates serves all rows;
where survivors of a filter may lie beyond them, a node has no token and the host works it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import exponential_of_keys
from ragspec.sampling.processors import copied
from ragspec.sampling.row_penalties import PenaltyShape, RowPenalties, known, over
from ragspec.sampling.settings import Sampling
from ragspec.sampling.top_tokens import best_tokens

_CANDIDATES = (128, 2048)


@dataclass(frozen=True, slots=True)
class DistributionShape:
    """What the distributions of a batch need; a captured step serves one such shape alone.

    candidates: how many of the best tokens the filters look at, 0 where no row has a filter.
    unfiltered: whether a row draws from the whole vocabulary. top_k: whether a row has that filter.
    near, far: whether a row's top-p needs the mass of its candidates, or of the whole vocabulary.
    penalties: how the texts change the logits.
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
        """Return the shape of the same filters where they look at the whole vocabulary."""
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
        filtered = [each for each in sample if _filters(each)]
        most = max((each.top_k for each in filtered), default=0)
        enough = (k for k in _CANDIDATES if most + 16 <= k and 4 * k < vocab_size)
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

    longest: above every generated index that a row will be asked for, such as the slots of its
    cache. shape: what the distributions set now ask for.
    """

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, longest: int
    ) -> None:
        self.shape = DistributionShape()
        self._distributions: list[TokenDistribution | None] = [None] * rows
        self._penalties: RowPenalties | None = None  # made for the first row that asks for some
        self._tokens = torch.arange(vocab_size, device=device)
        self._indices = torch.arange(longest, device=device)
        self._keys = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self._numbers = torch.ones(3, rows, 1, 1, dtype=torch.float64, device=device)
        self._temperature, self._top_p, self._least = self._numbers.unbind()
        self._kinds = torch.zeros(3, rows, 1, dtype=torch.bool, device=device)
        self._filtered, self._unfiltered, self._top_k = self._kinds.unbind()
        self._never, self._ever = torch.tensor([-torch.inf, torch.inf]).to(self._numbers)
        self._kth = torch.zeros(rows, 1, 1, dtype=torch.int64, device=device)
        self._nobody = torch.tensor(-1).to(self._kth)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self._tokens)

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self._tokens.device

    @staticmethod
    def takes(distribution: TokenDistribution) -> bool:
        """Whether the distribution can be computed here; others keep the host's path."""
        return known(distribution.processors)

    def set(
        self, row: int, distribution: TokenDistribution | None, text: Sequence[int] = ()
    ) -> None:
        """Write the distribution of a row that joins; None: of padding, greedy.

        text: its committed tokens, the root last; read by distributions with penalties alone.
        """
        self._distributions[row] = distribution
        sampling = Sampling() if distribution is None else distribution.sampling
        sample, filtered = not sampling.greedy, _filters(sampling)
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
        """Add tokens i64 [B, m] to the rows' texts; `size` adds none."""
        if self._penalties is not None and self.shape.penalties.texts:
            self._penalties.grow(tokens)

    def choose(
        self, logits: Tensor, indices: Tensor, tokens: Tensor, see: Tensor, *, whole: bool = False
    ) -> Tensor:
        """Return the tokens after all nodes, -1 where one is not certain.

        whole: whether filters look at the whole vocabulary, which is slower and leaves out nobody;
        what rows without a filter are given then is not theirs.

        Shapes: logits [B, n, V], indices i64 [B, n] (the generated index of the token that follows
        each node), tokens i64 [B, n] (the nodes' own, the root's first), see bool [B, n, n] (each
        node's ancestors, itself among them) -> i64 [B, n].
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
        """Return tokens i64 [B, n] under filters, -1 where they are not certain.

        everything, noise: scaled scores of the whole vocabulary and what is taken from them, where
        the shape asks for these.
        """
        values, tokens = best_tokens(logits, shape.candidates)
        scaled = self._scaled(values)
        near = scaled
        if shape.top_k:
            kth = scaled.gather(-1, self._last(shape).expand(*scaled.shape[:-1], 1))
            near = torch.where(scaled < kth, self._never, scaled)
        selected = torch.where(near < self._floor(shape, near, everything), self._never, near)
        current = exponential_of_keys(keys, tokens) if noise is None else noise.gather(-1, tokens)
        best, place = (selected - current).max(-1, keepdim=True)
        settled = best.abs() < torch.inf  # neither nan nor a node without any survivor
        if shape.candidates < self.size:
            last = selected[..., -1:]  # a survivor may lie beyond it, or a tie that weighs
            if shape.top_k:
                last = torch.where(self._top_k[..., None], near[..., -1:], last)
            settled = settled & (last == -torch.inf)
        return torch.where(settled, tokens.gather(-1, place), self._nobody).squeeze(-1)

    def _last(self, shape: DistributionShape) -> Tensor:
        """Return the place of the last candidate that top-k lets survive: i64 [B, 1, 1]."""
        if shape.candidates == self.shape.candidates:
            return self._kth
        return torch.where(self._top_k[..., None], self._kth, shape.candidates - 1)

    def _floor(self, shape: DistributionShape, near: Tensor, everything: Tensor | None) -> Tensor:
        """Return the least score f64 [B, n, 1] that top-p and min-p let survive.

        near f64 [B, n, K], descending: what top-k left.
        """
        top = near[..., :1]
        floor = top + self._least
        if not (shape.near or shape.far):
            return floor
        share = (near - (self._mass(shape, near, everything).log() + top)).exp()
        inside = share.cumsum(-1) - share < self._top_p
        return torch.maximum(floor, torch.where(inside, near, self._ever).amin(-1, keepdim=True))

    def _mass(self, shape: DistributionShape, near: Tensor, everything: Tensor | None) -> Tensor:
        """Return what top-p takes shares of, f64 [B, n, 1], over the exponential of the best."""
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


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


def _sum(scaled: Tensor, top: Tensor) -> Tensor:
    """Return the sum of exp(scaled - top) f64 [B, n, 1], as `logsumexp` takes it."""
    return (scaled - top).exp_().sum(-1, keepdim=True)


class BatchRows:
    """The rows of one call as transformers has them, and the texts that the engine makes of them.

    ids i64 [R, T], mask [R, T] or None: R = B * n rows, n of each prompt. shared: what copies of
    processors have in common.
    """

    def __init__(self, ids: Tensor, mask: Tensor | None, n: int, shared: Sequence[Any]) -> None:
        self.ids, self.n, self.shared = ids, n, shared
        self._lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()

    def whole(self, row: int, ids: Tensor) -> Tensor:
        """Return what transformers has in the place of the engine's ids i64 [1, T'] of a row."""
        new = ids[:, self._lengths[row] :]
        return torch.cat([self.ids[row : row + 1].to(ids.device), new], dim=1)


@dataclass(frozen=True)
class RowProcessors:
    """Processors of a batch, as those of its single rows."""

    rows: BatchRows
    processors: Sequence[Any]

    def of_row(self, row: int) -> Any:
        """Return a processor that gives the row's own ones what transformers gives them."""
        memo = {id(thing): thing for thing in self.rows.shared}
        current = list(self.processors)
        if len(self.rows.ids) > 1:
            current = [_of_row(each, row, self.rows, memo) for each in current]

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            whole = self.rows.whole(row, ids)
            for processor in current:
                scores = processor(whole, scores)
            return scores

        return process


@dataclass(frozen=True)
class RowCriterion:
    """A stopping criterion of a batch, asked about its single rows."""

    rows: BatchRows
    criterion: Any

    def of_row(self, row: int) -> Any:
        """Return a criterion that gives this one what transformers gives it."""
        return lambda ids, scores: self.criterion(self.rows.whole(row, ids), scores)


def _of_row(processor: Any, row: int, rows: BatchRows, memo: dict[int, Any]) -> Any:
    """Return a processor of one row, with that row's part of what transformers made for all."""
    kind, prompt = type(processor).__name__, row // rows.n
    if kind == "PrefixConstrainedLogitsProcessor":
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(row, ids), 1)
    current: Any = copied(processor, memo)
    if kind == "RepetitionPenaltyLogitsProcessor" and torch.is_tensor(current.prompt_ignore_length):
        current.prompt_ignore_length = current.prompt_ignore_length[row : row + 1]
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        current.encoder_input_ids = current.encoder_input_ids[prompt : prompt + 1]
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        current.batch_size, current.generated_ngrams = (
            1,
            current.generated_ngrams[prompt : prompt + 1],
        )
    elif kind == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        context, prompts = current.unconditional_context, len(rows.ids) // rows.n
        for name in ("input_ids", "attention_mask"):
            if (inputs := context[name]) is not None:
                context[name] = _one_of(inputs, prompt, prompts)
    return current


def _one_of(negative: Tensor, prompt: int, prompts: int) -> Tensor:
    """Return the negative prompt [1, T] of one prompt, out of one for each or one for all."""
    if len(negative) not in (1, prompts):
        raise InputError(
            f"got {len(negative)} rows of negative_prompt_ids for {prompts} prompts; expected one "
            "for each, or one for all"
        )
    return negative if len(negative) == 1 else negative[prompt : prompt + 1]
