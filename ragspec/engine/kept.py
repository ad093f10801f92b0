"""What a model has read, kept from one call of the engine to the next.

The keys and values of a token depend on those before it alone, so a prompt that begins like the
text before it is read from where the two part. The text is the same as after a fresh reading, up
to the rounding of forwards of other lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

from ragspec.errors import InputError
from ragspec.target.base import Resumes, TargetSession

if TYPE_CHECKING:
    from ragspec.target.causal import CausalTarget


class KeptContext:
    """The cache of the last text of a call, for the next: `engine.generate(prompt, kept=context)`.

    It serves one prompt at a time and one model; another model's call begins anew. A call that
    was interrupted leaves what had been committed. Models whose caches cannot be cut short
    (recurrent states), or whose positions depend on the length of the prompt, read all again.
    Change the model's weights and it must be made anew.
    """

    def __init__(self) -> None:
        self._using = threading.Lock()
        self._target: CausalTarget | None = None
        self._session: Resumes | None = None
        self._tokens: list[int] = []

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
        self, target: CausalTarget, text: list[int], capacity: int
    ) -> Iterator[tuple[TargetSession, int]]:
        """Lend a session that holds the beginning of a text, and tell how many tokens of it.

        text: the row's own list, which grows as tokens are committed. Raises InputError where
        another call is under way.
        """
        if not self._using.acquire(blocking=False):
            raise InputError(
                "this kept context is in use by another call; expected one call at a time. Make a "
                "KeptContext for each conversation."
            )
        try:
            known = self._resume(target, text)
            session: TargetSession = self._session or target.open(1, capacity)
            self._target, self._session, self._tokens = target, None, []
            try:
                with session:
                    yield session, known
            finally:  # also after an interrupt: what was committed stays as it is
                if isinstance(session, Resumes):
                    self._tokens = text[: session.resume(len(text))]
                    self._session = session
        finally:
            self._using.release()

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
