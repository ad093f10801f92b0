"""Text as tokenizers take it."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of every lone surrogate; pairs become characters.

    JSON can hold half of a pair ("\\ud83d"), which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
