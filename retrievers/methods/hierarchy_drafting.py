"""Hierarchy Drafting (arXiv 2502.05609): databases in order of temporal locality, as one tree.

The context (this prompt and output) drafts first, then the model's earlier answers, then a corpus
of other text. The form "ngram" has the paper's databases (section 3; level 5, guess 7, the corpus
queried with the last 2, then 1 tokens). The form "trie" is our own: suffixes of any length with
counts, in place of n-grams after one token. Deviations in both: see `ngrams` and `cascade`; the
corpus is not padded with random tokens. In the trie form the target's second choices (see
`token_recycling`) replace Lookahead's n-grams of the context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ragspec.drafters.base import Drafter
from ragspec.drafters.method import Method, Sources
from ragspec.errors import InputError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.methods.cascade import Cascade
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.ngrams import GUESS, LEVEL, MOST, NGramDrafter, NGramPool
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter

Form = Literal["trie", "ngram"]
PREVIOUS = 2
ANSWERS, TEXT = "answers", "statistics"  # names of the sources in reports


Store = CorpusIndex | NGramPool | Drafter
Database = Store | str | Path


class HierarchyDrafter(Cascade):
    """Drafts from the context, the model's own answers and a corpus, in this order.

    Args:
        model_store: The model's earlier answers, as a `CorpusIndex`, a drafter, an `NGramPool`, or
            the folder of a saved store. None leaves the level out.
        corpus: Other text, as a `CorpusIndex`, a drafter, or the folder of a saved store, or None.
        form: "trie" or "ngram".
        level, guess, most: In the n-gram form, tokens of an n-gram, n-grams after a token, and
            n-grams of the model's database.
        lookahead: The context also learns from tokens that the target did not choose.
        options: Those of `Cascade`.

    Raises:
        InputError: The form or a database is of another kind.
        StoreError: A folder holds no such store.
    """

    method = Method(
        "levels of stores",
        "Hierarchy Drafting",
        make=lambda sources: _over(sources),
        uses=frozenset({"store"}),
        colour=4,
    )

    def __init__(
        self,
        model_store: Database | None = None,
        corpus: Database | None = None,
        *,
        form: Form = "trie",
        level: int = LEVEL,
        guess: int = GUESS,
        most: int = MOST,
        lookahead: bool = True,
        **options: Any,
    ) -> None:
        if form not in ("trie", "ngram"):
            raise InputError(f"got form {form!r}; expected 'trie' or 'ngram'.")
        self.form = form
        answers, text = opened(model_store), opened(corpus)
        self._stores = [store for store in (answers, text) if isinstance(store, CorpusIndex)]
        drafters: list[Drafter] = [ContextDrafter()]
        settings: dict[str, Any] = {}  # of the look-ups in the corpus
        if form == "ngram":
            drafters = [NGramDrafter(level=level, guess=guess, lookahead=lookahead)]
            settings = {"longest": PREVIOUS, "shortest": 1, "shorter": (1,), "depth": level - 1}
            if isinstance(answers, CorpusIndex):  # of its documents in the global scope
                documents = (each for segment in answers.segments() for each in segment.documents())
                texts = (each.tolist() for each in documents)
                answers = NGramPool.common(texts, level=level, guess=guess, most=most)
        if answers is not None:
            drafters.append(_drafter(answers, ANSWERS))
        if text is not None:
            drafters.append(_drafter(text, TEXT, **settings))
        if lookahead and form == "trie":
            drafters.append(NeighbourDrafter())
        super().__init__(drafters, name="hierarchy", **options)
        self.most_nodes = guess * (level - 1) if form == "ngram" else None

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Raise StoreError if a store was made with another model or tokenizer."""
        for store in self._stores:  # also of the answers whose n-grams are in a pool
            store.fits(model, tokenizer)
        super().fits(model, tokenizer)


def opened(database: Database | None) -> Store | None:
    """Return a database as it is, or open the store in the folder that it names.

    Raises:
        InputError: It is no database.
        StoreError: The folder holds no such store.
    """
    if not isinstance(database, (str, Path)):
        usable = database is None or isinstance(database, Store)
        if not usable or isinstance(database, type):
            raise InputError(
                f"got {type(database).__name__} as a database; expected a corpus, an n-gram pool, "
                "a drafter, the folder of a saved store, or None."
            )
        return database
    return CorpusIndex.open(database)


def _drafter(store: Store, name: str, **options: Any) -> Drafter:
    """Return a drafter over a store, under the name of its level; a drafter has its own name."""
    if isinstance(store, NGramPool):
        return NGramDrafter(store, name=name)
    return store if isinstance(store, Drafter) else store.drafter(name=name, **options)


def _over(sources: Sources) -> HierarchyDrafter:
    answers, text = sources.history, sources.corpus
    return HierarchyDrafter(
        model_store=None if answers is None else answers.drafter(sources.scope, name=ANSWERS),
        corpus=None if text is None else text.drafter(sources.scope, name=TEXT),
        lookahead=sources.top_k_feedback,
    )
