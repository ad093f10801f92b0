"""A corpus as SGLang's n-gram worker asks one: requests by id, whole trees with their masks.

Nothing that one request wrote is drafted for another: what SGLang offers to all
(`batch_put`) is not taken. Texts that an operator loads are there for every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.adapters.host_text import HostOptions, HostText, host_drafter
from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.errors import InputError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.trees.draft_tree import DraftTree, Ints
from ragspec.trees.operations import ancestors, keep_paths

PAD = 0

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
        self._local = host_drafter(options, tokenizer, vocab_size)
        self._drafter: Drafter = self._local
        self._loaded: dict[str, tuple[CorpusIndex, TemporaryDirectory[str]]] = {}
        self._counted: dict[str, int] = {}
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
        """Forget all requests; loaded texts stay."""
        self._texts.clear()

    @property
    def remaining_token_budget(self) -> int:
        """Tokens that may still be loaded: stores are on disk, so as many as positions go."""
        return int(np.iinfo(np.int32).max) - sum(self._counted.values())

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Index texts to draft from, and return their tokens.

        chunks: token ids, one text after the other, an id below 0 between two. Raises InputError
        where the name is taken.
        """
        if corpus_id in self._loaded:
            raise InputError(
                f"got the corpus {corpus_id!r} twice; expected another name. Remove it first."
            )
        folder = TemporaryDirectory(prefix="ragspec-")
        texts = documents(chunks)
        corpus = CorpusIndex.build(
            texts, None, Path(folder.name) / "corpus", vocab_size=self._vocab_size
        )
        self._loaded[corpus_id] = (corpus, folder)
        self._join()
        return corpus.info().tokens

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Count what was loaded."""
        self._counted[corpus_id] = loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Draft no more from texts that were loaded; nothing where there are none of the name."""
        self._counted.pop(corpus_id, None)
        result = self._loaded.pop(corpus_id, None)
        if result is None:
            return
        self._join()
        # Requests that are running go on with it: the maps stay valid after the names are gone.
        result[0].close()
        result[1].cleanup()

    def list_external_corpora(self) -> dict[str, int]:
        """Return the tokens of what was loaded, by name."""
        return {name: corpus.info().tokens for name, (corpus, _) in self._loaded.items()}

    def _join(self) -> None:
        """Let requests from now on draft from all that is loaded."""
        loaded = [corpus.drafter(name=name) for name, (corpus, _) in self._loaded.items()]
        self._drafter = Fuse([self._local, *loaded]) if loaded else self._local


def documents(chunks: Iterable[Sequence[int]]) -> Iterable[NDArray[np.int64]]:
    """Yield the texts in chunks of token ids, which an id below 0 parts."""
    text: list[int] = []
    for chunk in chunks:
        for token in chunk:
            if token >= 0:
                text.append(token)
            elif text:
                yield np.asarray(text, dtype=np.int64)
                text = []
    if text:
        yield np.asarray(text, dtype=np.int64)
