"""The sentences that answer a question: their ends, their order, and refusals."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ragspec.pipelines.answering.docqa import DocQA
from ragspec.retrievers.search import dense, sentences
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.passages import split_document
from ragspec.retrievers.search.sentences import rank_sentences, statements
from ragspec.retrievers.search.text import sentence_spans
from tests.support.toy_pdf import pdf_of

MANUAL = """# Pump manual

## Faults
E07 means that the pressure is too low. Close the valve.

E12 means that the motor is too hot.

## Transport
Two people carry the pump upright, as a tilted one leaks oil into the motor.

## Warranty
The warranty ends after three years.
"""
STATEMENTS = [
    "E07 means that the pressure is too low. Close the valve.",
    "E12 means that the motor is too hot.",
    "Two people carry the pump upright, as a tilted one leaks oil into the motor.",
    "The warranty ends after three years.",
]
TITLES = ["# It moves to May", "It is.", "# May it. Be red"]
CELLS = [
    {"cell_type": "markdown", "source": each} for each in ("# It moves to May", "It is", "It was")
]


def hits_of(document: Document) -> list[Hit]:
    return [Hit(document, passage, 1.0) for passage in split_document(document)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.md", MANUAL, STATEMENTS),
        ("a.md", "## 3. Is it #a? B ##\n\nIt is.\n\nC\n---\nIt was.", ["It is.", "It was."]),
        ("a.md", "It is.\n# May\nIt was.\n### B\nOh", ["It is.", "It was.", "Oh"]),
        ("a.rst", "Title\n=====\n\nIt is.", ["It is."]),
        ("a.html", "<h2>A <i>b</i><br>c</h2>It is.<h3>It</h3>is.", ["It is.", "is."]),
        ("a.1", ".TH A 1\n.SH NAME\nIt is.", ["It is."]),
        ("a.json", '{"question": "Is it?", "answer": "It is."}', ["answer: It is."]),
        ("a.json", '{"text": "It is.", "title": "It"}', ["text: It is.\ntitle: It"]),
        ("a.py", "x = 1\n\n\ndef f(port=8):\n    pass\n", ["x = 1", "def f(port=8):\n    pass"]),
        ("a.eml", "From: A\nSubject: B\n\nIt is.", ["From: A\nSubject: B\n\nIt is."]),
        ("a.pdf", pdf_of("It is.", "It was."), ["It is.", "It was."]),
        ("a.md", "# It moves to May\n\n# Oh my\n\nIt is.\n\n# May it. Be red", TITLES),
        ("a.ipynb", json.dumps({"cells": CELLS}), ["# It moves to May", "It is", "It was"]),
    ],
)
def test_statements_are_sentences_without_headings(
    tmp_path: Path, name: str, text: str | bytes, expected: list[str]
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    document = load_document(tmp_path / name)
    spans = [document.text[slice(*span)] for hit in hits_of(document) for span in statements(hit)]
    assert spans == expected


def test_a_long_table_is_cut_at_its_lines() -> None:
    rows = [f"part {n} | steel housing of the pump | price {n} euros | in stock" for n in range(12)]
    (hit,) = [*hits_of(Document("parts", "Parts", "\n".join(rows)))][:1]
    assert [hit.document.text[slice(*span)] for span in statements(hit)][3] == rows[3]


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What does E12 mean?", "E12 means"), ("How many people carry the pump?", "Two people")]
    + [("How long is the warranty?", "The warranty ends")],
)
def test_the_best_sentence_answers(tmp_path: Path, question: str, answer: str) -> None:
    (tmp_path / "pump.md").write_text(MANUAL)
    best = rank_sentences(question, hits_of(load_document(tmp_path / "pump.md")))
    assert len(best) == 3 and best[0].text.startswith(answer)
    assert best[0].place == f"line {len(MANUAL[: best[0].start].splitlines()) + 1}"
    assert best[0].alone.passage.text == best[0].text == best[0].to_dict()["text"]


@pytest.fixture(params=[dense.load_wordllama, lambda: None], ids=["wordllama", "bundled"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Score with the vectors of wordllama, or without that package."""
    monkeypatch.setattr(dense, "load_wordllama", request.param)
    sentences._judge.cache_clear()
    yield
    sentences._judge.cache_clear()


