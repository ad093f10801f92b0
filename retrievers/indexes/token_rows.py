"""Rows of token ids as users give them, checked before they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError


def token_row(tokens: Any) -> NDArray[Any]:
    """Return token ids as an array [T]; raises InputError for anything else."""
    try:
        inputs = np.asarray(tokens)
    except ValueError as error:
        raise InputError(
            "got rows of different lengths; expected one row of token ids for each document."
        ) from error
    if inputs.ndim != 1 or (len(inputs) and inputs.dtype.kind not in "iu"):
        raise InputError(
            f"got tokens of shape {inputs.shape} and type {inputs.dtype}; expected one row of "
            f"token "
            "ids for each document."
        )
    return inputs


def check_ids(row: NDArray[Any], vocab_size: int, name: str) -> None:
    """Raise InputError unless all ids [T] are in [0, vocab_size); name: of the document."""
    if len(row) and (row.min() < 0 or row.max() >= vocab_size):
        raise InputError(
            f"{name} holds ids from {row.min()} to {row.max()}; expected 0 to {vocab_size - 1}: "
            "tokenize it with the tokenizer of the store."
        )


def checked(rows: Iterable[NDArray[Any]], vocab_size: int) -> Iterator[NDArray[Any]]:
    """Yield the rows; raises InputError for ids out of range, with the document's number."""
    for number, row in enumerate(rows):
        check_ids(row, vocab_size, f"document {number}")
        yield row
