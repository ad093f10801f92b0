"""The writer of all hosts: conversations as prompts, documents as drafts, one engine."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ragspec import Engine, Sampling
from ragspec.adapters.passages import facts_of, hits_of
from ragspec.adapters.writer import HostWriter
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.openai import read_settings
from ragspec.retrievers.search.sentences import rank_sentences
from tests.support import chatting, tiny

REQUESTS = [{"role": "user", "content": "Name three rivers."}]
TURN = ("user", "Name three rivers.")


def request(**settings: Any) -> Any:
    return read_settings({"max_tokens": chatting.NEW}, settings)


@pytest.mark.parametrize("drafter", [None, "context", "recycling"])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "seed": 5}])
def test_texts_are_those_of_plain_decoding(drafter: Any, sampled: dict[str, Any]) -> None:
    writer = HostWriter(engine=chatting.engine(drafter))
    job = writer.chat(REQUESTS, request(**sampled))
    expected = chatting.alone(TURN, sampling=Sampling(**sampled))
    states = list(writer.stream(job))
    assert "".join(each.delta for each in states) == states[-1].text == expected.text
    (whole,) = writer.write(job)
    assert whole.text == expected.text
    for facts in (whole.facts, states[-1].facts):
        assert facts["usage"]["completion_tokens"] == len(expected.tokens)


def test_samples_are_those_of_the_engine() -> None:
    several = {"temperature": 1.0, "seed": 3, "n": 3}
    writer = HostWriter(engine=chatting.engine())
    result = writer.write(writer.chat(REQUESTS, request(**several)))
    expected = chatting.alone(TURN, sampling=Sampling(temperature=1.0, seed=3, n=3))
    assert [text.text for text in result] == [text.text for text in expected]
    assert [text.facts["index"] for text in result] == [0, 1, 2]
    assert len({text.text for text in result}) == 3


def test_documents_outside_the_prompt_are_drafted_from_and_cited() -> None:
    """The document is the model's answer, so that nearly all drafts are accepted."""
    writer = HostWriter(engine=Engine(tiny.model(), tiny.tokenizer(chat=True), "context", budget=8))
    plain = writer.write(writer.chat(REQUESTS, request(ignore_eos=True)))[0]
    said = [(plain.text, 1.0, {"source": "answer.txt"})]
    text = writer.write(writer.chat(REQUESTS, request(ignore_eos=True, documents=said)))[0]
    facts = text.facts
    assert text.text == plain.text
    assert [cited["document"] for cited in facts["citations"]] == ["answer.txt"]
    assert facts["support"] == "quoted" and facts["sentences"]
    other = request(ignore_eos=True, documents=["nothing of the kind 0123456789"])
    least = writer.write(writer.chat(REQUESTS, other))[0]
    assert least.text == plain.text and least.facts["support"] == "unsupported"
    assert facts["forwards"] < least.facts["forwards"] <= plain.facts["forwards"]


def test_documents_of_the_prompt_are_its_spans_and_others_are_texts() -> None:
    writer = HostWriter(engine=chatting.engine())
    turn = {"role": "user", "content": "Read this:\nRhine and Po.\nName rivers."}
    job = writer.chat([turn], request(documents=["Rhine and Po.", "Elbe, Oder."]))
    assert [span[2] for span in job.prompt.spans] == [0]
    start, end = job.prompt.spans[0][:2]
    assert writer.engine.tokenizer.decode(job.prompt.token_ids[start:end]) == "Rhine and Po."
    assert [text.document for text in job.options["texts"] or ()] == [1]


def test_tool_results_that_the_template_leaves_out_are_drafted_from() -> None:
    record = {"role": "tool", "content": "the Rhine is long"}
    display = HostWriter(engine=chatting.engine()).chat([*REQUESTS, record], request())
    assert "the Rhine is long" in display.prompt.text
    assert not display.options["texts"]
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    hidden = HostWriter(engine=chatting.engine(), chat_template=template).chat(
        [*REQUESTS, record], request()
    )
    assert hidden.prompt.text == "Name three rivers."
    assert [text.document for text in hidden.options["texts"] or ()] == [-1]


def test_a_special_token_in_a_message_stays_plain_text() -> None:
    writer = HostWriter(engine=chatting.engine())
    end = writer.engine.tokenizer.eos_token
    job = writer.chat([{"role": "user", "content": f"a{end}b"}], request())
    assert writer.engine.tokenizer.eos_token_id not in job.prompt.token_ids


def test_arguments_of_tool_calls_are_mappings_in_the_template() -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    job = HostWriter(engine=chatting.engine(), chat_template=template).chat([message], request())
    assert job.prompt.text == "Ulm"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user", "content": 3}], "expected a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "reads text"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        HostWriter(engine=chatting.engine()).chat(messages, request())


