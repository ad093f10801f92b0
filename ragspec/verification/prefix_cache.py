"""The prefix cache: keys and values of texts that have ended, for later texts that begin alike.

The keys and values of a token depend on earlier tokens alone. So a prompt is read only after its
longest common prefix with a cached text. vLLM (arXiv 2309.06180), SGLang (2312.07104) and RAGCache
(2404.12457) do the same. The output does not depend on the cache, up to the rounding of forwards of
other lengths.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ragspec.verification.sequence_cache import Layers, SequenceCache

MAX_BYTES = 256 << 20
BLOCK = 16  # shorter common prefixes are read again


class Running(Protocol):
    """A text that is being generated, as far as others may copy from it."""

    cache: SequenceCache
    tokens: list[int]
    tenant: str


class Pin:
    """Keeps the first tokens of a text in the cache until it is closed."""

    def __init__(self, cache: PrefixCache, tokens: Sequence[int], tenant: str) -> None:
        self.tokens = tuple(tokens)
        self.tenant = tenant
        self._cache = cache

    def close(self) -> None:
        """Let the text be evicted like any other."""
        self._cache.unpin(self)


class _Entry:
    """The keys and values of one text."""

    def __init__(self, tokens: Sequence[int], tenant: str, cache: SequenceCache) -> None:
        self.tokens = list(tokens)
        self.tenant = tenant
        self.cache = cache


class PrefixCache:
    """Keys and values by token prefix and tenant, the least recently used evicted first.

    Tenants never share. A model whose weights have changed finds an empty cache. Thread-safe.

    Args:
        max_bytes: Limit of all texts together, pinned ones aside; 0 keeps pinned ones alone.

    Attributes:
        lookups, hits, cached_tokens: Numbers of lookups, of those that found a prefix, and of the
            tokens that were not read again.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.lookups = self.hits = self.cached_tokens = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._index: dict[tuple[str, tuple[int, ...]], set[int]] = {}  # by tenant and first block
        self._pins: list[Pin] = []
        self._number = 0
        self._weights: object = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        with self._lock:
            return sum(entry.cache.bytes for entry in self._entries.values())

    def check(self, model: Any) -> None:
        """Drop all texts if the model's weights are not those that they were read with."""
        key = [(id(each), each.dtype, _version(each)) for each in model.parameters()]
        with self._lock:
            if key != self._weights:
                if self._weights is not None:
                    self.clear()
                self._weights = key

    def take(
        self, tokens: Sequence[int], tenant: str, capacity: int, running: Iterable[Running]
    ) -> tuple[SequenceCache | None, int]:
        """Return the keys and values of the longest known prefix, for the caller to extend.

        An entry is handed over if the prefix is the larger part of it; a pinned one if the prefix
        covers the pinned part. Others, and running texts, are copied.

        Args:
            capacity: Slots that a copy has room for.
            running: Texts that are being generated.

        Returns:
            The cache, and the length of the prefix; None and 0 if none is known.
        """
        tokens = list(tokens)
        with self._lock:
            self.lookups += 1
            number, common = self._longest(tokens, tenant)
            source, shared = _longest(tokens, tenant, running)
            if max(common, shared) < BLOCK:
                return None, 0
            self.hits += 1
            self.cached_tokens += max(common, shared)
            if source is not None and shared >= common:
                return source.cache.copy(shared, capacity - shared), shared
            entry = self._entries[number]
            pinned = self._pinned(entry)
            if common >= (pinned or len(entry.tokens) // 2):
                self._drop(number)
                entry.cache.truncate(common)
                return entry.cache, common
            self._entries.move_to_end(number)
            return entry.cache.copy(common, capacity - common), common

    def keep(self, tokens: Sequence[int], tenant: str, cache: SequenceCache) -> None:
        """Keep the keys and values of a text that has ended, as far as there is room."""
        if len(tokens) < BLOCK:
            return
        cache.compact()
        entry = _Entry(tokens, tenant, cache)
        with self._lock:
            if self.max_bytes <= 0 and not self._pinned(entry):
                return
            known, common = self._longest(entry.tokens, tenant)
            if common == len(entry.tokens):
                self._entries.move_to_end(known)
                return
            for number in list(self._index.get(_key(entry.tokens, tenant), ())):
                other = self._entries[number]
                if other.tokens == entry.tokens[: len(other.tokens)]:
                    self._drop(number)
            self._number += 1
            self._entries[self._number] = entry
            self._index.setdefault(_key(entry.tokens, tenant), set()).add(self._number)
            self._evict()

    def pin(self, tokens: Sequence[int], tenant: str = "") -> Pin:
        """Keep a text beyond the limit until the returned pin is closed."""
        pin = Pin(self, tokens, tenant)
        with self._lock:
            self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let a pinned text be evicted; see `Pin.close`."""
        with self._lock:
            self._pins = [each for each in self._pins if each is not pin]
            self._evict()

    def export(self, tokens: Sequence[int], tenant: str = "") -> Layers | None:
        """Return views of the keys and values of these tokens; None if they are not kept."""
        with self._lock:
            number, common = self._longest(list(tokens), tenant)
            if not tokens or common < len(tokens):
                return None
            return self._entries[number].cache.layers(common)

    def insert(self, tokens: Sequence[int], layers: Layers, tenant: str = "") -> None:
        """Keep keys and values from elsewhere, such as a file; they are not copied."""
        self.keep(tokens, tenant, SequenceCache.of(layers))

    def clear(self) -> None:
        """Drop all texts, pinned ones too, and free their memory."""
        with self._lock:
            self._entries.clear()
            self._index.clear()

    def _longest(self, tokens: list[int], tenant: str) -> tuple[int, int]:
        """Return the entry with the longest common prefix, and its length; (0, 0) for none."""
        numbers = self._index.get(_key(tokens, tenant), ()) if len(tokens) >= BLOCK else ()
        lengths = [(_common(self._entries[each].tokens, tokens), each) for each in numbers]
        length, number = max(lengths, default=(0, 0))
        return number, length

    def _pinned(self, entry: _Entry) -> int:
        """Return how many first tokens of an entry are pinned."""
        lengths = [
            len(pin.tokens)
            for pin in self._pins
            if pin.tenant == entry.tenant and list(pin.tokens) == entry.tokens[: len(pin.tokens)]
        ]
        return max(lengths, default=0)

    def _evict(self) -> None:
        """Drop the least recently used entries beyond the limit; of pinned texts one stays."""
        sizes = {number: entry.cache.bytes for number, entry in self._entries.items()}
        held = set[int]()
        for pin in self._pins:
            number, common = self._longest(list(pin.tokens), pin.tenant)
            if common == len(pin.tokens):
                held.add(number)
        total = sum(size for number, size in sizes.items() if number not in held)
        for number, size in sizes.items():
            if total <= self.max_bytes:
                return
            if number not in held:
                self._drop(number)
                total -= size

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        key = _key(entry.tokens, entry.tenant)
        self._index[key].discard(number)
        if not self._index[key]:
            del self._index[key]


def _version(weight: Any) -> tuple[int, int]:
    """Return the address of a weight and the count of its changes, as far as torch counts them."""
    if weight.is_inference():
        return weight.data_ptr(), 0
    return weight.data_ptr(), weight._version


def _key(tokens: list[int], tenant: str) -> tuple[str, tuple[int, ...]]:
    """Return the key of a text: its tenant and its first block of tokens."""
    return tenant, tuple(tokens[:BLOCK])


def _longest(
    tokens: list[int], tenant: str, running: Iterable[Running]
) -> tuple[Running | None, int]:
    """Return the running text with the longest common prefix, and its length."""
    lengths = [(_common(each.tokens, tokens), each) for each in running if each.tenant == tenant]
    length, source = max(lengths, key=lambda pair: pair[0], default=(0, None))
    return source, length


def _common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])
