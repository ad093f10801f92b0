"""Search in ten languages: is the right page among the best three?

    OMP_NUM_THREADS=1 python benchmarks/languages.py --pages DIR

DIR has Debian's packages of translated manual pages, unpacked (`dpkg -x manpages-de_*.deb DIR/de`;
cs, de, es, fr, ja, pl, pt-br, ru, uk, zh). A file of JSON lines beside this one has 20 questions of
our own in each language, with the page that answers, and in six of them ten questions that no
manual page answers. The pages of a language are one index; questions are refused as `DocQA` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.data import read_records

from ragspec.errors import DocumentError
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.retrievers.search.passage_index import PassageIndex

QUESTIONS = Path(__file__).parent / "language_questions.jsonl"
BEST, DEPTH = 3, 30  # documents that count, passages that are searched for them


def pages(folder: Path, language: str) -> Iterator[Document]:
    """Yield the pages of a language, without those that only refer to others."""
    for path in sorted(folder.glob(f"**/man/{language}/man*/*.gz")):
        try:
            yield load_document(path)
        except DocumentError as error:
            if "only refers" not in str(error):
                raise


def is_among_best(index: PassageIndex, question: str, page: str) -> bool:
    """Return whether a page is among the best documents for a question."""
    names = [Path(hit.document.name).name for hit in index.search(question, DEPTH)]
    return f"{page}.gz" in list(dict.fromkeys(names))[:BEST]


def refused(index: PassageIndex, questions: Sequence[str]) -> float:
    """Return the share of questions that are refused over an index."""
    qa = DocQA(index, prompt="extract")
    return sum(qa.search(each).refused is not None for each in questions) / len(questions)


def main() -> None:
    """Print the share of every language, and the questions that miss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, required=True)
    inputs = parser.parse_args()
    asked: dict[str, list[tuple[str, str]]] = {}
    unanswerable: dict[str, list[str]] = {}
    for record in read_records(QUESTIONS):
        language, page, question = record["language"], record["page"], record["question"]
        if page is None:
            unanswerable.setdefault(language, []).append(question)
        else:
            asked.setdefault(language, []).append((page, question))
    right = 0
    for language, items in asked.items():
        index = PassageIndex.build(pages(inputs.pages, language))
        hits = [is_among_best(index, question, page) for page, question in items]
        right += sum(hits)
        count = f"{len(index.documents)} pages, {sum(hits)} of {len(hits)}"
        print(language, count, [item for item, hit in zip(items, hits, strict=True) if not hit])
        answered = refused(index, [question for _, question in items])
        print(f"  refused with an answer {answered:.0%}", flush=True)
        if language in unanswerable:
            print(f"  refused without an answer {refused(index, unanswerable[language]):.0%}")
    print(f"all: {right} of {sum(map(len, asked.values()))}")


if __name__ == "__main__":
    main()
