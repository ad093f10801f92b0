"""The next token's distribution: logits, processors, temperature, filters, noise, token.

The token is `argmax(log p + g)`: Gumbel noise g of the position makes it a sample of p, and
greedy is the case g = 0. Only tokens that survive the filters need noise, so the full vocabulary
is neither sorted nor hashed when a filter is on. Candidates come from a two-stage top-k. If
survivors may be missing among them, the rows are computed again over the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.penalties import NodePaths, over
from ragspec.sampling.processors import Processor, build_processors
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.sampling.top_tokens import best_token, best_tokens

_CANDIDATES = (128, 2048)  # best tokens that filters look at first
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters of one text as numbers, or of a batch as tensors [B, 1, 1].

    Attributes:
        top_p: Infinite if off, as sums may round to 1 early.
        log_min_p: The logarithm of min_p, -inf if off.
        kth: The place of the last candidate within top-k.
        limited: Whether top-k is on.
        nucleus: Whether top-p is on in any row.
    """

    temperature: float | Tensor
    top_p: float | Tensor
    log_min_p: float | Tensor
    kth: int | Tensor
    limited: bool | Tensor
    nucleus: bool

    @classmethod
    def of(cls, sampling: Sampling) -> "Filters":
        """Return the filters of one text."""
        nucleus, k = sampling.top_p < 1.0, sampling.top_k
        top_p = sampling.top_p if nucleus else float("inf")
        least = float(torch.tensor(sampling.min_p, dtype=torch.float64).log())
        return cls(sampling.temperature or 1.0, top_p, least, k - 1, k > 0, nucleus)

    def scale(self, scores: Tensor) -> Tensor:
        """Return scores [..., K] divided by the temperature, f64."""
        wide = scores if isinstance(self.temperature, Tensor) else scores.double()
        return over(wide, self.temperature)

    def apply(
        self, scores: Tensor, count: int, everything: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the survivors among the best tokens of the scores [..., V].

        Ties with the last survivor survive too, so that the outcome cannot depend on the order of
        equal scores.

        Args:
            count: Number K of best tokens, V for all.
            everything: The scaled scores of the vocabulary, None if no row without top-k has top-p.

        Returns:
            Scaled scores f64 [..., K] with filtered ones at -inf, their tokens i64 [..., K], and
            whether no survivor and no tie that counts can lie beyond them, bool [..., 1], None if
            K = V.
        """
        values, tokens = best_tokens(scores, count)
        near = self.scale(values)
        if self.limited is not False:
            near.masked_fill_(near < self._least(near), _NEVER)
        top = near[..., :1]
        floor = top + self.log_min_p
        if self.nucleus:
            share = (near - (self._mass(near, everything).log() + top)).exp()
            outside = share.cumsum(-1) - share >= self.top_p
            floor = torch.maximum(floor, torch.where(outside, top, near).amin(-1, keepdim=True))
        survivors = near.masked_fill(near < floor, _NEVER)
        if count == scores.shape[-1]:
            return survivors, tokens, None
        if isinstance(self.limited, Tensor):
            ends = torch.where(self.limited, near[..., -1:], survivors[..., -1:])
        else:
            ends = (near if self.limited else survivors)[..., -1:]
        return survivors, tokens, ends == _NEVER

    def _least(self, scaled: Tensor) -> Tensor:
        """Return the least score f64 [..., 1] within top-k."""
        if isinstance(self.kth, int):
            return scaled[..., min(self.kth, scaled.shape[-1] - 1), None]
        return scaled.gather(-1, self.kth.expand(*scaled.shape[:-1], 1))

    def _mass(self, near: Tensor, everything: Tensor | None) -> Tensor:
        """Return the whole mass under top-p, f64 [..., 1], in units of the best token's."""
        top = near[..., :1]
        if everything is None:
            return (near - top).exp_().sum(-1, keepdim=True)
        whole = (everything - top).exp_().sum(-1, keepdim=True)
        if isinstance(self.limited, Tensor):
            return torch.where(self.limited, self._mass(near, None), whole)
        return whole


def candidate_counts(top_k: int, vocab_size: int) -> list[int]:
    """Return the numbers of best tokens that filters look at, one after the other."""
    few = (count for count in _CANDIDATES if top_k + 16 <= count and 4 * count < vocab_size)
    return [*few, vocab_size]


class TokenDistribution:
    """The output distribution of one row of text: settings, processors and noise.

    Args:
        processors: See `build_processors`; None for those of the settings alone.

    Attributes:
        trivial: Whether the token is simply the argmax of the raw logits.
        lazy: Whether nodes must be processed one at a time, and visited nodes alone.
    """

    def __init__(
        self,
        sampling: Sampling,
        noise: NoiseStream,
        prompt_length: int = 0,
        processors: Sequence[Processor] | None = None,
    ) -> None:
        self.sampling, self.noise, self.prompt_length = sampling, noise, prompt_length
        self._filters = Filters.of(sampling)
        if processors is None:
            processors = build_processors(sampling, prompt_length)
        self.processors = processors
        self.trivial = sampling.greedy and not processors
        self.lazy = any(processor.lazy for processor in processors)

    def without_lazy(self) -> "TokenDistribution":
        """Return this distribution without processors that keep state, for drafters."""
        processors = [processor for processor in self.processors if not processor.lazy]
        return TokenDistribution(self.sampling, self.noise, self.prompt_length, processors)

    def process(self, logits: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
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

    def best(self, scores: Tensor, indices: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
        """Return the k first choices of R nodes, best first; the very first is that of `select`.

        Shapes: processed scores [R, V] -> tokens i64 [R, k] and their log p + g [R, k], up to a
        constant per row, or scores if greedy. Filtered tokens come last, at -inf, in any order.
        """
        if self.sampling.greedy:
            values, tokens = best_tokens(scores, k)
            return tokens, values
        perturbed, tokens = self._perturbed(scores, indices)
        values, places = best_tokens(perturbed, k)
        return tokens.gather(-1, places), values

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
        return survivors + self.noise.gumbel(indices, tokens), tokens

    def _survivors(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled scores f64 [R, K] of candidate tokens i64 [R, K], filtered at -inf.

        Flat distributions need more candidates than peaked ones, so a few are tried before many,
        and many before the whole vocabulary.
        """
        filters, size = self._filters, scores.shape[-1]
        if not self.sampling.filtered:
            return filters.scale(scores), _vocabulary(size, scores.device).expand(scores.shape)
        everything = None
        for count in candidate_counts(self.sampling.top_k, size):
            if count == size:
                everything = None
            elif everything is None and filters.nucleus and not filters.limited:
                everything = filters.scale(scores)
            survivors, tokens, certain = filters.apply(scores, count, everything)
            if certain is None or bool(certain.all()):
                break
        return survivors, tokens


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
