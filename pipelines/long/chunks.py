"""What a drafter reads of a long document: the chunks that a question finds, in their order.

RAPID (Chen et al. 2025, arXiv 2502.20330, section 3.1) retrieves chunks of 512 tokens up to a
twenty-fourth of the document, and at least 4,096 tokens. Documents that fit the context of a small
model are shorter than that, so that here an eighth of the document is the most, in chunks of about
128 tokens where it has less than 16,384.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ragspec.pipelines.docqa.prompt import build_prompt
from ragspec.pipelines.docqa.wording import Wording
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passage_index import PassageIndex

SHARE, MOST, LARGEST_SHARE = 24, 4096, 8
SHORT = 16384  # tokens of a document that is cut into small chunks
WORDS_SHORT, WORDS_LONG = 96, 384  # of a chunk: about 128 and 512 tokens
FOUND = 64  # chunks that are looked at


def room_of(tokens: int) -> int:
    """Return how many tokens of chunks a drafter reads of a document of so many."""
    return max(1, min(max(tokens // SHARE, min(MOST, tokens)), tokens // LARGEST_SHARE))


class Chunks:
    """The chunks of a document, or of a part of it, and what a question finds in them."""

    def __init__(self, document: Document, hit: Hit, tokens: int) -> None:
        text = hit.passage.text
        self.room = room_of(tokens)
        words = WORDS_SHORT if tokens < SHORT else WORDS_LONG
        read = replace(document, text=text, headings=(), pages=())
        self.index = PassageIndex.build([read], words=words)

    def prompt(self, tokenizer: Any, question: str, wording: Wording) -> tuple[int, ...] | None:
        """Return the prompt over the chunks that fit, in document order; None where none do."""
        hits = self.index.search(question, FOUND)
        if not hits:
            return None
        made = build_prompt(tokenizer, question, hits, room=self.room, wording=wording)
        kept = sorted(made.hits, key=lambda hit: hit.passage.start)
        return build_prompt(tokenizer, question, kept, wording=wording).token_ids