@pytest.mark.skipif(find_spec("wordllama") is None, reason="wordllama has no wheel here")
def test_words_of_similar_meaning_count() -> None:
    ends = ["The committee adjourns at once.", "The automobile halts at once."]
    years = ["Founded in 1989.", "In 1998."]
    for question, texts in (("How does the car stop?", ends), ("What was in 1998?", years)):
        hits = [hit for text in texts for hit in hits_of(Document("a", "", text))]
        assert rank_sentences(question, hits)[0].text == texts[1]
    assert "wordllama" not in sys.modules, "only its files are read"


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("unrelated", [0, 1, 200])
def test_unrelated_files_do_not_decide_whether_a_question_is_refused(unrelated: int) -> None:
    notes = [Document(f"{n}", f"Note {n}", "It lists trees.") for n in range(unrelated)]
    warranty = Document("warranty", "warranty", "The warranty ends after three years.")
    qa = DocQA(PassageIndex.build([warranty, *notes]))
    assert qa.search("How long is the warranty?").refused is None
    others = "Who won the cup?", "Which port does the server use?", "Wie alt ist der Hund?"
    for question in others:
        result = qa.search(question)
        assert result.refused is not None and "expected 1.00" in result.refused
        assert result.sentences, "the nearest are shown"


@pytest.mark.parametrize(
    ("text", "covered", "other"),
    [
        ("Гарантия на насос действует три года.", "Сколько длится гарантия насоса?", "Кто спит?"),
        ("水泵的保修期为三年。", "水泵的保修期多长?", "谁写了红楼梦?"),
        ("Билет в музей стоит сто.", "Сколько стоит билет в музей в 2024 году?", "Где iPhone?"),
        ("茶含有咖啡因。", "茶?", "水?"),
        ("The meeting is on March 5, 2024.", "Who is at the meeting on 2024-03-05?", "Who ate?"),
        ("ポンプの保証期間は三年です。", "ポンプの保証期間は?", "木星の衛星はいくつ?"),
        ("Our war\xadran\xadty is long.", "Who pays for the warranty repair?", "Who wrote it?"),
        ("The warranty ends after three years.", "What is it?", "👍 ?!"),  # no word at all
    ],
)
def test_questions_that_the_text_does_not_cover_are_refused(
    text: str, covered: str, other: str
) -> None:
    qa = DocQA(PassageIndex.build([Document("a", "", text)]))
    assert qa.search(covered).refused is None
    assert qa.search(other).refused is not None


@pytest.mark.parametrize(
    "polite",
    ["Hello, could you please tell me {}", "Please explain briefly: {} Thank you very much!", "{}"],
)
def test_politeness_and_capitals_do_not_change_the_score(polite: str) -> None:
    hits = hits_of(Document("a", "Opening hours", "The library opens at 9 on weekdays."))
    for question in ("When does the library open?", "Who feeds the hippos?"):
        scores = [rank_sentences(q, hits)[0].score for q in (question, polite.format(question))]
        assert scores[1] == scores[0]
        assert rank_sentences(question.upper(), hits)[0].score == pytest.approx(scores[0], abs=0.1)
    assert rank_sentences("Please?", hits)[0].score < 1, "politeness alone is searched"


def test_words_of_other_scripts_count_as_much_as_numbers_and_names() -> None:
    for question, *texts in (
        ("Сколько стоит ремонт экрана iPhone?", "iPhone на складе.", "Ремонт экрана стоит сто."),
        ("Что значит ошибка 1234577?", "Ошибка 1234501: нет воды.", "Ошибка 1234577: нет тока."),
        ("हिन्दी कौन बोलता है?", "वह अंग्रेज़ी बोलता है।", "हिंदी भारत बोलता है।"),
    ):
        hits = [hit for text in texts for hit in hits_of(Document("a", "", text))]
        assert rank_sentences(question, hits)[0].text == texts[1]


def test_sentences_of_chinese_are_as_short_as_others() -> None:
    text = "这台水泵的保修期从交货之日起为三年整。" * 3 + "请不要用热水清洗这台水泵的滤网部分。"
    assert len(list(statements(hits_of(Document("a", "", text))[0]))) == 2


@pytest.mark.parametrize("ranked", [True, False])
def test_rank_counts_only_for_search_results(ranked: bool) -> None:
    texts = [*["The pump is blue."] * 30, "The warranty of the pump ends after three years."]
    documents = [Document(f"{n}", "", f"{text} {n}.") for n, text in enumerate(texts)]
    hits = [hit for each in documents for hit in hits_of(each)]
    best = rank_sentences("How long is the warranty of the pump?", hits, ranked=ranked)[0]
    assert ("warranty" in best.text) is not ranked


