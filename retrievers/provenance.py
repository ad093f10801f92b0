"""What a store was made with, checked against what it is to be used with.

A table or pool of one model's outputs drafts badly for another, and token ids mean nothing to
another tokenizer. Drafters over such stores have `fits(model, tokenizer)`, which whoever knows both
calls before the first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from ragspec.errors import StoreError
from ragspec.retrievers.fingerprints import model_fingerprint, same_print, tokenizer_fingerprint


@runtime_checkable
class Fits(Protocol):
    """The optional part of a drafter that knows what its stores were made with."""

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Raise StoreError where a store was made with another model or tokenizer."""
        ...


def prints_of(model: Any = None, tokenizer: Any = None) -> dict[str, str]:
    """Return the fingerprints of what is given: a model (or its fingerprint) and a tokenizer."""
    prints = {}
    if model is not None:
        prints["model"] = model if isinstance(model, str) else model_fingerprint(model)
    if tokenizer is not None:
        prints["tokenizer"] = tokenizer_fingerprint(tokenizer)
    return prints


def check_prints(what: str, found: Mapping[str, str | None], expected: Mapping[str, str]) -> None:
    """Raise StoreError where a store names another model or tokenizer than the expected one.

    A store that names none, such as a corpus of nobody's outputs, fits all.
    """
    for name, value in expected.items():
        known = found.get(name)
        if known and not same_print(known, value):
            raise StoreError(
                f"{what} was made with another {name} (fingerprint {known[:12]}, expected "
                f"{value[:12]}); make it again with this {name}, or leave it out."
            )


def check_all(drafters: Iterable[object], model: Any, tokenizer: Any) -> None:
    """Ask every drafter that knows whether it fits; raises StoreError where one does not."""
    for drafter in drafters:
        if isinstance(drafter, Fits):
            drafter.fits(model, tokenizer)