def test_a_model_without_a_template_is_refused_unless_one_is_passed() -> None:
    plain = Engine(tiny.model(), tiny.tokenizer(), None)
    with pytest.raises(UnsupportedModelError, match="chat_template="):
        HostWriter(engine=plain).chat(REQUESTS, request())
    writer = HostWriter(engine=plain, chat_template="{{ messages[0].content }}")
    assert writer.chat(REQUESTS, request()).prompt.text == "Name three rivers."
    with pytest.raises(InputError, match="template"):
        HostWriter(engine=plain, chat_template="{{ raise_exception('no') }}").chat(
            REQUESTS, request()
        )


def test_contradicting_arguments_are_refused() -> None:
    engine = chatting.engine()
    wrong: dict[str, dict[str, Any]] = {
        "got neither of model and engine": {},
        "got both of model and engine": {"model": "starter", "engine": engine},
        "expected an Engine": {"engine": engine.target},
        "max_batch_size is -1": {"model": "starter", "max_batch_size": -1},
        "got drafter with an engine": {"engine": engine, "drafter": "context"},
        "has no tokenizer": {"engine": Engine(tiny.model(), None, None)},
        "got max_batch_size with an engine": {"engine": engine, "max_batch_size": 2},
    }
    for message, inputs in wrong.items():
        with pytest.raises(InputError, match=message):
            HostWriter(**inputs)
    assert HostWriter(engine=engine, drafter="auto").engine is engine
    assert HostWriter("starter", drafter=None).engine.drafter is None


def test_settings_by_the_names_of_hosts() -> None:
    result = read_settings(
        {"max_tokens": 5, "temperature": 0.5, "stop": ["a"]},
        {"max_completion_tokens": 7, "temperature": None, "top_logprobs": 2},
        stop="b",
    )
    assert result.sampling.temperature == 0.5
    assert result.options == {"max_new_tokens": 7, "logprobs": 2, "stop": ["a", "b"]}
    top: dict[str, object] = {"top_logprobs": 3}
    on: dict[str, object] = {"logprobs": True}
    for settings in ([top | on], [on | top], [top, on], [on, top], [{"logprobs": False}, top]):
        assert read_settings(*settings).options == {"logprobs": 3}
    for last in ({"logprobs": False}, {"top_logprobs": 0, "logprobs": False}):
        assert read_settings(top, last).options == {"logprobs": False}


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"temperatur": 1}, "Did you mean 'temperature'"),
        ({"documents": "one text"}, "documents is"),
        ({"tenant": 3}, "tenant is"),
        ({"stop": 3}, "stop is"),
        ({"top_logprobs": 3, "logprobs": False}, "got logprobs=False and top_logprobs=3"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "got max_tokens=3 and max_new_tokens=4"),
        (5, "got the settings 5; expected a mapping"),
    ],
)
def test_invalid_settings_are_refused(inputs: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        read_settings(inputs)


def test_log_probabilities_have_the_usual_names() -> None:
    writer = HostWriter(engine=chatting.engine())
    job = writer.chat(REQUESTS, request(top_logprobs=2))
    facts = writer.write(job)[0].facts
    message = facts["logprobs"]["content"]
    assert len(message) == facts["usage"]["completion_tokens"]
    assert [len(each["top_logprobs"]) for each in message] == [2] * len(message)
    assert message[0]["logprob"] == message[0]["top_logprobs"][0]["logprob"]  # greedy


def test_passages_keep_their_place_as_documents_of_a_host() -> None:
    hit = chatting.index().search("Where does an oak stand?", 1)[0]
    back = hits_of([(hit.passage.text, hit.score, facts_of(hit))])[0]
    assert back.document.name == hit.document.name
    assert (back.passage.start, back.passage.end) == (hit.passage.start, hit.passage.end)
    text = "On\n\nAn oak stands.\n\nIt is old."
    for unit, pages in (("line", ()), ("line", (0, 4)), ("page", (0, 0, 19)), ("sheet", (0, 19))):
        passage = replace(hit.passage, start=4, end=len(text), text=text[4:])
        document = replace(hit.document, text=text, pages=pages, unit=unit)
        facts = json.loads(json.dumps(facts_of(replace(hit, document=document, passage=passage))))
        (back,) = hits_of([(text[4:], 1.0, facts)])
        for at in (4, 5, 20):
            both = {
                (each.place(at, 0), each.place(at, len(text)), each.page_of(at))
                for each in (document, back.document)
            }
            assert len(both) == 1
        assert rank_sentences("oak?", [back])[0].text == "An oak stands."
    places = ("line 99", None), ("page 1", 5), (7, None), ("characters 9 to 12", None)
    for wrong, breaks in places:
        facts = {"start": 10, "end": 13, "place": wrong, "breaks": breaks}
        (back,) = hits_of([("abc", 1.0, facts)])
        assert back.document.place(10, 13) == "characters 10 to 13"
    moved = hits_of([("abc", 1.0, {"start": 10, "end": 13}), ("abc", 1.0, {"start": 1, "end": 9})])
    assert [each.passage.start for each in moved] == [10, 0]
