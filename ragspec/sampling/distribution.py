"""The next token's distribution: logits, processors, temperature, filters, noise, token.

The token is `argmax(log p + g)`: Gumbel noise g of the position makes it a sample of p, and
greedy is the case g = 0. Only tokens that survive the filters need noise, so the full vocabulary
is neither sorted nor hashed when a filter is on. Candidates come from a two-stage top-k. If
survivors may be missing among them, the rows are computed again over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.processors import HFCallable, Processor, build_processors
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.sampling.top_tokens import best_token, best_tokens

CANDIDATES = (128, 2048)  # best tokens that filters look at first
_NEVER = float("-inf")


class TokenDistribution:
    """The output distribution of one row of text: settings, processors and noise.

    Args:
        ends: Token ids that end a text.
        extra: Further transformers LogitsProcessors.
        current: The model's own processors, see `transform.default_processors`.
    """

    def __init__(
        self,
        sampling: Sampling,
        noise: NoiseStream,
        prompt_length: int = 0,
        ends: Sequence[int] = (),
        extra: Sequence[HFCallable] = (),
        current: Sequence[Processor] = (),
    ) -> None:
        self.sampling = sampling
        self.noise = noise
        self.prompt_length = prompt_length
        self.processors: list[Processor] = build_processors(
            sampling, prompt_length, ends, extra, current
        )

    @property
    def trivial(self) -> bool:
        """Whether the token is simply the argmax of the raw logits."""
        return self.sampling.greedy and not self.processors

    @property
    def lazy(self) -> bool:
        """Whether nodes must be processed one at a time, and visited nodes alone."""
        return any(processor.lazy for processor in self.processors)

    def without_lazy(self) -> TokenDistribution:
        """Return this distribution without processors that keep state, for drafters."""
        distribution = TokenDistribution(self.sampling, self.noise, self.prompt_length)
        distribution.processors = [processor for processor in self.processors if not processor.lazy]
        return distribution

    def process(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return logits [R, V] after the processors, before temperature and filters.

        Args:
            context: Committed tokens, the root last.
            paths: Draft tokens from the root to each of the R nodes.
        """
        if not self.processors:
            return logits
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self.processors:
            scores = processor.apply(scores, context, paths)
        return scores

    def select(self, scores: Tensor, indices: Sequence[int]) -> Tensor:
        """Return the token of each of R nodes: processed scores [R, V] -> i64 [R].

        Args:
            indices: The generated index of each token, which fixes its noise.
        """
        if self.sampling.greedy:
            return best_token(scores)
        perturbed, tokens = self._perturbed(scores, indices)
        if not self.sampling.filtered:
            return best_token(perturbed)
        return tokens.gather(-1, best_token(perturbed)[:, None])[:, 0]

    def order(self, scores: Tensor, indices: Sequence[int], k: int) -> Tensor:
        """Return the k first choices of R nodes: processed scores [R, V] -> i64 [R, k].

        The first choice is the token of `select`. Filtered tokens come last, in any order.
        """
        if self.sampling.greedy:
            return best_tokens(scores, k)[1]
        perturbed, tokens = self._perturbed(scores, indices)
        return tokens.gather(-1, best_tokens(perturbed, k)[1])

    def best(self, scores: Tensor, indices: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
        """Return the k first choices of R nodes, for drafts coupled to this distribution.

        Shapes: processed scores [R, V] -> tokens i64 [R, k] and their probabilities f64 [R, k]
        (0 where fewer than k tokens survive), in the order in which this distribution prefers them.
        """
        if self.sampling.greedy:
            values, tokens = scores.topk(k, dim=-1)
            logp = values.double() - scores.double().logsumexp(-1, keepdim=True)
            return tokens, logp.exp()
        survivors, tokens = self._survivors(scores)
        perturbed = survivors + self.noise.gumbel_rows(indices, tokens)
        places = perturbed.topk(min(k, tokens.shape[1]), dim=-1).indices
        return tokens.gather(-1, places), survivors.softmax(-1).gather(-1, places)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the distributions of R nodes: processed scores [R, V] -> f64 [R, V]."""
        if self.sampling.greedy:
            return torch.nn.functional.one_hot(best_token(scores), scores.shape[-1]).double()
        survivors, tokens = self._survivors(scores)
        if not self.sampling.filtered:
            return survivors.softmax(-1)
        full = torch.full(scores.shape, _NEVER, dtype=torch.float64, device=scores.device)
        return full.scatter_(-1, tokens, survivors).softmax(-1)

    def _perturbed(self, scores: Tensor, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return log p + g (up to a constant of the row) and their tokens.

        Shapes: [R, V] -> f64 [R, K] and i64 [R, K]; filtered candidates are at -inf.
        """
        survivors, tokens = self._survivors(scores)
        return survivors + self.noise.gumbel_rows(indices, tokens), tokens

    def _survivors(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled scores f64 [R, K] of candidate tokens i64 [R, K], filtered at -inf.

        Flat distributions need more candidates than peaked ones, so a few are tried before many,
        and many before the whole vocabulary.
        """
        sampling, size = self.sampling, scores.shape[-1]
        if not sampling.filtered:
            tokens = _vocabulary(size, scores.device).expand(scores.shape)
            return scores.double() / sampling.temperature, tokens
        total = None
        for count in CANDIDATES:
            if sampling.top_k + 16 > count or 4 * count >= size:
                continue
            values, tokens = best_tokens(scores, count)
            scaled = values.double() / sampling.temperature
            if total is None and sampling.top_p < 1.0 and not sampling.top_k:
                total = (scores.double() / sampling.temperature).logsumexp(-1, keepdim=True)
            survivors = self._filter(scaled, total)
            beyond = survivors[:, -1] > _NEVER  # a survivor may lie beyond, or a tie that counts
            if sampling.top_k:
                last, kth = scaled[:, -1], scaled[:, sampling.top_k - 1]
                beyond |= (last == kth) & last.isfinite()
            if not bool(beyond.any()):
                return survivors, tokens
        values, tokens = scores.sort(dim=-1, descending=True, stable=True)
        return self._filter(values.double() / sampling.temperature, None), tokens

    def _filter(self, scaled: Tensor, total: Tensor | None) -> Tensor:
        """Set filtered scores f64 [R, K], in descending order, to -inf.

        `total` is the logarithm of the whole mass, None if the scores are all of it. Ties with the
        last survivor survive too, so that the outcome cannot depend on the order of equal scores.
        """
        sampling, size = self.sampling, scaled.shape[-1]
        if sampling.top_k and sampling.top_k < size:
            scaled = scaled.masked_fill(scaled < scaled[:, sampling.top_k - 1, None], _NEVER)
        if sampling.top_p < 1.0:
            total = scaled.logsumexp(-1, keepdim=True) if total is None else total
            mass = (scaled - total).exp()
            inside = mass.cumsum(-1) - mass < sampling.top_p
            inside[:, 0] = True
            last = torch.where(inside, scaled, torch.inf).amin(-1, keepdim=True)
            scaled = scaled.masked_fill(scaled < last, _NEVER)
        if sampling.min_p:
            floor = scaled[:, :1] + torch.log(torch.tensor(sampling.min_p, dtype=torch.float64))
            scaled = scaled.masked_fill(scaled < floor.to(scaled), _NEVER)
        return scaled


def logprob_of(scores: Tensor, token: int, top: int) -> TokenLogprob:
    """Return a token's log-probability by processed scores [V], and the `top` best ones."""
    logp = scores.double().log_softmax(-1)
    values, tokens = logp.topk(top)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(token, float(logp[token]), tuple(pairs))


@lru_cache(maxsize=4)
def _vocabulary(size: int, device: torch.device) -> Tensor:
    """Return the ids 0 .. size - 1, cached since every step needs them."""
    return torch.arange(size, device=device)
