"""From texts to rows of token ids, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from numpy.typing import NDArray

from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError
from ragspec.retrievers.indexes.token_rows import token_row

Texts = Iterable[str | Sequence[int] | NDArray[Any]]


ProgressCallback = Callable[[int, int], None]


BATCH = 256


def tokenized(
    texts: Texts, tokenizer: Any, progress: ProgressCallback = lambda documents, tokens: None
) -> Iterator[NDArray[Any]]:
    """Yield the token ids of every document [T], those that are token ids already as they are.

    No special tokens are added; lone surrogates become U+FFFD. progress: called with the documents
    and tokens so far, once a batch. Raises InputError for a text without a tokenizer.
    """
    if isinstance(texts, str):
        raise InputError("got one text; expected a list or a stream of texts or of token ids.")
    stream = iter(texts)
    documents = tokens = 0
    while batch := list(islice(stream, BATCH)):
        for row in _rows(batch, tokenizer):
            documents, tokens = documents + 1, tokens + len(row)
            yield row
        progress(documents, tokens)


def chunks(documents: Iterator[NDArray[Any]], most: int) -> Iterator[Iterator[NDArray[Any]]]:
    """Yield streams of documents of about `most` tokens each; use up one before the next."""
    for first in documents:
        yield _piece(first, documents, most)


def _piece(first: NDArray[Any], rest: Iterator[NDArray[Any]], most: int) -> Iterator[NDArray[Any]]:
    size = 0
    for document in chain((first,), rest):
        yield document
        size += len(document)
        if size >= most:
            return


def _rows(batch: list[Any], tokenizer: Any) -> Iterator[NDArray[Any]]:
    texts = [well_formed(item) for item in batch if isinstance(item, str)]
    if texts and tokenizer is None:
        raise InputError("got a text but no tokenizer; pass one, or token ids.")
    result: Iterator[Any] = iter(())
    if texts:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        result = iter(tokenizer(texts, **options)["input_ids"])
    for item in batch:
        yield token_row(next(result) if isinstance(item, str) else item)
