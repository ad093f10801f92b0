"""Counter-based noise: every random choice is a function of (seed, sample, index, stream, token).

No generator object carries state, so plain and speculative decoding see the same noise in any
order. Values come from splitmix64 (Steele, Lea, Flood 2014) in wrapping 64-bit integers, which
every device computes alike. On a CPU, NumPy takes a third of torch's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragspec.trees.draft_tree import Ints

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class NoiseUse(IntEnum):
    """Uses of noise that must not share values; target and coupled drafts do share theirs."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    LATENT = 4  # normal numbers of continuous latents
    ORDER = 5  # the order in which places of an image are generated


@dataclass(frozen=True, slots=True)
class NoiseStream:
    """The noise of one sample of one prompt.

    Attributes:
        seed: Any integer.
        sample: Number among the n samples of the prompt (never the batch row).
    """

    seed: int
    sample: int = 0

    def gumbel(
        self, indices: Sequence[int], tokens: Tensor, stream: NoiseUse = NoiseUse.TARGET
    ) -> Tensor:
        """Return standard Gumbel noise f64 of the shape of the token ids, on their device.

        Args:
            indices: A generated index for each row of tokens i64 [R, K], or one for all tokens.
        """
        noise = self._uniform(indices, tokens, stream)
        if noise.device.type != "cpu":
            return noise.log_().neg_().log_().neg_()
        array = noise.numpy()
        for _ in range(2):
            np.log(array, out=array)
            np.negative(array, out=array)
        return noise

    def normal(
        self, indices: Sequence[int], lanes: Tensor, stream: NoiseUse = NoiseUse.LATENT
    ) -> Tensor:
        """Return standard normal numbers f64; lanes number them, as tokens number Gumbel noise."""
        normal: Tensor = torch.special.ndtri(self._uniform(indices, lanes, stream))
        return normal

    def uniform(self, index: int, stream: NoiseUse, lane: int = 0) -> float:
        """Return one number in (0, 1); `lane` separates several draws at one index."""
        return ((_mix(self._key(index, stream) + lane * _GOLDEN) >> 12) + 0.5) * 2.0**-52

    def keys(self, indices: Tensor, stream: NoiseUse = NoiseUse.TARGET) -> Tensor:
        """Return the keys of generated indices i64 [...], for `exponential_of_keys`."""
        counters = (indices << 3) + _signed(int(stream) + 3 * _GOLDEN)
        return _mixed(_mixed(counters) ^ _signed(self._local()))

    def _uniform(self, indices: Sequence[int], tokens: Tensor, stream: NoiseUse) -> Tensor:
        """Return numbers in (0, 1), f64; see `gumbel`."""
        keys = [self._key(index, stream) for index in indices]
        if tokens.device.type == "cpu":
            return torch.from_numpy(_uniform_on_host(tokens.numpy(), keys))
        word = torch.tensor([_signed(key) for key in keys], device=tokens.device)
        word = word if len(keys) == 1 else word[:, None]
        return _uniform_of_keys(word, tokens.to(torch.int64))

    def _key(self, index: int, stream: NoiseUse) -> int:
        return _mix(self._local() ^ _mix((index << 3) + int(stream) + 3 * _GOLDEN))

    def _local(self) -> int:
        return _mix(_mix(self.seed + _GOLDEN) ^ _mix(self.sample + 2 * _GOLDEN))


def exponential_of_keys(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the logarithm of exponential noise f64, which is negative Gumbel noise.

    The shapes of keys i64, see `NoiseStream.keys`, and tokens i64 broadcast, on any device.
    """
    return _uniform_of_keys(keys, tokens).log_().neg_().log_()


def _uniform_of_keys(keys: Tensor, tokens: Tensor) -> Tensor:
    word = _mixed(torch.add(keys, tokens, alpha=_signed(_GOLDEN)))
    return (_shift(word, 12).to(torch.float64) + 0.5) * 2.0**-52


def _uniform_on_host(tokens: Ints, keys: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the numbers of `_uniform_of_keys` in NumPy, computed in place where possible."""
    key = np.array(keys, dtype=np.uint64)
    word = np.array(tokens, dtype=np.int64, order="C").view(np.uint64)
    word *= np.uint64(_GOLDEN)
    word += key if len(keys) == 1 else key[:, None]
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        word ^= word >> np.uint64(shift)
        word *= np.uint64(factor)
    word ^= word >> np.uint64(31)
    word >>= np.uint64(12)
    noise = word.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    return noise


def _mix(value: int) -> int:
    """Return one splitmix64 output word for the counter `value`."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * _MIX_1) & _WORD
    value = ((value ^ (value >> 27)) * _MIX_2) & _WORD
    return value ^ (value >> 31)


def _mixed(word: Tensor) -> Tensor:
    """Return the splitmix64 words for counters i64 of any shape, on their device."""
    word = (word ^ _shift(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shift(word, 27)) * _signed(_MIX_2)
    return word ^ _shift(word, 31)


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _shift(word: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 words (torch shifts arithmetically)."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
