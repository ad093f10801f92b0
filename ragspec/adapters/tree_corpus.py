"""A corpus as SGLang's n-gram worker asks one: requests by id, whole trees with their masks.

Nothing that one request wrote is drafted for another: what SGLang offers to all
(`batch_put`) is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ragspec.adapters.host_text import HostOptions, HostText, host_drafter
from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.trees.draft_tree import DraftTree, Ints
from ragspec.trees.operations import ancestors, keep_paths

PAD = 0
STORES = (
    'Build a store of the texts (`ragspec store build`), and name it: register("NAME", store=...).'
)

WholeText = Callable[[], Sequence[int]]


class TreeCorpus:
    """Drafts a tree for each of a batch of requests.

    nodes: of a tree, its root (the text's last token) among them: a tree of fewer is filled with
    the token 0. limit: tokens of the longest text. tokenizer: the host's, which stores must fit.
    chains: draft chains alone. Raises as `host_drafter` does.
    """

    def __init__(
        self,
        options: HostOptions,
        *,
        nodes: int,
        vocab_size: int,
        limit: int,
        tokenizer: Any = None,
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
        """Take, for the time of the next `batch_get`, what tells the whole text of a request."""
        self._lent = texts

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[Ints, Ints]:
        """Return tokens i64 [B * N] and masks i64 [B * N * N] of the trees, row after row.

        batch_tokens: the last tokens of each text. total_lens: tokens of each text. Mask [i, j]
        tells whether node j is node i or above it; node 0 is the text's last token.
        """
        size = self._nodes
        tokens = np.full((len(req_ids), size), PAD, dtype=np.int64)
        masks = np.zeros((len(req_ids), size, size), dtype=np.int64)
        masks[:] = np.eye(size, dtype=np.int64)
        masks[:, :, 0] = 1  # all hang below the root, pads too
        for row, (name, tail, length) in enumerate(
            zip(req_ids, batch_tokens, total_lens, strict=True)
        ):
            tokens[row, 0] = tail[-1]
            tree = self._draft(self._text(name, tail, length))
            count = len(tree)
            tokens[row, 1 : count + 1] = tree.tokens
            masks[row, 1 : count + 1, 1 : count + 1] = ancestors(tree.parents)
        self._lent = {}
        return tokens.reshape(-1), masks.reshape(-1)

    def _draft(self, text: HostText) -> DraftTree:
        tree = text.draft(self._nodes - 1, self._limit - len(text))
        if self._chains:
            tree = keep_paths(tree, 1)
            text.offer(tree)
        return tree

    def _text(self, name: str, tail: Sequence[int], length: int) -> HostText:
        """Return the session of a request, brought up to its text."""
        known = self._texts.get(name)
        if known is not None:
            new = length - len(known)
            before = len(tail) - new
            if 0 <= new <= len(tail) and [*tail[:before]] == known.tokens[len(known) - before :]:
                known.refresh(list(tail[before:]))
                return known
        text = self._whole(name, tail, length)
        known = self._texts[name] = HostText(self._drafter, text, self._vocab_size)
        return known

    def _whole(self, name: str, tail: Sequence[int], length: int) -> list[int]:
        """Return a request's text, of which the last tokens may not have been told to it yet."""
        whole = self._lent.get(name)
        if whole is None:
            return list(tail)
        text = list(whole())
        behind = length - len(text)
        return [*text, *tail[len(tail) - behind :]] if 0 < behind <= len(tail) else text[:length]

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Take nothing: a request's words are its own."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget requests."""
        for name in req_ids:
            self._texts.pop(name, None)

    def reset(self) -> None:
        """Forget all requests."""
        self._texts.clear()

    # SGLang's own way to texts of an operator: a store of ours serves them all, see `settle`.
    remaining_token_budget = 0

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Raise InputError: a store takes the place of texts that a server loads."""
        raise InputError(f"got the corpus {corpus_id!r}; expected none. {STORES}")

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Count nothing."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Remove nothing: there is none."""

    def list_external_corpora(self) -> dict[str, int]:
        """Return no texts."""
        return {}
