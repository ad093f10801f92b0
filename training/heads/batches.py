"""Batches of texts in a seeded order, and the target's hidden states that a head learns from."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ragspec.drafters.heads.head import DraftHead, states_size
from ragspec.errors import InputError
from ragspec.needs import LAST
from ragspec.verification.causal import CausalTarget, read_states

SHORTEST = 4  # minimum tokens of a text to learn from
NEAR = 16  # batches whose texts are sorted by length together
CACHE_BYTES = 4 << 30  # of states, for later epochs
TokenTexts = Sequence[Sequence[int]]
_MIX = 0x9E3779B97F4A7C15  # odd, so that adjacent seeds give distant streams


def seeded(seed: int, stream: int, number: int) -> torch.Generator:
    """Return a generator that depends on these three alone, so that any step can be resumed."""
    mixed = ((seed * 3 + stream) * _MIX + number * 2 + 1) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


class Batches:
    """Chunks of texts, in batches of similar length that are shuffled in every epoch.

    Texts longer than `length` are split; the last chunk overlaps the one before, so that all have
    full length. A batch has `size` chunks.

    Raises:
        InputError: No text has `SHORTEST` tokens, or the target cannot read one in chunks.
    """

    def __init__(
        self, target: CausalTarget, texts: TokenTexts, *, size: int, length: int, seed: int
    ) -> None:
        self.chunks: list[list[int]] = []  # by the numbers that `of` returns
        for text in texts:
            tokens = min(len(text), length)
            for start in range(0, len(text), length) if tokens >= SHORTEST else ():
                start = min(start, len(text) - tokens)
                chunk = list(text[start : start + tokens])
                _check_chunk(target, chunk, len(text))
                self.chunks.append(chunk)
        if not self.chunks:
            raise InputError(
                f"got {len(texts)} texts, all below {SHORTEST} tokens; expected text to learn from."
            )
        self._size, self._seed = size, seed
        self._epoch = lru_cache(maxsize=1)(self._shuffled)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-len(self.chunks) // self._size)

    def of(self, step: int) -> list[int]:
        """Return the numbers of the chunks of a step."""
        epoch, place = divmod(step, len(self))
        return self._epoch(epoch)[place]

    def digest(self) -> str:
        """Return a hash of all chunks."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            digest.update(array("q", chunk).tobytes() + b"|")
        return digest.hexdigest()

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Return batches in random order, sorting by length only within `NEAR` batches.

        This needs little padding, and yet a batch is hardly ever the same one twice.
        """
        generator, size = seeded(self._seed, 1, epoch), self._size
        order = torch.randperm(len(self.chunks), generator=generator).tolist()
        near = [order[at : at + NEAR * size] for at in range(0, len(order), NEAR * size)]
        order = [n for some in near for n in sorted(some, key=lambda n: len(self.chunks[n]))]
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _check_chunk(target: CausalTarget, chunk: list[int], whole: int) -> None:
    """Raise InputError for a chunk, of a text of `whole` tokens, that the target cannot read."""
    try:
        target.check_prompt(chunk)
    except InputError as error:
        if len(chunk) == whole:
            raise
        raise InputError(
            f"got a text of {whole} tokens that length={len(chunk)} cuts into pieces which the "
            f"target cannot read ({error}); expected it whole. Set length to {whole} or more."
        ) from error


@dataclass(frozen=True, slots=True)
class StateRead:
    """A target's inputs and hidden states of a batch of texts in R rows, texts times copies.

    Attributes:
        embedded: Inputs of the first layer, f32 [R, T, E].
        states: Inputs of the output head, f32 [R, T, H].
        taps: What the head reads, f32 [R, T, W].
        real: False for padding, on the right, and for tokens not to learn from, bool [R, T].
    """

    embedded: torch.Tensor
    states: torch.Tensor
    taps: torch.Tensor
    real: torch.Tensor


class StateReader:
    """Reads chunks of token ids with a target, each once while the cache has room for its states.

    All states are rounded to bfloat16, so that a training does not depend on the cache.

    Args:
        taps: The target's states that the head reads, see `HeadConfig`.
        head: The head, which may have embeddings of its own; they do not learn.
        cache_bytes: Maximum bytes of states in CPU memory.

    Raises:
        InputError: The target does not read a token.
    """

    def __init__(
        self,
        target: CausalTarget,
        chunks: TokenTexts,
        taps: Sequence[int] = (LAST,),
        cache_bytes: int = CACHE_BYTES,
        *,
        head: DraftHead | None = None,
    ) -> None:
        ids = {token for chunk in chunks for token in chunk}
        if ids and not 0 <= min(ids) <= max(ids) < target.input_size:
            raise InputError(
                f"got texts with ids from {min(ids)} to {max(ids)}; expected 0 to "
                f"{target.input_size - 1}. Tokenize them with the tokenizer of the model."
            )
        self.target, self.chunks, self._head = target, chunks, head
        self._taps = (LAST, *taps) if set(taps) != {LAST} else (LAST,)
        self._cache: dict[int, torch.Tensor] = {}
        self._room = cache_bytes

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return the batch of the chunks with these numbers, the ends alone of too long ones."""
        states = {n: self._cache[n] for n in numbers if n in self._cache}
        missing = [n for n in numbers if n not in states]
        texts = [self.chunks[n] for n in missing]
        for i, read in read_states(self.target, texts, sorted(set(self._taps))):
            number, chunk_states = missing[i], read.of(self._taps).to("cpu", torch.bfloat16)
            states[number] = chunk_states
            if (size := chunk_states.nbytes) <= self._room:
                self._cache[number] = chunk_states
                self._room -= size
        return self._together(numbers, [states[number] for number in numbers])

    def _together(self, numbers: Sequence[int], read: Sequence[torch.Tensor]) -> StateRead:
        """Return one batch of the states [copies, T, H] of several chunks."""
        device = self.target.device
        embedded, states = list[torch.Tensor](), list[torch.Tensor]()
        for number, chunk_states in zip(numbers, read, strict=True):
            tokens = torch.tensor([list(self.chunks[number])], device=device)
            with torch.no_grad():
                target, head = self.target, self._head
                inputs = target.embed(tokens) if head is None else head.embed(target, tokens)
            embedded += inputs[:, -chunk_states.shape[1] :].float().unbind()
            states += chunk_states.to(device).float().unbind()
        lengths = torch.tensor([len(row) for row in states], device=device)
        real = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        pad = torch.nn.utils.rnn.pad_sequence
        every = pad(states, batch_first=True)
        width = states_size(self.target)
        last, taps = every[..., :width], every[..., width if len(self._taps) > 1 else 0 :]
        return StateRead(pad(embedded, batch_first=True), last, taps, real)
