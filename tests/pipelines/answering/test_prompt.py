"""Prompts: templates by name or in Jinja, spans of passages, and the parts of answers."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.engine.prompts import ANCHOR
from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines import Prompt, build_prompt
from ragspec.pipelines.answering.template import TEMPLATES, PromptTemplate, find_template
from ragspec.retrievers import Document, Hit, Passage
from ragspec.trees.draft_tree import LAYOUT
from tests.support import tiny

TEXTS = ["The first passage, with a naïve word.", "first", "A third one.\nIn two lines."]


def hits_of(texts: list[str], title: str = "Title") -> list[Hit]:
    return [
        Hit(Document(f"d{n}", title, "xx " + text), Passage(n, 3, 3 + len(text), title, text), 1.0)
        for n, text in enumerate(texts)
    ]


def bpe(chat: bool = False) -> Any:
    tokenizer = copy.deepcopy(tiny.bpe_tokenizer())
    if chat:
        tokenizer.chat_template = tiny.tokenizer(chat=True).chat_template
    return tokenizer


def check_spans(prompt: Prompt, tokenizer: Any) -> None:
    for (start, end, hit, offset), chars in zip(prompt.spans, prompt.chars, strict=True):
        assert offset == 0
        assert len(chars) == end - start
        text = prompt.hits[hit].passage.text
        if text.isascii():
            for token, (a, b) in zip(prompt.token_ids[start:end], chars, strict=True):
                assert tokenizer.decode([token]) == text[a:b]
        read = tokenizer.decode(list(prompt.token_ids[start:end]))
        assert read == text[chars[0][0] : chars[-1][1]]


@pytest.mark.parametrize("name", ["evidence", "quote", "answer"])
@pytest.mark.parametrize("chat", [False, True])
def test_templates_write_the_passages_and_the_question(name: str, chat: bool) -> None:
    tokenizer, template = bpe(chat), TEMPLATES[name]
    prompt = build_prompt(tokenizer, "What  is\nit?", hits_of(TEXTS), template=template)
    check_spans(prompt, tokenizer)
    assert [span[2] for span in prompt.spans] == [0, 1, 2]
    ends = [(chars[0][0], chars[-1][1]) for chars in prompt.chars]
    assert ends == [(0, len(text)) for text in TEXTS]
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
    assert "Question: What is it?" in prompt.text and ("<user>" in prompt.text) is chat
    assert (template.instruction in prompt.text) is chat
    assert prompt.text.endswith(template.opening) is not chat
    assert bool(prompt.layout) is (name == "evidence"), "only two lines have a layout to draft"


def test_the_default_prompt_has_the_training_format_of_the_starter_model() -> None:
    assert build_prompt(bpe(), "What?", hits_of(["One.", "Two."], "A\ntitle")).text == (
        "Context:\n[1] A title\nOne.\n\n[2] A title\nTwo.\n\nQuestion: What?\nEvidence:"
    )


@pytest.mark.parametrize("chat", [False, True])
def test_better_passages_have_more_copies_of_their_label(chat: bool) -> None:
    tokenizer = bpe(chat)
    prompt = build_prompt(tokenizer, "What?", hits_of(["One.", "Two."]))
    assert {text.document for text in prompt.layout} == {LAYOUT}
    anchor = tokenizer.decode(list(prompt.token_ids[-ANCHOR:]))
    written = [tokenizer.decode(list(text.tokens)) for text in prompt.layout]
    opening = "Evidence:" if chat else ""
    assert [text for text in written if text.startswith(anchor)] == [
        f"{anchor}{opening} [{k}]" for k in (1, 1, 2)
    ]
    assert ".\nAnswer:" in written


@given(st.lists(st.text(alphabet="ab c.\né日", min_size=1, max_size=30), min_size=1, max_size=4))
def test_spans_hold_for_any_passages(texts: list[str]) -> None:
    tokenizer = tiny.bpe_tokenizer()
    prompt = build_prompt(tokenizer, "q", hits_of([text.strip() or "x" for text in texts]))
    for (start, end, hit, _), chars in zip(prompt.spans, prompt.chars, strict=True):
        display = prompt.hits[hit].passage.text
        assert tokenizer.decode(list(prompt.token_ids[start:end])).strip("\ufffd") in display
        assert 0 <= chars[0][0] <= chars[-1][1] <= len(display)


def test_special_tokens_in_documents_stay_text() -> None:
    tokenizer = bpe()
    text = f"before {tiny.EOS} after"
    prompt = build_prompt(tokenizer, f"q {tiny.EOS}", hits_of([text, "Plain."], tiny.EOS))
    assert tokenizer.eos_token_id not in prompt.token_ids
    assert [span[2] for span in prompt.spans] == [0, 1]


def test_tokenizer_without_offsets_gives_no_spans() -> None:
    class Slow:
        all_special_tokens: tuple[str, ...] = ()

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            assert not options.get("return_offsets_mapping")
            return {"input_ids": list(text.encode())}

    prompt = build_prompt(Slow(), "q", hits_of(["One."]))
    assert prompt.spans == () and prompt.chars == ()


def test_a_prompt_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        build_prompt(None, "q", hits_of(TEXTS))


@pytest.mark.parametrize("chat", [False, True])
def test_a_hundred_passages_are_fitted_in_four_attempts(chat: bool) -> None:
    tokenizer, written = bpe(chat), []
    hits = hits_of([f"Passage {k} holds some words of its own." for k in range(100)])

    class Counting(PromptTemplate):
        def write(self, *inputs: Any) -> str:
            written.append(len(inputs[2]))
            return super().write(*inputs)

    plain = TEMPLATES["evidence"]
    counting = Counting(plain.name, plain.instruction, plain.opening, two_lines=True)
    whole = len(build_prompt(tokenizer, "What?", hits, template=counting).token_ids)
    for room in (whole, whole - 1, whole // 2, whole // 7, 1):
        written.clear()
        prompt = build_prompt(tokenizer, "What?", hits, room=room, template=counting)
        count = len(prompt.hits)
        assert len(prompt.token_ids) <= room or count == 1
        assert prompt.hits == tuple(hits[:count]) and prompt.left_out == tuple(hits[count:])
        if prompt.left_out and count > 1:  # one more would not fit
            more = build_prompt(tokenizer, "What?", hits[: count + 1], template=counting)
            assert len(more.token_ids) > room
            written.pop()
        assert len(written) <= 4


JINJA = (
    "Use this:\n{% for p in passages %}<{{ p.number }} {{ p.title }}>\n{{ p.text }}\n{% endfor %}"
    "Q {{ question }}"
)


@pytest.mark.parametrize("chat", [False, True])
def test_passages_are_located_in_the_prompt_of_a_jinja_file(chat: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(JINJA, encoding="utf-8")
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


UNFILLED = "{{ nothing }}", "{{ ''.__class__.mro() }}", "{{ question + 5 }}", "{{ 1 / 0 }}"


@pytest.mark.parametrize("source", [*UNFILLED, "{% for %}", "{{ 9. ** 999 }}", "{{ 1 | nothing }}"])
def test_a_template_that_cannot_be_filled_is_refused(source: str) -> None:
    with pytest.raises(
        InputError, match=r"own\.jinja cannot be filled: [^.]+([.][^.]+)*\. Expected"
    ):
        PromptTemplate("own.jinja", template=source).write(bpe(), "What?", [("Title", "Text.")])


def test_invalid_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'quote'"):
        find_template("qoute")
    with pytest.raises(InputError, match=r"missing\.jinja cannot be read"):
        find_template("missing.jinja")
    (tmp_path / "latin").write_bytes(b"\xff")
    for path in (tmp_path / "latin", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            find_template(path)


def test_a_system_message_comes_first_and_needs_a_chat_template() -> None:
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
        ("evidence", " [2] A sentence.\nAnswer: word", "A sentence.", "word"),
        ("evidence", "Evidence: [1] A.\nAnswer: b\n", "A.", "b"),
        ("evidence", "[1] Two\nlines.\n\nAnswer: two\nlines", "Two\nlines.", "two\nlines"),
        ("evidence", "Answer: b", "", "b"),
        ("evidence", " [1] A.\nAnswer:", "A.", ""),
        ("evidence", " [1]\n Answer: b", "", "b"),
        ("evidence", "no parts at all", "", ""),
        ("evidence", "\n" * 9999 + "no parts at all", "", ""),
        ("evidence", "", "", ""),
        ("quote", " [2] A sentence.", "A sentence.", ""),
        ("quote", "Evidence: A sentence.\n", "A sentence.", ""),
        ("quote", "", "", ""),
        ("answer", "It is a tree [1].", "", ""),
    ],
)
def test_parts_of_an_answer(name: str, text: str, evidence: str, short: str) -> None:
    assert TEMPLATES[name].parts(text) == (evidence, short)
