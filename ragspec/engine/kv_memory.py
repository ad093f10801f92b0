"""A bound on the bytes of keys and values, for which requests wait."""

from collections.abc import Collection

from ragspec.engine.sequence import MOST_NODES, Sequence
from ragspec.errors import InputError
from ragspec.sampling.settings import checked_count
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.sequence_cache import GROWTH, slot_bytes


class KvMemory:
    """Bounds the keys and values of running requests and of the prefix cache together.

    A request counts with all tokens that it may have, so that it never stops for lack of memory.

    Args:
        limit: Bytes.
        max_batch_size: Rows that steps of fixed shape allocate beforehand.

    Attributes:
        max_length: Most tokens of a text, which then fits alone.

    Raises:
        InputError: Not even two tokens fit.
    """

    def __init__(self, target: CausalTarget, limit: int, max_batch_size: int) -> None:
        self._slot = slot_bytes(target.config, target.dtype) * target.copies
        most_rows = checked_count(max_batch_size, "max_batch_size")
        self._rows = 0 if target.runner is None else 1 << (most_rows - 1).bit_length()
        self._limit = limit = checked_count(limit, "kv_memory")
        slots = limit // self._slot // max(1, self._rows)
        most = (slots - 1) * GROWTH // (GROWTH + 1) - MOST_NODES
        if most < 2:
            least = self._bytes(3) * max(1, self._rows)
            raise InputError(f"kv_memory is {limit} bytes; expected {least} or more. Raise it.")
        self.max_length = most if target.max_length is None else min(most, target.max_length)

    def admits(
        self,
        sequence: Sequence,
        running: Collection[Sequence],
        session: TargetSession | None,
        prefix_cache: PrefixCache,
    ) -> bool:
        """Return whether there is memory for a sequence; other cached texts are evicted for it."""
        caches = {} if session is None or self._rows else session.caches
        base = prefix_cache.base(sequence.pending[:-1], sequence.request.tenant)
        growth = self._rows * self._bytes(self.max_length)
        for each in () if self._rows else (sequence, *running):
            cache = base if each is sequence else caches.get(each.slot)
            most = self._bytes(len(each.request.prompt) + each.request.stop.max_new_tokens)
            growth += most if cache is None else max(0, most - cache.bytes)
        return prefix_cache.shrink(self._limit - growth, caches.values(), base) or not running

    def _bytes(self, tokens: int) -> int:
        """Return the most bytes of a text of so many tokens, with a draft and room to grow."""
        slots = tokens + MOST_NODES
        return (slots + slots // GROWTH + 1) * self._slot