def test_copies_are_returned_once() -> None:
    ends = "The warranty of the pump and of all of its parts ends after three years."
    texts = [ends] * 9 + [f"{ends} It covers the motor, the housing and the valves as well."] * 2
    qa = DocQA(PassageIndex.build([Document(f"{n}", "", text) for n, text in enumerate(texts)]))
    result = qa.search("How long is the warranty?")
    assert sorted(hit.passage.text for hit in result.hits) == [ends, texts[-1]]
    assert [sentence.text for sentence in result.sentences].count(ends) == 1


@pytest.mark.parametrize(
    "sentences",
    [
        ("Насос весит 38 кг.", "Два человека несут его."),
        ("Die Pumpe läuft.", "Übrigens: „Zwei tragen sie.“"),
        ("La bomba pesa 38 kg.", "¿Quién la lleva?"),
        ("पंप भारी है।", " दो लोग उठाते हैं।"),
        ("泵很重。", "两个人搬。", "泵说：“很重。”", "两个人搬？！", "泵。"),
        ("הוא הלך.", "היא באה."),
        ("هل ذهب؟", "قال د. علي: نعم.", "ثم عاد."),
        ("그는 2024. 5. 3. 서울에 갔다.", "그녀는 왔다."),
        (
            "Ab 3. Mai gilt Abs. 2 für max. 4 Mio. Euro.",
            "Der 2. Weltkrieg im Jahr 44 v. Chr. endet.",
        ),
        ("See No. 5, Vol. II, by Wu et al. (2020).", "I say no.", "I am 12.", "In 3 h he goes."),
        ("Load it with 5 kg max.", "The pump stops."),
        ("Mr. J. R. Hill, vs. Dr. Wu of the U.S. Army, lost.", "So did I.", "See Fig. 3."),
        ("I. M. Pei and Rep. K. He et al. left at 9 a.m. Monday.", "Approx. Five.", "Thm. 3 of A."),
        ("It was plan B.", "Then the U.S.", "The bus leaves at 9 a.m.", "It is.", "He ran 6 ft."),
        ("Es gibt z. B. Eis, i. d. R. Dr. h. c. Ö. Wu.", "Vgl. Abs. 2 vom Sport e. V.", "Er kam."),
        ("Роман А. С. Пушкина, т. е. г. Москва, и т. д.", "Он родился в 1990 г.", "Потом ушел."),
        ("Ł. Wu, Γ. Wu, p. ex. Wu, dott. Wu, tzv. Wu, o.a. Wu, F.eks. Wu.", "Q?", "A. The end."),
        ("Built in 1040.[6]", "Dr.[1] Wu left.^7", "Six.¹", "**Bold.**", "„Nein.“", "Wu u.a. Wu."),
        ("He saw Dir. Amm. Wu, ext. 10, apt. 5 (lit. Hut), a.k.a. Al, at N°. 5 up.", "Dir. You."),
        ("Škola im. Wu, np. sv. Wu o godz. 5.", "На ул. Мира, кв. 2 (див. Рис).", "5 км.", "3 м."),
        ("Drs. Wu, séc. V, mit max. Leistung, i.p.v. Bo.", "5 km.", "3 (us.)", "It."),
        ("**1.** Use mpz_t.[note 2]", "It is __so__.", 'Of Wu Inc. ("Wu").', "ஆம்.", "இல்லை."),
        ("看《摔跤吧！爸爸》好吗？", "两个．", "彼は「待って！行く。」と言う。", "温度は3．5｡"),
    ],
)
def test_sentences_end_in_every_script(sentences: tuple[str, ...]) -> None:
    text = "".join(each if each[0] in " 两泵प" else f"{each} " for each in sentences).strip()
    spans = [text[slice(*span)] for span in sentence_spans(text, 0, len(text))]
    assert spans == [each.strip() for each in sentences]


def test_items_of_lists_are_sentences_with_their_numbers() -> None:
    items = ["A\n| b: c; d:", "1. Go.", "12. Is.", "  3. It (e.g. Now).", "  10. Up", "- On"]
    items += ["b. C.", "* 5.", "|x|", "A\tB", "A: b; C: d; 6"]  # rows of tables
    text = "\n".join(items)
    assert [text[a:b] for a, b in sentence_spans(text, 0, len(text))] == [*map(str.strip, items)]
