"""The chunks of a long document that a drafter reads: the best for a question, in document order.

RAPID (Chen et al. 2025, arXiv 2502.20330, section 3.1) retrieves chunks of 512 tokens up to a
twenty-fourth of the document, and at least 4,096 tokens, of those whose cosine with the question
is at least 0.3. Documents that fit the context of a small model are shorter. Here an eighth of the
document is the limit, and documents below 16,384 tokens have chunks of about 128 tokens. BM25
searches too. The least cosine holds only for an embedder that the caller names, since a cosine of
the small bundled one says little. A question without matches gets the beginning.
"""

from dataclasses import replace

from ragspec.pipelines.answering.prompt import build_prompt
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER, EmbedderSpec
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.types import Tokenizer

SHARE, MOST, LARGEST_SHARE = 24, 4096, 8
SHORT = 16384  # tokens of a document that is cut into small chunks
WORDS_SHORT, WORDS_LONG = 96, 384  # of a chunk: about 128 and 512 tokens
MOST_HITS = 64  # chunks that a search returns
FLOOR = 0.3  # least cosine


def room_of(tokens: int) -> int:
    """Return how many tokens of chunks a drafter reads of a document of `tokens` tokens."""
    return max(1, min(max(tokens // SHARE, min(MOST, tokens)), tokens // LARGEST_SHARE))


class Chunks:
    """Searches the chunks of the part of a document that the target reads.

    Args:
        hit, tokens: That part, and the length of its prompt.
        embedder: See `PassageIndex.build`; None for the bundled one.
    """

    def __init__(self, hit: Hit, tokens: int, embedder: EmbedderSpec = None) -> None:
        self.room = room_of(tokens)
        self._hit = hit
        self._floor = None if embedder is None else FLOOR
        words = WORDS_SHORT if tokens < SHORT else WORDS_LONG
        part = replace(hit.document, text=hit.passage.text, headings=(), pages=())
        self._index = PassageIndex.build([part], words=words, embedder=embedder or DEFAULT_EMBEDDER)

    def find(
        self, tokenizer: Tokenizer, question: str, template: PromptTemplate
    ) -> tuple[tuple[Hit, ...], tuple[int, ...]]:
        """Return the best chunks that fit, in document order, and the prompt over them.

        Without matches of the question, the first chunks count as the best.
        """
        passages, dense = self._index.passages, self._index.dense
        hits = self._index.search(question, MOST_HITS)
        if self._floor is not None and dense is not None:
            cosines = dense.search(question, len(passages))
            close = {passages[number] for number, cosine in cosines if cosine >= self._floor}
            hits = [hit for hit in hits if hit.passage in close]
        hits = hits or [Hit(self._index.documents[0], each, 0.0) for each in passages[:MOST_HITS]]
        prompt = build_prompt(tokenizer, question, hits, room=self.room, template=template)
        ordered = sorted(prompt.hits, key=lambda hit: hit.passage.start)
        ids = build_prompt(tokenizer, question, ordered, template=template).token_ids
        return tuple(map(self._placed, ordered)), ids

    def _placed(self, hit: Hit) -> Hit:
        """Return a chunk with its position in the document."""
        passage, by = hit.passage, self._hit.passage.start
        moved = replace(passage, start=passage.start + by, end=passage.end + by)
        return replace(hit, document=self._hit.document, passage=moved)
