"""What a model has read, kept from one call of the engine to the next.

The keys and values of a token depend on those before it alone, so a prompt that begins like the
text before it is read from where the two part. The text is the same as after a fresh reading, up
to the rounding of forwards of other lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

from ragspec.engine.prefixes import PrefixCache
from ragspec.errors import InputError
from ragspec.target.base import CachedSession, TargetSession

if TYPE_CHECKING:
    from ragspec.target.causal import CausalTarget


class KeptContext:
    """The cache of the last text of a call, for the next: `engine.generate(prompt, kept=context)`.

    It serves one prompt at a time and one model; another model's call begins anew. A call that
    was interrupted leaves what had been committed. Models whose caches cannot be cut short
    (recurrent states), or whose positions depend on the length of the prompt, read all again.
    Change the model's weights and it must be made anew. prefixes: keeps the beginnings of prompts
    that are asked for with `prefix=`, also for other contexts.
    """

    def __init__(self, prefixes: PrefixCache | None = None) -> None:
        self.prefixes = PrefixCache() if prefixes is None else prefixes
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
        other texts may begin with, too. Raises InputError where another call is under way.
        """
        if not self._using.acquire(blocking=False):
            raise InputError(
                "this kept context is in use by another call; expected one call at a time. Make a "
                "KeptContext for each conversation."
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
        found = self.prefixes.find(target, prefix)
        if found is None or not isinstance(session, CachedSession):
            return known
        session.begin_with(found)
        return len(prefix)

    def _keep(self, session: TargetSession, tokens: Sequence[int], prefix: int) -> None:
        """Keep a prefix that was read, for other texts."""
        if len(tokens) == prefix and isinstance(session, CachedSession):
            found = session.beginning(prefix)
            if found is not None:
                self.prefixes.keep(self._target, tokens, found)

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
