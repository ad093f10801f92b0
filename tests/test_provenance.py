from __future__ import annotations

import pytest

from ragspec.errors import StoreError
from ragspec.retrievers.fingerprints import model_fingerprint, tokenizer_fingerprint
from ragspec.retrievers.provenance import check_all, check_prints, prints_of
from tests import tiny


class Drafter:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, object]] = []

    def fits(self, model: object = None, tokenizer: object = None) -> None:
        self.asked.append((model, tokenizer))


def test_fingerprints_are_of_what_is_given() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    assert prints_of() == {}
    assert prints_of("abc") == {"model": "abc"}
    assert prints_of(model, tokenizer) == {
        "model": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }


def test_a_store_of_nobody_fits_all_and_others_only_their_own() -> None:
    check_prints("it", {}, {"model": "a"})
    check_prints("it", {"model": None}, {"model": "a"})
    check_prints("it", {"model": "a", "tokenizer": "t"}, {"model": "a"})
    with pytest.raises(StoreError, match="it was made with another tokenizer"):
        check_prints("it", {"model": "a", "tokenizer": "t"}, {"model": "a", "tokenizer": "u"})


def test_only_drafters_that_know_are_asked() -> None:
    drafter = Drafter()
    check_all([object(), drafter], "m", "t")
    assert drafter.asked == [("m", "t")]
