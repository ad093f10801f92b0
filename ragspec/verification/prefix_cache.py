"""The prefix cache: keys and values of texts that have ended, for later texts that begin alike.

The keys and values of a token depend on earlier tokens alone. So a prompt is read only after its
longest common prefix with a cached text. vLLM (arXiv 2309.06180), SGLang (2312.07104) and RAGCache
(2404.12457) do the same. The output does not depend on the cache, up to the rounding of forwards of
other lengths.
"""

import math
import operator
import threading
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from ragspec.errors import InputError
from ragspec.verification.reading import Taps
from ragspec.verification.sequence_cache import Layers, SequenceCache

MAX_BYTES = 256 << 20
CAPTURE = "transformers.utils.output_capturing"  # its hooks do nothing in our forwards
CAPTURES = "_output_capturing_hooks_installed"
OF_ALL = frozenset({*vars(nn.Module()), "forward", CAPTURES})  # attributes of every module
LENDER = "ragspec.verification.cpu_weights"  # gives modules another forward for a block
PLAIN = bool, int, float, str, type(None)
BLOCK = 16  # shorter common prefixes are read again


class Row:
    """A text, running or ended: its tokens and their keys and values.

    Attributes:
        cached: First tokens that came from the prefix cache.
    """

    def __init__(self, cache: SequenceCache, tokens: Sequence[int] = (), tenant: str = "") -> None:
        self.cache, self.tokens, self.tenant = cache, list(tokens), tenant
        self.cached = len(self.tokens)

    @property
    def length(self) -> int:
        """The tokens with committed keys and values; the others are read in the next forward."""
        return self.cache.length

    def clear(self) -> None:
        """Drop all keys and values."""
        self.cache.truncate(0)


Pin = tuple[str, list[int]]  # a tenant, and the first tokens of texts that stay


