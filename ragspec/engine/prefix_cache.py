"""Prefix caches: keys and values that are kept from one call of the engine to the next.

The keys and values of a token depend on earlier tokens alone. So a prompt is read only after its
common prefix with the cached text. The output is the same as without a cache, up to the rounding of
forwards of other lengths.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.verification.base import Beginning, CachedSession, TargetSession

if TYPE_CHECKING:
    from ragspec.verification.causal import CausalTarget

MOST_BYTES = 256 << 20


class SharedPrefixes:
    """Keys and values of prefixes that many prompts share, of one model at a time; thread-safe.

    The keys and values of a leading passage do not depend on the text after it. RAGCache (arXiv
    2404.12457) keeps a tree of passages; here a prefix is one passage.

    Args:
        most_bytes: Limit of keys and values in all; the least recently used are dropped first.

    Raises:
        InputError: The limit is below 0.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        if most_bytes < 0:
            raise InputError(f"most_bytes is {most_bytes}; expected 0 or more.")
        self.most_bytes = most_bytes
        self.bytes = 0
        self._entries: OrderedDict[tuple[int, ...], Beginning] = OrderedDict()
        self._target: Any = None
        self._using = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, target: Any, tokens: Sequence[int]) -> Beginning | None:
        """Return the keys and values of exactly these tokens of this target, None if not kept."""
        with self._using:
            self._serve(target)
            beginning = self._entries.get(tuple(tokens))
            if beginning is not None:
                self._entries.move_to_end(tuple(tokens))
            return beginning

    def keep(self, target: Any, tokens: Sequence[int], beginning: Beginning) -> None:
        """Keep a prefix, and as many others as there is room for."""
        size = sum(part.nbytes for pair in beginning for part in pair)
        if size > self.most_bytes:
            return
        with self._using:
            self._serve(target)
            self._forget(tuple(tokens))
            self._entries[tuple(tokens)] = beginning
            self.bytes += size
            while self.bytes > self.most_bytes:
                self._forget(next(iter(self._entries)))

    def _forget(self, tokens: tuple[int, ...]) -> None:
        for pair in self._entries.pop(tokens, ()):
            self.bytes -= sum(part.nbytes for part in pair)

    def _serve(self, target: Any) -> None:
        """Drop the entries of another target."""
        if target is not self._target:
            self._entries.clear()
            self._target, self.bytes = target, 0


class PrefixCache:
    """The cache of one text, for the next call: `engine.generate(prompt, prefix_cache=cache)`.

    It serves one prompt at a time and one model; a call of another model starts afresh. An
    interrupted call leaves its committed tokens in the cache. Models whose caches cannot be cut
    (recurrent states), or whose positions depend on the length of the prompt, read all of it again.
    After a change of the model's weights, a new cache is needed.

    Args:
        prefixes: Keeps the prefixes of prompts that `prefix=` marks; several caches may share it.
    """

    def __init__(self, prefixes: SharedPrefixes | None = None) -> None:
        self.prefixes = SharedPrefixes() if prefixes is None else prefixes
        self._using = threading.Lock()
        self._target: CausalTarget | None = None
        self._session: CachedSession | None = None
        self._tokens: list[int] = []
        self._stack: ExitStack | None = None
        self._held: TargetSession | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that need not be read again."""
        return tuple(self._tokens)

    def clear(self) -> None:
        """Forget everything and free its memory."""
        with self._using:
            self._session, self._tokens = None, []

    @contextmanager
    def open(
        self, target: CausalTarget, text: list[int], capacity: int, prefix: int = 0
    ) -> Iterator[tuple[TargetSession, int]]:
        """Lend a session, and the number of tokens of the text that it holds already.

        Args:
            text: The row's own list, which grows as tokens are committed.
            capacity: Tokens for which a new session has room.
            prefix: Number of first tokens that other texts may share.

        Raises:
            InputError: Another call is running.
        """
        if not self._using.acquire(blocking=False):
            raise InputError(
                "this PrefixCache is in use by another call; expected one call at a time. Make a "
                "PrefixCache for each conversation."
            )
        try:
            cached = self._resume(target, text)
            session: TargetSession = self._session or target.open(1, capacity)
            if prefix > cached:
                beginning = self.prefixes.find(target, text[:prefix])
                if beginning is not None and isinstance(session, CachedSession):
                    session.begin_with(beginning)
                    cached = prefix
            self._target, self._session, self._tokens = target, None, []
            try:
                with self._entered(session):
                    yield session, cached
            finally:  # also after an interrupt: committed tokens stay in the cache
                if isinstance(session, CachedSession):
                    self._tokens = text[: session.resume(len(text))]
                    self._session = session
                    if cached < prefix <= len(self._tokens):
                        beginning = session.beginning(prefix)
                        if beginning is not None:
                            self.prefixes.keep(target, self._tokens[:prefix], beginning)
        finally:
            self._using.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the session of a model entered until the block ends, for many short calls in a row.

        The model must not be changed meanwhile.
        """
        with ExitStack() as stack:
            self._stack, self._held = stack, None
            try:
                yield
            finally:
                self._stack = self._held = None

    @contextmanager
    def _entered(self, session: TargetSession) -> Iterator[None]:
        """Enter a session for one call, or for all calls of a block of `held`."""
        # Only a CachedSession serves further calls.
        if self._stack is None or not isinstance(session, CachedSession):
            with session:
                yield
            return
        if self._held is not session:
            self._held = self._stack.enter_context(session)
        yield

    def _resume(self, target: CausalTarget, text: Sequence[int]) -> int:
        """Cut the session to the common prefix and return its length; drop that of another target.

        The last token of a prompt is always read: the next one follows from its logits.
        """
        if target is not self._target:
            self._session = None
        if self._session is None:
            return 0
        pairs = zip(self._tokens, text[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return self._session.resume(common)
