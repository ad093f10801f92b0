"""A corpus with the interface of SGLang's n-gram worker: requests by id, trees with their masks.

The text of one request is never drafted for another: `batch_put`, which shares texts, is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ragspec.adapters.host_text import HostOptions, HostText, host_drafter
from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.trees.draft_tree import Ints
from ragspec.trees.operations import ancestors
from ragspec.types import Tokenizer

PAD = 0
STORES = (
    'Build a store of the texts (`ragspec store build`), and name it: register("NAME", store=...).'
)

WholeText = Callable[[], Sequence[int]]


class TreeCorpus:
    """Drafts a tree for each request of a batch.

    Args:
        nodes: Nodes of a tree with its root, the text's last token; smaller trees are padded with
            token 0.
        limit: Most tokens of a text.
        tokenizer: The host's tokenizer, which stores must fit.
        chains: Whether to draft chains only.

    Raises:
        InputError, UnknownNameError, StoreError: See `host_drafter`.
    """

    def __init__(
        self,
        options: HostOptions,
        *,
        nodes: int,
        vocab_size: int,
        limit: int,
        tokenizer: Tokenizer | None = None,
        chains: bool = False,
    ) -> None:
        self._nodes = nodes
        self._vocab_size = vocab_size
        self._limit = limit
        self._chains = chains
        self._drafter: Drafter = host_drafter(options, tokenizer, vocab_size)
        self._texts: dict[str, HostText] = {}
        self._lent: Mapping[str, WholeText] = {}

    def lend(self, texts: Mapping[str, WholeText]) -> None:
        """Set, for the next `batch_get`, functions that return the whole texts by request id."""
        self._lent = texts

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[Ints, Ints]:
        """Return tokens i64 [B * N] and masks i64 [B * N * N] of the trees, row after row.

        Mask [i, j] is 1 if node j is node i or above it; node 0 is the text's last token.

        Args:
            batch_tokens: The last tokens of each text.
            total_lens: The number of tokens of each text.
        """
        size = self._nodes
        tokens = np.full((len(req_ids), size), PAD, dtype=np.int64)
        masks = np.zeros((len(req_ids), size, size), dtype=np.int64)
        masks[:] = np.eye(size, dtype=np.int64)
        masks[:, :, 0] = 1  # all nodes are below the root, pads too
        for row, (name, tail, length) in enumerate(
            zip(req_ids, batch_tokens, total_lens, strict=True)
        ):
            tokens[row, 0] = tail[-1]
            text = self._text(name, tail, length)
            longest = size - 1 if self._chains else None
            tree = text.draft(size - 1, self._limit - len(text), longest)
            count = len(tree)
            tokens[row, 1 : count + 1] = tree.tokens
            masks[row, 1 : count + 1, 1 : count + 1] = ancestors(tree.parents)
        self._lent = {}
        return tokens.reshape(-1), masks.reshape(-1)

    def _text(self, name: str, tail: Sequence[int], length: int) -> HostText:
        """Return the session of a request, updated to its text."""
        text = self._texts.get(name)
        if text is not None:
            new = length - len(text)
            before = len(tail) - new
            if 0 <= new <= len(tail) and [*tail[:before]] == text.tokens[len(text) - before :]:
                text.refresh(list(tail[before:]))
                return text
        tokens = self._whole(name, tail, length)
        text = self._texts[name] = HostText(self._drafter, tokens, self._vocab_size)
        return text

    def _whole(self, name: str, tail: Sequence[int], length: int) -> list[int]:
        """Return a request's whole text, completed by its last tokens, or these alone."""
        whole = self._lent.get(name)
        if whole is None:
            return list(tail)
        text = list(whole())
        behind = length - len(text)
        return [*text, *tail[len(tail) - behind :]] if 0 < behind <= len(tail) else text[:length]

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: texts of requests are not shared."""

    def synchronize(self) -> None:
        """Do nothing: the corpus is always up to date."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget requests."""
        for name in req_ids:
            self._texts.pop(name, None)

    def reset(self) -> None:
        """Forget all requests."""
        self._texts.clear()

    # SGLang's interface for texts of the operator, which a store of ragspec replaces; see `settle`.
    remaining_token_budget = 0

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Raise InputError: a store replaces the texts that a server loads."""
        raise InputError(f"got the corpus {corpus_id!r}; expected none. {STORES}")

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Do nothing: no corpus is loaded."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Do nothing: no corpus is loaded."""

    def list_external_corpora(self) -> dict[str, int]:
        """Return no corpora."""
        return {}