class PrefixCache:
    """Keys and values by token prefix and tenant, the least recently used evicted first.

    Tenants never share. A model that has changed finds an empty cache. Thread-safe.

    Args:
        max_bytes: Limit of all texts together, pinned ones aside; 0 keeps pinned ones alone.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._rows: list[Row] = []  # the least recently used first
        self._pins: list[Pin] = []
        self._state: object = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        with self._lock:
            return sum(row.cache.bytes for row in self._rows)

    def check(self, model: nn.Module) -> None:
        """Drop all texts if the model is not as it was when they were read; see `model_state`."""
        state = model_state(model)
        with self._lock:
            if state != self._state:
                if self._state is not None:
                    self.clear()
                self._state = state

    def take(
        self, tokens: Sequence[int], tenant: str, capacity: int, running: Iterable[Row]
    ) -> SequenceCache | None:
        """Return the keys and values of the longest known prefix, None if there is none.

        The caller may extend them.

        A text is handed over if the prefix is the larger part of it; a pinned one if the prefix
        covers the pinned part. Of others, and of running texts, it is copied.

        Args:
            capacity: Slots that the cache has room for.
            running: Texts that are being generated.
        """
        tokens = list(tokens)
        with self._lock:
            row, common = _longest(tokens, tenant, [*self._rows, *running])
            if row is None:
                return None
            if row in self._rows:
                self._rows.remove(row)
                if self._gives(row, common):
                    row.cache.truncate(common)
                    return row.cache
                self._rows.append(row)
            return row.cache.prefix(common, capacity - common)

    def keep(self, tokens: Sequence[int], tenant: str, cache: SequenceCache) -> None:
        """Keep the keys and values of a text that has ended, as far as there is room.

        It takes the place of texts that it shares their larger part with; see `take`.
        """
        if len(tokens) < BLOCK:
            return
        cache.compact()
        row = Row(cache, tokens, tenant)
        with self._lock:
            if (known := self._holder(row.tokens, tenant)) is not None:
                self._rows.remove(known)
                self._rows.append(known)
                return
            for other in [each for each in self._rows if each.tenant == tenant]:
                if self._gives(other, common_length(other.tokens, row.tokens)):
                    self._rows.remove(other)
            self._rows.append(row)
            self._evict()

    def pin(self, tokens: Sequence[int], tenant: str = "") -> Pin:
        """Keep a text of at least `BLOCK` tokens beyond the limit, until `unpin` gets the pin."""
        try:
            pin = tenant, [*map(operator.index, tokens)]
        except TypeError as error:
            raise InputError(f"pin() got {tokens!r:.60}; expected token ids. Encode it.") from error
        with self._lock:
            self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let a pinned text be evicted like any other."""
        with self._lock:
            self._pins = [each for each in self._pins if each is not pin]
            self._evict()

    def export(self, tokens: Sequence[int], tenant: str = "") -> Layers | None:
        """Return views of the keys and values of these tokens; None if they are not kept."""
        with self._lock:
            row = self._holder(list(tokens), tenant)
            return None if row is None else row.cache.layers(len(tokens))

    def insert(self, tokens: Sequence[int], layers: Layers, tenant: str = "") -> None:
        """Keep keys and values from elsewhere, such as a file; they are not copied."""
        self.keep(tokens, tenant, SequenceCache.of(layers))

    def base(self, tokens: Sequence[int], tenant: str) -> SequenceCache | None:
        """Return the keys and values that `take` hands over, None if it copies or has none."""
        with self._lock:
            row, common = _longest(list(tokens), tenant, self._rows)
            return row.cache if row is not None and self._gives(row, common) else None

    def shrink(
        self, limit: int, running: Collection[SequenceCache] = (), base: SequenceCache | None = None
    ) -> bool:
        """Evict texts until they and running ones have `limit` bytes; return whether they do.

        The least recently used go first, pinned ones last if none runs, and `base` never.
        """
        with self._lock:
            used = self.bytes + sum(cache.bytes for cache in running)
            for row in sorted(self._rows, key=lambda row: self._pinned(row) > 0):
                if used <= limit or (running and self._pinned(row)):
                    break
                if row.cache is not base:
                    self._rows.remove(row)
                    used -= row.cache.bytes
            return used <= limit

    def clear(self) -> None:
        """Drop all texts, pinned ones too, and free their memory."""
        with self._lock:
            self._rows.clear()

    def _gives(self, row: Row, common: int) -> bool:
        """Return whether another text with so many first tokens takes the place of a kept one."""
        return common >= max(BLOCK, self._pinned(row) or len(row.tokens) // 2)

    def _pinned(self, row: Row) -> int:
        """Return how many first tokens of a text are pinned."""
        starts = [start for tenant, start in self._pins if tenant == row.tenant]
        fits = (len(start) for start in starts if start == row.tokens[: len(start)])
        return max((fit for fit in fits if fit >= BLOCK), default=0)

    def _holder(self, tokens: list[int], tenant: str) -> Row | None:
        """Return the latest text that begins with all of these tokens."""
        row, common = _longest(tokens, tenant, self._rows)
        return row if common == len(tokens) else None

    def _evict(self) -> None:
        """Evict texts beyond the limit, pinned ones aside."""
        pinned = sum(row.cache.bytes for row in self._rows if self._pinned(row))
        self.shrink(self.max_bytes + pinned)


def model_state(model: nn.Module) -> list[object]:
    """Return what shows changes: modules, hooks, plain attributes, weights and buffers.

    Attributes and hooks tell the adapter that is active, for example, or what steers the model.
    """
    state = list[object]()
    for module in model.modules():
        values = vars(module).copy()  # other threads may run the model
        replaced = getattr(values.get("forward"), "__module__", LENDER) != LENDER
        state += (id(module), type(module), replaced, hooks_of(module))
        state += [_plain(each) for name, each in values.items() if name not in OF_ALL]
        weights = *module._parameters.values(), *module._buffers.values()
        state += [weight_state(each) for each in weights if each is not None]
    return state


def hooks_of(module: nn.Module) -> list[int]:
    """Return the numbers of a module's hooks that may change its forward.

    Neither `Taps` do, nor those that transformers leaves after a call that asked for states.
    """
    before, after = [*module._forward_pre_hooks.items()], [*module._forward_hooks.items()]
    owners = [(n, getattr(getattr(hook, "func", None), "__self__", None)) for n, hook in before]
    numbers = [n for n, owner in owners if not isinstance(owner, Taps)]
    return numbers + [n for n, hook in after if getattr(hook, "__module__", "") != CAPTURE]


def _plain(value: object) -> object:
    """Return an attribute of a module without what is no number or text."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return [(key, each) for key, each in value.items() if isinstance(each, PLAIN)]
    if isinstance(value, list | tuple | set):
        return [each for each in value if isinstance(each, PLAIN)]
    return None


WeightState = tuple[int, torch.dtype, int, str]  # see `weight_state`
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool})


def weight_state(weight: Tensor) -> WeightState:
    """Return the address, the dtype, the count of changes and a sum of a weight.

    torch does not count changes through `weight.data`. So the sum has entries of every row and
    every column of a matrix of floats in the memory of the host, and some of other arrays. A change
    of few entries may be missed.
    """
    state = weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
    data = weight.detach()
    real = data.is_floating_point()
    known = type(data) is Tensor and (real or data.dtype in INTEGERS)
    if not known or data.device.type != "cpu":
        return *state, ""
    size = data.numel()
    rows, columns = data.shape if data.dim() == 2 and real else (math.isqrt(size), size)
    step = _stride(rows, columns) if data.dim() > 1 else 1
    return *state, float(data.reshape(-1)[::step].sum(dtype=torch.float64)).hex()


def _stride(rows: int, columns: int) -> int:
    """Return a stride through a flat matrix that visits every row and every column."""
    most = max(min(rows, columns), 1)
    return next(step for step in range(most, 0, -1) if math.gcd(step, columns) == 1)


def _longest(tokens: list[int], tenant: str, rows: Iterable[Row]) -> tuple[Row | None, int]:
    """Return the latest text with the longest common prefix, and its length."""
    best, length = None, 0
    for row in rows:
        if row.tenant == tenant:
            common = common_length(row.tokens, tokens)
            if common >= max(length, BLOCK):
                best, length = row, common
    return best, length


def common_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])
