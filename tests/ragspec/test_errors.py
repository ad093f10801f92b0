"""Numbers and their nouns in messages."""

from __future__ import annotations

from ragspec.errors import pluralize


def test_a_noun_follows_its_number() -> None:
    for noun, several in (("token", "tokens"), ("query", "queries"), ("forward pass", None)):
        assert pluralize(1, noun) == f"1 {noun}"
        assert pluralize(0, noun) == f"0 {several or 'forward passes'}"
    assert pluralize(1200, "search", ",") == "1,200 searches" and pluralize(2, "key") == "2 keys"
