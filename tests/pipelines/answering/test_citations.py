"""Citations: whole sentences of the passages that stand word for word in an answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.pipelines.answering.citations import Citation, cite, cuts_word
from ragspec.pipelines.answering.prompt import Prompt, build_prompt
from ragspec.retrievers import Document, Hit, Passage
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.support import tiny

BEFORE = "Préface. "
FOX = "The quick brown fox jumps over the lazy dog near the old river bank."
CAT = "A small grey cat sleeps all day on the warm window sill of the house."


def prompt_of(texts: Sequence[str]) -> Prompt:
    hits = []
    for n, text in enumerate(texts):
        passage = Passage(n, len(BEFORE), len(BEFORE) + len(text), "T", text)
        hits.append(Hit(Document(f"d{n}", "T", BEFORE + text), passage, 1.0))
    return build_prompt(tiny.bpe_tokenizer(), "q", hits)


def decode(tokens: Sequence[int]) -> str:
    return str(tiny.bpe_tokenizer().decode(list(tokens)))


def drafted(prompt: Prompt, hit: int, first: int, count: int, last: int) -> Step:
    """Return a step that accepted `count` tokens of a passage and then emitted `last`."""
    start = next(span[0] for span in prompt.spans if span[2] == hit) + first
    tokens = prompt.token_ids[start : start + count]
    tree = DraftTree.chain(tokens, "context", origin=[(hit, first + i) for i in range(count)])
    return Step(tree, tuple(range(count)), (*tokens, last))


def plain(text: str) -> Step:
    tokens = tiny.bpe_tokenizer()(text)["input_ids"]
    return Step(DraftTree.empty(), (), tuple(tokens))


def answer_of(steps: Sequence[Step]) -> str:
    return decode([token for step in steps for token in step.tokens])


def check(answer: str, prompt: Prompt, result: Sequence[Citation]) -> None:
    texts = {hit.document.name: hit.document.text for hit in prompt.hits}
    end = 0
    for citation in result:
        quoted = answer[citation.answer_start : citation.answer_end]
        text = texts[citation.document]
        cited = text[citation.start : citation.end].replace("\xad", "")
        assert quoted.split() == cited.split() != []
        assert prompt.hits[citation.passage - 1].document.name == citation.document
        assert not cuts_word(answer, citation.answer_start)
        assert not cuts_word(answer, citation.answer_end)
        assert citation.answer_start >= end
        end = citation.answer_end


def test_a_sentence_of_accepted_drafts_is_cited() -> None:
    prompt = prompt_of([CAT, FOX])
    start, end, _, _ = prompt.spans[1]
    inner = drafted(prompt, 1, 3, 20, prompt.token_ids[start + 23])
    around = [prompt.token_ids[start : start + 3], prompt.token_ids[start + 24 : end]]
    first, last = (plain(decode(tokens)) for tokens in around)
    steps = [plain(" so "), first, inner, last, plain(f" {CAT}")]
    answer = answer_of(steps)
    result = cite(answer, prompt, steps)
    check(answer, prompt, result)
    assert [(c.document, c.matched_by) for c in result] == [("d1", "draft"), ("d0", "match")]
    assert answer[result[0].answer_start : result[0].answer_end] == FOX
    # The same text without a draft has the same citations, by matching.
    undrafted = cite(answer, prompt, [plain(answer)])
    assert [replace(c, matched_by="match") for c in result] == undrafted


LIST = "-n  Do not print the\ntrailing newline.\n\n2. Wait for the\nsecond pump.\n\nYes, it may."


@pytest.mark.parametrize(
    ("passage", "answer", "quoted"),
    [
        (FOX, f"It says: {FOX[:-1]}, and no more.", [FOX[:-1]]),
        (FOX, "It says: quick brown fox jumps over the lazy dog near", []),  # a part of a sentence
        (f"{FOX} {CAT}", f"{FOX} A small grey cat sleeps", [FOX]),
        (f"{FOX} {CAT}", f"So: {FOX} {CAT}", [f"{FOX} {CAT}"]),
        ("Do a b c d not e. Go f g h i j.", "Do a b c d e. Go f g h i j", ["Go f g h i j"]),
        (LIST, "Print: Do not print the trailing newline", ["Do not print the trailing newline"]),
        (LIST, "So: Wait for the second pump.", ["Wait for the second pump."]),
        (LIST, "So for the second pump.", []),
        (LIST, "Yes, it may.", []),  # too few words
        ("Yes. " + FOX.replace("row", "ro\xadw"), f"So: {FOX}", [FOX]),
        (".NET runs on pumps.", "So .NET runs on pumps.", [".NET runs on pumps."]),
        ("法国的首都是巴黎。", "答案是法国的首都是巴黎。", ["法国的首都是巴黎。"]),
        ("नई दिल्ली।", "नई दिल्ली।", []),
    ],
)
def test_a_whole_sentence_is_a_citation(passage: str, answer: str, quoted: list[str]) -> None:
    prompt = prompt_of([passage])
    result = cite(answer, prompt, [plain(answer)])
    check(answer, prompt, result)
    assert [answer[c.answer_start : c.answer_end] for c in result] == quoted


@pytest.mark.parametrize(
    ("text", "cuts"),
    [("ab c", [1]), ("don't", [1, 2, 3, 4]), ("é_1", [1, 2]), ("नई", [1])]
    + [(text, []) for text in ("a 'b'", "'s", "x' y", "巴黎")],
)
def test_cuts_within_words(text: str, cuts: list[int]) -> None:
    assert [place for place in range(len(text) + 1) if cuts_word(text, place)] == cuts


CHUNKS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 60))
    | st.text(alphabet="ab .é", max_size=8),
    max_size=6,
)


@given(CHUNKS, st.booleans())
def test_every_citation_is_verbatim(chunks: list[tuple[int, int, int] | str], draft: bool) -> None:
    texts = [FOX, CAT]
    prompt = prompt_of(texts)
    steps: list[Step] = []
    for piece in chunks:
        if isinstance(piece, str):
            steps.append(plain(piece))
        elif draft:
            start, end, _, _ = prompt.spans[piece[0]]
            first = piece[1] % (end - start)
            steps.append(drafted(prompt, piece[0], first, min(piece[2], end - start - first), 7))
        else:
            steps.append(plain(texts[piece[0]][piece[1] : piece[1] + piece[2]]))
    answer = answer_of(steps)
    check(answer, prompt, cite(answer, prompt, steps))


@given(st.text(alphabet="ab c.", max_size=60), st.text(alphabet="ab c.", max_size=60))
def test_citations_of_repetitive_texts_are_verbatim(text: str, answer: str) -> None:
    prompt = prompt_of([(text.strip() or "x"), "a b c a b c a b c"])
    check(answer, prompt, cite(answer, prompt, [plain(answer)]))
