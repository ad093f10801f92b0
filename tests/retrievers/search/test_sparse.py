"""BM25, fusion of rankings, search functions, passages and words."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import (
    FunctionRetriever,
    Fusion,
    as_retriever,
    fuse_rankings,
    search_hits,
)
from ragspec.retrievers.search.passages import WORD, split_document, weight
from ragspec.retrievers.search.sparse import TITLE, SparseIndex, beginning
from ragspec.retrievers.search.text import words_of

TEXTS = [
    "The cats sleep in the house.",
    "A dictionary maps keys to values.",
    "Dictionaries can be merged with the update method.",
    "Größe und Straße.",
    "...",
]


def test_passages_with_rare_shared_words_come_first() -> None:
    index = SparseIndex.build(TEXTS)
    result = index.search("How do I merge dictionaries by update?", 5)
    assert [number for number, _ in result] == [2, 1]
    assert result[0][1] > result[1][1] > 0
    assert index.search("quantum", 5) == []
    assert index.search("the of what", 5) == []
    assert SparseIndex.build(["...", "the of"]).search("the", 2) == []
    assert [number for number, _ in index.search("Grosse", 1)] == [3]


@settings(max_examples=30)
@given(st.lists(st.text(alphabet="abc dé.", max_size=12), min_size=1, max_size=8), st.text())
def test_best_first_with_ties_by_number(texts: list[str], query: str) -> None:
    result = SparseIndex.build(texts).search(query, len(texts))
    assert result == sorted(result, key=lambda item: (-item[1], item[0]))

    def terms(text: str) -> set[str]:
        return {term for word in words_of(text) for term in (word, beginning(word))}

    assert {number for number, _ in result} == {
        number for number, text in enumerate(texts) if terms(query) & terms(text)
    }


def test_scores_are_the_formula_of_words_beginnings_and_titles() -> None:
    texts = ["Cats\ncats sleep", "Cats\nmice", "Files\nverzeichnisse cats of mice"]
    rarity, norm = np.log1p(0.5 / 3.5), 1.2 * (0.25 + 0.75 * 3 / (9 / 3))
    index = SparseIndex.build(texts)
    assert index.scores("cats")[0] == pytest.approx(2 * rarity * 2 / (2 + norm), rel=1e-5)
    assert [number for number, _ in index.search("Verzeichnis", 3)] == [2]
    titled = SparseIndex.build(texts, [text.partition("\n")[0] for text in texts])
    more = titled.scores("cats") - index.scores("cats")
    assert more == pytest.approx([TITLE * 2 * np.log(2) / 2.2] * 2 + [0], rel=1e-5)


def test_fusion_is_the_formula() -> None:
    fused = fuse_rankings({"dense": [(7, 0.9), (3, 0.8)], "sparse": [(3, 12.0)]})
    ranks = [(number, ranks) for number, _, ranks in fused]
    assert ranks == [(3, {"dense": 2, "sparse": 1}), (7, {"dense": 1})]
    assert fused[0][1] == pytest.approx(1 / 62 + 1 / 61)
    weighted = fuse_rankings({"dense": [(7, 0.9)], "sparse": [(3, 1.0)]}, Fusion(k=2, sparse=0.5))
    assert weighted[1][1] == pytest.approx(0.5 / 3)
    tied = fuse_rankings({"dense": [(7, 0.9)], "sparse": [(3, 1.0)]})
    assert [number for number, _, _ in tied] == [3, 7]


def test_bare_function_becomes_a_retriever() -> None:
    def search(query: str, k: int) -> list[tuple[str, float, Mapping[str, Any]]]:
        meta = {"source": "a.txt", "title": "A"}
        hits = [(f"about {query}", 2.0, meta), (f"more for {k}", 1.0, {}), ("more", 0.5, {})]
        return [("  ", 3.0, {}), *hits]  # a blank text is no hit

    hits = as_retriever(search).search("cats", 5)
    assert [(hit.document.name, hit.passage.title) for hit in hits[:1]] == [("a.txt", "A")]
    assert hits[0].passage.text == hits[0].document.text == "about cats"
    assert hits[1].passage.text == "more for 5"
    assert len(as_retriever(search).search("cats", 1)) == 1
    # A text without a name has the same one at every rank, and no other text has it.
    assert len(as_retriever(lambda query: cycle(search(query, 3))).search("cats", 5)) == 5
    endless = type("Engine", (), {"search": lambda self, query, k: cycle(hits)})()
    assert search_hits(endless, "cats", 5) == [*hits, *hits][:5]
    assert search_hits(endless, "cats", 0) == []
    last = as_retriever(lambda query: search(query, 3)[3:]).search("cats", 1)[0]
    assert last.document == hits[2].document and last.document.name != hits[1].document.name
    loose = as_retriever(lambda *values, **named: [(str(named), 1.0, {})])
    assert loose.search("cats", 5)[0].passage.text == "{}"


@pytest.mark.parametrize(
    "result",
    [["text"], [("text", 1.0)], [("text", "x", {})], [(1, 1.0, {})], [None], None, 7, "text"]
    + [{"text": 1.0}, [("text", float("nan"), {})], [("half \ud800", 1.0, {})]],
)
def test_wrong_results_are_refused(result: Any) -> None:
    expected = r"search function <lambda> returned .*expected .*(\(text, score, meta\)|a number\.)"
    with pytest.raises(InputError, match=expected):
        FunctionRetriever(lambda query: result).search("q", 1)
    with pytest.raises(InputError, match=r"Engine.search\(\) returned .* expected a list of Hit"):
        search_hits(type("Engine", (), {"search": lambda self, query, k: result})(), "q", 1)


def test_an_asynchronous_search_is_refused() -> None:
    async def find(query: str, k: int = 1) -> list[Any]:
        return []

    async def stream(query: str, k: int = 1) -> Any:
        yield "text", 1.0, {}

    functions: tuple[Any, ...] = (find, stream)
    for function in functions:
        with pytest.raises(InputError, match=f"function {function.__name__} is asynchronous"):
            as_retriever(function).search("q", 1)
    engine = type("Engine", (), {"search": lambda self, query, k: find(query)})()
    with pytest.raises(InputError, match=r"Engine.search\(\) is asynchronous"):
        search_hits(engine, "q", 1)


@pytest.mark.parametrize(
    "source", [3, FunctionRetriever, type("R", (), {"search": len})(), lambda: 1]
)
def test_what_cannot_search_is_refused(source: Any) -> None:
    expected = r"Got .* as the retriever, expected an object with search"
    with pytest.raises(InputError, match=expected):
        as_retriever(source)


PASSAGES_TEXTS = st.lists(
    st.sampled_from(
        ["word", "End.", "Why?", "\n", "\n\n", "  ", "x" * 50, "Next", "日本語。", '"A."']
    )
    | st.text(max_size=6),
    max_size=200,
).map(" ".join)


def document(text: str, headings: tuple[tuple[int, str], ...] = ()) -> Document:
    return Document("d", "Title", text, headings=headings)


@given(PASSAGES_TEXTS, st.integers(10, 40))
def test_passages_are_chunks_that_cover_every_word_in_order(text: str, words: int) -> None:
    passages = split_document(document(text), 3, words)
    end = 0
    for passage in passages:
        assert passage.document == 3
        assert passage.text == text[passage.start : passage.end]
        assert passage.text == passage.text.strip() != ""
        assert text[end : passage.start].strip() == ""
        assert weight(text, (passage.start, passage.end)) <= words + words // 10 + 2
        end = passage.end
    assert text[end:].strip() == ""


def test_sentences_stay_whole_and_passages_near_the_size() -> None:
    sentence = "This sentence has exactly eight words in it."
    passages = split_document(document(" ".join([sentence] * 100)), words=100)
    assert all(passage.text.endswith("it.") for passage in passages)
    sizes = [len(WORD.findall(passage.text)) for passage in passages]
    assert all(size == 96 for size in sizes[:-1])


def test_heading_begins_a_passage_and_names_it() -> None:
    first = "Words of the first part go on here. " * 10
    text = f"{first}\n\nSecond\n\nThe second part is short."
    passages = split_document(document(text, ((first.__len__() + 2, "Second"),)), words=105)
    assert [passage.title for passage in passages] == ["Title", "Second"]
    assert passages[1].text.startswith("Second\n\nThe second")
    # A first part that is too short for a passage begins that of the heading above its middle.
    short = split_document(document("Hello.\n\n" + text[-34:], ((8, "Second"),)))
    assert [passage.title for passage in short] == ["Second"]


def test_a_long_line_is_cut_between_words_and_a_long_word_inside() -> None:
    passages = split_document(document("word " * 95), words=20)
    assert [len(passage.text.split()) for passage in passages] == [20, 20, 20, 20, 15]
    assert len(split_document(document("x" * 5000), words=20)) > 10


def test_documents_are_numbered_and_tiny_passages_refused() -> None:
    both = [*split_document(document("One.")), *split_document(document("Two."), 1)]
    assert [(passage.document, passage.text) for passage in both] == [(0, "One."), (1, "Two.")]
    with pytest.raises(InputError, match="at least 10"):
        split_document(document("One."), words=5)


JOINED = {
    "C++ code": ("C code", "C# code"),
    "install 3.2.1 now": ("install 2.1.3 now", "install 1.2.3 now"),
    "call get_user_name here": ("call name of the user, get here", "call user_get_name here"),
    "pass --no-cache on": ("pass no cache on", "pass --cache no on"),
    "on 2024-03-05 go": ("on 2024-05-03 go", "on 05-03-2024 go"),
    "at 12:10 go": ("at 10:12 go", "from 10 to 12 go"),
    "pay 10,5 now": ("pay 5,10 now", "pay 5 of 10 now"),
}


@pytest.mark.parametrize("text", JOINED)
def test_identifiers_versions_and_options_are_words(text: str) -> None:
    word = text.split()[1] if len(text.split()) > 2 else text.split()[0]
    index = SparseIndex.build([*JOINED[text], text, "something else", "other words"])
    assert index.search(f"What of {word}?", 5)[0][0] == 2
    assert len(index.search(word.strip("-").replace("_", " "), 5)) >= 3, "their parts are, too"


def test_codes_and_invisible_characters_are_no_words() -> None:
    assert words_of("\x1b[31mE1234\x1b[0m failed") == ["e1234", "failed"]
    assert words_of("re\xadspon\ufeffsi\u200bbil\u2060ity") == ["responsibility"]
    assert words_of("1,2,3")[-1] == "1,2,3" and words_of("well--known") == ["well", "known"]
    assert words_of("zh 它在3.11.2版") == ["zh", "它在", "它", "在", "3", "11", "2", "3.11.2", "版"]


SPELLINGS = """KIRMIZI Kırmızı GRÖSSE Größe SPASS Spaß coeur cœur Lodz Łódź Da Đà Nang Nẵng
Tromso Tromsø كتاب کـــتاب في فى ٢٠١٢ 2012 हिन्दी हिंदी 2500 2,500 2500 2.500 1299.99 1,299.99
2500kg 2,500kg 1000-5000 1,000-5,000 --cache `--cache` --cache (--cache) -n,--cache [-n,--cache]
query queries tree trees movie movies class classes status statuses tax taxes box boxes process
processes bus buses virus viruses use uses cause causes alias aliases gas gases phase phases
match matches cache caches quiche quiches posse posses analyse analyses headache headaches hero
heroes shoe shoes analysis analyses axis axes index indices service services knife knives shelf
shelves drive drives woman women child children lens lenses taxi taxis series series"""


def test_spellings_of_a_word_are_one() -> None:
    words = [words_of(each) for each in SPELLINGS.split()]
    assert all(words) and words[::2] == words[1::2]


def test_names_and_words_of_other_languages_are_no_stop_words() -> None:
    assert words_of("thé ăn cần bé ôn în") == ["the", "an", "can", "be", "on", "in"]
    names = words_of("A man and I don't ask what IT or section A, S or T is.")
    assert names == ["man", "don", "ask", "it", "section", "a", "s", "t"]
    assert words_of("WHAT IS IT?") == [] and words_of("WHO?") == ["who"]
