"""How far the documents support an answer, and answers of the documents' sentences alone."""

from typing import Any

import pytest

from ragspec.pipelines.answering.answerer import Answerer
from ragspec.pipelines.answering.citations import says
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.answering.iterative import IterativeRag
from ragspec.retrievers import Document, PassageIndex
from tests.pipelines.answering.test_docqa import ScriptedEngine

TEXTS = (
    "E07 means that the pressure is too low.",
    "The pump must be carried upright by two people.",
    "The filter must not be washed with hot water.",
    "The warranty of the pump ends after three years. Its colour is red.",
)
WARRANTY = "After how many years does the warranty of the pump end?"


def pump_qa(**settings: Any) -> DocQA:
    documents = [Document(f"{n}.md", "Pump", text) for n, text in enumerate(TEXTS)]
    return DocQA(PassageIndex.build(documents), **settings)


@pytest.mark.parametrize(
    ("question", "script", "support"),
    [
        (WARRANTY, "Ending after three.", "supported"),
        (WARRANTY, "Ending after five.", "unsupported"),
        ("What does E07 mean?", f'E07 is a faulty pump: "{TEXTS[1]}"', "quoted"),
        ("What does E07 mean?", "E07 means that the pressure is too high.", "unsupported"),
        ("What does E07 mean?", TEXTS[0], "quoted"),
        ("What does E07 mean?", "E07 means that the pump must be carried", "unsupported"),
        ("May the filter be washed with hot water?", "Yes, the filter must be.", "unsupported"),
        ("After how many years does the warranty end?", 'The warranty ends "five".', "unsupported"),
        ("When does the warranty of the pump end?", "The warranty is red.", "unsupported"),
        ("Who made it?", "", "unsupported"),
    ],
)
def test_support_of_an_answer(question: str, script: str, support: str) -> None:
    engine: Any = ScriptedEngine(script)
    answer = pump_qa(engine=engine, prompt="answer").ask(question, refuse=False)
    assert answer.support == support
    assert (answer.supporting is not None) is (support == "supported")
    assert answer.to_dict()["support"] == support
    assert answer.to_dict()["sentences"][0]["text"] in TEXTS


@pytest.mark.parametrize(
    ("claim", "sentence", "result"),
    [
        ("It weighs 38 kg", "The pump weighs 38 kg.", True),
        ("It weighs 3 kg", "The pump weighs 38 kg.", False),
        ("It weighs 38 kg", "The pump does not weigh 38 kg.", False),
        ("It does not weigh 38 kg", "The pump weighs 38 kg.", False),
        ("It weighs 1,038 kg", "The pump weighs 38 kg in 1, and 1 kg in 038.", False),
        ("", "The pump weighs 38 kg.", False),
        ("the pump", "The pump weighs 38 kg.", False),  # the question's words alone
        ("hepatitis A", "It is against hepatitis B.", False),
        ("hepatitis a", "It is against hepatitis b.", False),
        ("hepatitis a", "It is against hepatitis A.", True),
        ("It took off.", "At 9 it took off the runway.", True),
        ("Drive to Rome", "On Monday drive out to Rome.", True),
        ("5 degrees", "It has minus 5 degrees.", False),
        ("minus 5 degrees", "It has -5 degrees.", True),
        ("It is $5.", "It is minus $5.", False),
        ("It costs < $5", "It costs > $5.", False),
        ("It costs < 5 dollars", "It costs < $5.", True),
        ("A winner is Team T", "The winner is Team T.", True),
        ("18 degrees", "It has -18 degrees.", False),
        ("-18 degrees", "It has −18 degrees in no. 5.", True),
        ("15 kg", "It weighs 10–15 kg.", True),
        ("10^6 units", "It has 10^-6 units.", False),
        ("-$2 million", "It costs $2 million.", False),
        ("$50", "It costs €50.", False),
        ("50 dollars", "It costs $50.", True),
        ("It has a 5-year limit", "It has no 5-year limit.", False),
        ("1500 euros", "It costs 1,500 €.", True),
        ("It costs ₹500", "It costs $500.", False),
        ("From 6 a.m. to 9 a.m.", "It runs from 6 a.m. to 9 p.m.", False),
        ("At 9 am", "It starts at 9 A.M.", True),
        ("It is refundable", "It is non-refundable.", False),
        ("It weighs < 5 mg", "It weighs > 5 mg.", False),
        ("It weighs 5 mg", "It weighs >= 5 mg.", False),
        ("Für Gruppen", "Er gilt nicht für Gruppen.", False),
        ("Voor groepen", "Hij geldt niet voor groepen.", False),
        ("Il est permis", "Il n'est pas permis.", False),
        ("Курить разрешено", "Курить не разрешено.", False),
        ("Dla grup", "Nie obowiązuje dla grup.", False),
    ],
)
def test_a_sentence_states_a_claim(claim: str, sentence: str, result: bool) -> None:
    assert says(claim, sentence, "How heavy is the pump?") is result


def test_sentences_are_known_before_the_model_writes() -> None:
    engine: Any = ScriptedEngine("x")
    order: list[str] = []
    answer = pump_qa(engine=engine).ask(
        "What does E07 mean?",
        stream=order.append,
        on_search=lambda result: order.append(result.sentences[0].text),
    )
    assert order[:2] == [TEXTS[0], "x"] and answer.sentences[0].text == TEXTS[0]


def test_an_extract_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Answerer, "engine", property(lambda self: pytest.fail("the model was called"))
    )
    qa = pump_qa(prompt="extract")
    answer = qa.ask("How long is the warranty of the pump?")
    assert answer.text.split("\n")[0] == TEXTS[3] and answer.support == "quoted"
    for cited in answer.citations:
        assert answer.text[cited.answer_start : cited.answer_end] == TEXTS[int(cited.document[0])]
    assert answer.to_dict()["label"] and answer.generation.finish_reason == "extracted"
    assert qa.ask("Who won the cup?").refused
    bare: Any = ScriptedEngine("x")
    rag = IterativeRag(bare, lambda query: [(TEXTS[3], 1.0, {})], prompt="extract")
    assert rag.ask("How long is the warranty of the pump?").text == TEXTS[3]
