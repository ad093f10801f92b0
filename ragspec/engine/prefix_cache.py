"""What a model has read, kept from one call of the engine to the next.

The keys and values of a token depend on those before it alone, so a prompt that begins like the
text before it is read from where the two part. The text is the same as after a fresh reading, up
to the rounding of forwards of other lengths.
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
    """Keys and values of the beginnings that many prompts share, of one model at a time.

    The keys and values of a passage that stands first do not depend on what follows. RAGCache
    (arXiv 2404.12457) keeps a tree of them; here a beginning is one passage.

    most_bytes: of keys and values in all; the least recently used leave first. Thread-safe.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        if most_bytes < 0:
            raise InputError(f"most_bytes is {most_bytes}; expected 0 or more.")
        self.most_bytes = most_bytes
        self.bytes = 0
        self._known: OrderedDict[tuple[int, ...], Beginning] = OrderedDict()
        self._target: Any = None
        self._using = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, target: Any, tokens: Sequence[int]) -> Beginning | None:
        """Return what is kept of exactly these tokens, read by this target."""
        with self._using:
            self._serve(target)
            result = self._known.get(tuple(tokens))
            if result is not None:
                self._known.move_to_end(tuple(tokens))
            return result

    def keep(self, target: Any, tokens: Sequence[int], beginning: Beginning) -> None:
        """Keep a beginning, and as many others as there is room for."""
        size = sum(part.nbytes for pair in beginning for part in pair)
        if size > self.most_bytes:
            return
        with self._using:
            self._serve(target)
            self._forget(tuple(tokens))
            self._known[tuple(tokens)] = beginning
            self.bytes += size
            while self.bytes > self.most_bytes:
                self._forget(next(iter(self._known)))

    def _forget(self, tokens: tuple[int, ...]) -> None:
        for pair in self._known.pop(tokens, ()):
            self.bytes -= sum(part.nbytes for part in pair)

    def _serve(self, target: Any) -> None:
        """Drop what is of another target."""
        if target is not self._target:
            self._known.clear()
            self._target, self.bytes = target, 0


class PrefixCache:
    """The cache of the last text of a call, for the next: `engine.generate(prompt, kept=context)`.

    It serves one prompt at a time and one model; another model's call begins again. A call that
    was interrupted leaves what had been committed. Models whose caches cannot be cut short
    (recurrent states), or whose positions depend on the length of the prompt, read all again.
    Change the model's weights and it must be made again. prefixes: keeps the beginnings of prompts
    that are asked for with `prefix=`, also for other contexts.
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
        """Lend a session that holds the beginning of a text, and tell how many tokens of it.

        text: the row's own list, which grows as tokens are committed. prefix: its first tokens that
        other texts may begin with, too. Raises InputError where another call is running.
        """
        if not self._using.acquire(blocking=False):
            raise InputError(
                "this PrefixCache is in use by another call; expected one call at a time. Make a "
                "PrefixCache for each conversation."
            )
        try:
            known = self._resume(target, text)
            session: TargetSession = self._session or target.open(1, capacity)
            if prefix > known:
                known = self._begin(target, session, text[:prefix], known)
            self._target, self._session, self._tokens = target, None, []
            try:
                with self._entered(session):
                    yield session, known
            finally:  # also after an interrupt: what was committed stays as it is
                if isinstance(session, CachedSession):
                    self._tokens = text[: session.resume(len(text))]
                    self._session = session
                    if prefix > known:
                        self._keep(session, self._tokens[:prefix], prefix)
        finally:
            self._using.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep what a session of a model makes ready for its calls until the block ends.

        It is for many short calls in a row; the model must not be changed meanwhile.
        """
        with ExitStack() as stack:
            self._stack, self._held = stack, None
            try:
                yield
            finally:
                self._stack = self._held = None

    @contextmanager
    def _entered(self, session: TargetSession) -> Iterator[None]:
        """Enter a session for one call, or for all of a block of `held`."""
        if self._stack is None or not isinstance(
            session, CachedSession
        ):  # which serves no other call
            with session:
                yield
            return
        if self._held is not session:
            self._held = self._stack.enter_context(session)
        yield

    def _begin(
        self, target: CausalTarget, session: TargetSession, prefix: Sequence[int], known: int
    ) -> int:
        """Begin with a prefix that is kept, where it is; return how many tokens are known."""
        result = self.prefixes.find(target, prefix)
        if result is None or not isinstance(session, CachedSession):
            return known
        session.begin_with(result)
        return len(prefix)

    def _keep(self, session: TargetSession, tokens: Sequence[int], prefix: int) -> None:
        """Keep a prefix that was read, for other texts."""
        if len(tokens) == prefix and isinstance(session, CachedSession):
            result = session.beginning(prefix)
            if result is not None:
                self.prefixes.keep(self._target, tokens, result)

    def _resume(self, target: CausalTarget, text: Sequence[int]) -> int:
        """Keep the common beginning and return its length; drop what is of another target.

        The last token of a prompt is always read: the next one follows from its logits.
        """
        if target is not self._target:
            self._session = None
        if self._session is None:
            return 0
        pairs = zip(self._tokens, text[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return self._session.resume(common)
