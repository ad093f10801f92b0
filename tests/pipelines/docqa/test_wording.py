"""How questions are put: the ways by name, templates, and what is read out of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines import DocQA
from ragspec.pipelines.docqa.prompt import build_prompt
from ragspec.pipelines.docqa.template import WORDINGS, PromptTemplate, find_template
from tests.pipelines.docqa.test_docqa import SENTENCE, ScriptedEngine
from tests.pipelines.docqa.test_prompt import TEXTS, bpe, check_spans, hits_of

OF_MODEL = (
    "Use this:\n{% for p in passages %}<{{ p.number }} {{ p.title }}>\n{{ p.text }}\n{% endfor %}"
    "Q {{ question }}"
)


@pytest.mark.parametrize("name", list(WORDINGS))
@pytest.mark.parametrize("chat", [False, True])
def test_every_template_shows_the_passages_and_the_question(name: str, chat: bool) -> None:
    tokenizer = bpe(chat)
    prompt = build_prompt(tokenizer, "What is it?", hits_of(TEXTS), template=WORDINGS[name])
    check_spans(prompt, tokenizer)
    assert len(prompt.spans) == 3
    assert "Question: What is it?" in prompt.text
    assert (WORDINGS[name].instruction in prompt.text) is chat
    assert prompt.text.endswith(WORDINGS[name].opening) is not chat
    assert bool(prompt.layout) is (name == "evidence"), "only two lines have a layout to draft"


@pytest.mark.parametrize("chat", [False, True])
def test_a_template_writes_the_prompt_and_its_passages_are_detected(
    chat: bool, tmp_path: Path
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OF_MODEL, encoding="utf-8")
    tokenizer = bpe(chat)
    prompt = build_prompt(tokenizer, "What?", hits_of(TEXTS), template=find_template(path))
    body = "".join(f"<{k} Title>\n{text}\n" for k, text in enumerate(TEXTS, 1))
    assert f"Use this:\n{body}Q What?" in prompt.text
    assert prompt.text.startswith("Use this") is not chat
    check_spans(prompt, tokenizer)
    assert len(prompt.spans) == 3


def test_a_question_cannot_be_a_template() -> None:
    current = PromptTemplate("local", template="{{ question }}")
    assert current.write(bpe(), "{{ passages }}", []) == "{{ passages }}"


@pytest.mark.parametrize("source", ["{{ nothing }}", "{% for %}", "{{ ''.__class__.mro() }}"])
def test_a_template_that_cannot_be_filled_is_refused(source: str) -> None:
    with pytest.raises(InputError, match=r"own\.jinja cannot be filled"):
        PromptTemplate("own.jinja", template=source).write(bpe(), "What?", [("Title", "Text.")])


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'quote'"):
        find_template("qoute")
    with pytest.raises(InputError, match=r"missing\.jinja cannot be read"):
        find_template("missing.jinja")
    (tmp_path / "latin").write_bytes(b"\xff")
    for path in (tmp_path / "latin", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            find_template(path)


def test_a_system_text_comes_first_and_needs_a_chat_template() -> None:
    tokenizer = bpe(chat=True)
    text = find_template("answer", "Be brief.").write(tokenizer, "What?", [("Title", "Text.")])
    assert text.index("Be brief.") < text.index("Title")
    with pytest.raises(InputError, match="without a chat template"):
        find_template("answer", "Be brief.").write(bpe(), "What?", [])
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(InputError, match="no system turn"):
        find_template("answer", "Be brief.").write(tokenizer, "What?", [])


@pytest.mark.parametrize(
    ("name", "text", "evidence", "short"),
    [
        ("quote", " [2] A sentence.", "A sentence.", ""),
        ("quote", "Evidence: A sentence.\n", "A sentence.", ""),
        ("quote", "", "", ""),
        ("answer", "It is a tree [1].", "", ""),
    ],
)
def test_parts_of_an_answer(name: str, text: str, evidence: str, short: str) -> None:
    result = WORDINGS[name].parts(text)
    assert [text[slice(*span)] if span else "" for span in result] == [evidence, short]


def test_an_answer_says_whether_it_is_supported_and_whether_it_was_cut(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Drafts\n\n{SENTENCE}\n")
    for script, supported in ((f" [1] {SENTENCE}", True), ("Nobody knows.", False)):
        engine: Any = ScriptedEngine(script)
        qa = DocQA.from_documents(tmp_path, engine=engine, embedder=None)
        answer = qa.ask("What does the draft model propose?", prompt="quote")
        assert answer.supported is supported and not answer.cut
        assert answer.to_dict()["supported"] is supported
        assert engine.calls[0]["stop"] == WORDINGS["quote"].stop
