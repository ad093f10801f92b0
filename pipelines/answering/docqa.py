"""Questions over documents: the best passages that fit the model's context are its prompt."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, TypedDict, Unpack

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.answering.answer import Answer
from ragspec.pipelines.answering.answerer import NEW_TOKENS, Answerer, Question
from ragspec.pipelines.answering.prompt import Prompt, build_prompt
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.retrievers.search import documents as files
from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER, EmbedderSpec, load_embedder
from ragspec.retrievers.search.fusion import Hit, Retriever, SearchFunction, as_retriever
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.passages import WORDS
from ragspec.sampling.settings import checked_count


class PromptSettings(TypedDict, total=False):
    """The passages of a prompt and its words, see `Answerer`."""

    top_k: int | None
    prompt: str | Path | PromptTemplate | None
    system: str | None


class DocQA(Answerer):
    """Answers questions from documents, with citations.

    Args:
        retriever: An index, or a function from a question to (text, score, meta) triples.
        engine, settings: See `Answerer`; `settings` is an attribute too.
        skipped: Files of the folders that were not read, with the reasons.
    """

    def __init__(
        self,
        retriever: Retriever | SearchFunction,
        *,
        engine: Engine | None = None,
        skipped: Iterable[files.Skipped] = (),
        **settings: Unpack[PromptSettings],
    ) -> None:
        super().__init__(engine, as_retriever(retriever), **settings)
        self.settings, self.skipped = settings, list(skipped)
        self.retriever: Retriever

    @classmethod
    def from_documents(
        cls,
        documents: files.Paths | files.Collection,
        *,
        engine: Engine | None = None,
        words: int = WORDS,
        embedder: EmbedderSpec = DEFAULT_EMBEDDER,
        dense: str = FLAT,
        on_progress: files.ProgressCallback = lambda what, done, total: None,
        **settings: Unpack[PromptSettings],
    ) -> Self:
        """Index files and folders, or what `load_documents` read; see `PassageIndex.build`."""
        if embedder is not None:  # before the documents, whose reading may take long
            embedder = load_embedder(embedder)
        if not isinstance(documents, files.Collection):
            documents = files.load_documents(documents, on_progress=on_progress)
        index = PassageIndex.build(
            documents, words=words, embedder=embedder, dense=dense, on_progress=on_progress
        )
        return cls(index, engine=engine, skipped=documents.skipped, **settings)

    @classmethod
    def from_index(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: Engine | None = None,
        embedder: EmbedderSpec = None,
        **settings: Unpack[PromptSettings],
    ) -> Self:
        """Open an index that `save` wrote; see `PassageIndex.open`."""
        return cls(PassageIndex.open(path, embedder=embedder), engine=engine, **settings)

    @property
    def documents(self) -> tuple[files.Document, ...]:
        """The documents of the index; empty for another retriever."""
        return self.retriever.documents if isinstance(self.retriever, PassageIndex) else ()

    def save(self, path: str | os.PathLike[str], *, replace: bool = True) -> None:
        """Write the index to a folder, see `PassageIndex.save`; raise InputError without one."""
        if not isinstance(self.retriever, PassageIndex):
            raise InputError(f"{type(self.retriever).__name__} cannot be saved; expected an index.")
        self.retriever.save(path, replace=replace)

    def prompt(self, question: str, *, max_new_tokens: int = NEW_TOKENS) -> Prompt:
        """Search, and return the prompt of `ask`."""
        most = checked_count(max_new_tokens, "max_new_tokens")
        return self.prompt_over(question, self.read_hits(self.search(question)), most)

    def prompt_over(self, question: str, hits: Sequence[Hit], max_new_tokens: int) -> Prompt:
        """Return the prompt over passages, of which the last are left out if they do not fit."""
        limit = self.engine.target.max_length
        room = None if limit is None else limit - max_new_tokens
        tokenizer = self.engine.tokenizer
        return build_prompt(tokenizer, question, hits, room=room, template=self.template)

    def _write(self, question: Question) -> Answer:
        hits, new = self.read_hits(question.search), question.options["max_new_tokens"]
        prompt = self.prompt_over(question.text, hits, new)
        return self.answer_of(question, prompt, self._generate(prompt, question))
