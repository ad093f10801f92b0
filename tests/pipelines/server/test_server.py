"""The routes: texts are those of the engine, in OpenAI's forms."""

import gzip
import json
from typing import Any

import httpx
import pytest

from ragspec import Engine, Sampling
from ragspec.errors import ModelError
from ragspec.pipelines.answering.answer import NO_ANSWER_TEXT
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.pipelines.server.serving import Serving
from ragspec.retrievers import Document, PassageIndex
from ragspec.retrievers.search import sentences
from tests.support.served import NAME, events, parts_of, post, served, text_of

PROMPT = "A draft model proposes several tokens and the target"
JSON = {"content-type": "application/json"}
GZIP = {"content-encoding": "gzip"}
SETTINGS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
LIMITS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def complete(client: httpx.Client, **body: Any) -> Any:
    return post(client, {"model": NAME, "prompt": PROMPT, "ignore_eos": True, **body})


def chat(client: httpx.Client, *turns: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": each} for each in turns]
    return post(client, {"model": NAME, "messages": messages, **body})


@pytest.mark.parametrize("drafter", ["none", "context", "auto", ["context", "recycling"]])
def test_texts_equal_the_engines(client: httpx.Client, instance: Engine, drafter: Any) -> None:
    selection = instance.with_drafter(None).generate(PROMPT, Sampling(**SETTINGS), **LIMITS)
    result = complete(client, **SETTINGS, max_tokens=24, drafter=drafter)
    assert result.status_code == 200
    choice = result.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (selection.text, selection.finish_reason)
    assert result.json()["usage"]["completion_tokens"] == len(selection.tokens)
    assert result.json()["metrics"]["speculative_decoding"]["label"] == "exact"


def test_samples_equal_the_engines_and_count_the_prompt_once(
    client: httpx.Client, instance: Engine
) -> None:
    body = {**SETTINGS, "max_tokens": 24, "n": 3}
    selection = instance.generate(PROMPT, Sampling(**SETTINGS, n=3), **LIMITS)
    result = complete(client, **body).json()
    assert [choice["text"] for choice in result["choices"]] == [each.text for each in selection]
    assert result["usage"]["prompt_tokens"] == len(PROMPT)
    message = events(complete(client, **body, stream=True, stream_options={"include_usage": True}))
    assert [text_of(message, i) for i in range(3)] == [each.text for each in selection]
    details = {"prompt_tokens_details": message[-1]["usage"]["prompt_tokens_details"]}
    assert message[-1]["usage"] == result["usage"] | details
    assert [each for each in message if "usage" in each] == message[-1:]


def test_several_prompts_and_token_ids(client: httpx.Client, instance: Engine) -> None:
    ids = instance.tokenizer(PROMPT)["input_ids"]
    one = complete(client, temperature=0, max_tokens=8).json()["choices"][0]["text"]
    many = complete(client, prompt=[PROMPT, "Other"], temperature=0, max_tokens=8).json()
    assert many["choices"][0]["text"] == one
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["usage"]["prompt_tokens"] == len(ids) + 5
    by_id = complete(client, prompt=[ids, ids], temperature=0, max_tokens=8).json()
    assert [choice["text"] for choice in by_id["choices"]] == [one, one]


def test_a_chat_is_written_with_the_chat_template(client: httpx.Client, instance: Engine) -> None:
    system, user = {"role": "system", "content": "Be short."}, "Where does\nit come from?"
    first, last = user.split("\n")
    parts = [{"type": "text", "text": first}, last]  # LangChain sends both
    messages = [system, {"role": "user", "content": parts}]
    selection = instance.generate([system, {"role": "user", "content": user}], max_new_tokens=20)
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    message = post(client, body).json()["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", selection.text)
    note = events(post(client, {**body, "stream": True}))
    assert note[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(note) == selection.text
    assert note[-1]["choices"][0]["finish_reason"] == selection.finish_reason


def test_penalties_are_applied(client: httpx.Client, instance: Engine) -> None:
    whole = complete(client, temperature=0, max_tokens=24).json()["choices"][0]["text"]
    penalties: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    selection = instance.generate(PROMPT, Sampling(**penalties), **LIMITS)
    request = complete(client, temperature=0, **penalties, max_tokens=24)
    assert request.json()["choices"][0]["text"] == selection.text != whole


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: httpx.Client, instance: Engine, stream: bool) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    selection = instance.generate(hello, max_new_tokens=10, logprobs=3)
    body = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 3}
    lines = parts_of(chat(client, "Hello", **body, stream=stream), stream)
    choices = [choice["logprobs"] for each in lines for choice in each["choices"]]
    message = [one for logprobs in choices if logprobs for one in logprobs["content"]]
    expected = pytest.approx([each.logprob for each in selection.logprobs])
    assert [each["logprob"] for each in message] == expected
    assert all(len(each["top_logprobs"]) == 3 for each in message)
    assert "".join(each["token"] for each in message) == selection.text


def test_a_right_prediction_saves_forwards(client: httpx.Client) -> None:
    def predicted(text: str) -> Any:
        prediction = {"type": "content", "content": text}
        body = {"drafter": "context", "budget": 8, "prediction": prediction}
        return complete(client, temperature=0, max_tokens=48, **body).json()

    plain = complete(client, temperature=0, max_tokens=48, drafter="none").json()
    text = plain["choices"][0]["text"]
    result = predicted(text)
    assert result["choices"][0]["text"] == text
    details = result["usage"]["completion_tokens_details"]
    message = result["metrics"]["speculative_decoding"]
    assert details["accepted_prediction_tokens"] > 24
    assert len(text) / message["num_forwards"] >= 3
    assert message["num_accepted_tokens_per_pos"][0] <= message["num_drafts"]
    assert predicted("QQQQQQQQ")["choices"][0]["text"] == text


def test_documents_of_the_server_are_searched(instance: Engine) -> None:
    passage = "The verified tokens are the same, whatever the draft was, in every single text."
    text = f"{passage}\n\n{'A heron waits at the northern lake for many long hours of rain. ' * 6}"
    index = PassageIndex.build([Document("rules.txt", "Rules", text)], embedder=None)
    with served(instance, documents=DocQA(index, engine=instance)) as (client, _):
        request = "Are verified tokens the same?"
        result, other = (chat(client, request, max_tokens=4, seed=s).json() for s in (1, 2))
        assert other["choices"] == result["choices"], "greedy"
        assert len(passage) < result["usage"]["prompt_tokens"] < len(text), "the sentence alone"
        message = result["choices"][0]["message"]
        assert message["sentences"][0]["text"] == passage
        assert message["support"] == "unsupported"
        loop = chat(client, request, logit_bias={"7": 99.0}).json()
        assert loop["usage"]["completion_tokens"] == 24, "it repeats itself"
        stream = chat(client, "Are verified tokens the same?", stream=True, max_tokens=2).text
        assert stream.partition("\n")[0].count(passage) == stream.count(passage) == 1, "known first"
        first = {"role": "system", "content": "Be brief."}
        for turns in ([], [first]):
            turns = [*turns, {"role": "user", "content": "Who won the cup in Uruguay?"}]
            lost = chat(client, "", messages=turns, max_tokens=4).json()["choices"][0]["message"]
            assert lost["refused"]
            assert lost["refusal"] is None, "the AI SDK joins it to the content"
        turns = [{"role": r, "content": t} for r, t in (("user", request), ("assistant", "Yes."))]
        turns.append({"role": "user", "content": "Why?"})
        again = chat(client, "", messages=turns, max_tokens=4).json()["choices"][0]["message"]
        assert again["sentences"][0]["text"] == passage, "by the question before"
        bare = chat(client, "Who won the cup?", documents=[], temperature=0, max_tokens=4).json()
        assert bare["usage"]["prompt_tokens"] < len(passage)
    for prompt in ("extract", PromptTemplate("bare", template="{{ question }}")):
        with served(instance, documents=DocQA(index, prompt=prompt)) as (client, _):
            reply = chat(client, request, max_tokens=4).json()
            assert reply["usage"]["prompt_tokens"] < len(passage), "the documents' template"
            assert bool(reply["choices"][0]["message"]["annotations"]) is (prompt == "extract")


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_of_an_uncovered_question_is_refused(instance: Engine, stream: bool) -> None:
    index = PassageIndex.build([Document("a.txt", "A", "Drafts are verified.")], embedder=None)
    messages = [{"role": "user", "content": "Who won the cup in Uruguay?"}]
    body = {"model": NAME, "messages": messages, "n": 3, "stream": stream}
    with served(instance, documents=DocQA(index, engine=instance)) as (client, _):
        result = post(client, body)
        wrong: list[Any] = [{"drafter": "x"}, {"store": "x"}, {"stop_token_ids": [10**6]}]
        for each in (*wrong, {"max_tokens": 10**6}, {"min_tokens": 9, "max_tokens": 2}):
            assert post(client, body | each).status_code == 400, each
    lines = parts_of(result, stream)
    assert {choice["index"] for each in lines for choice in each["choices"]} == {0, 1, 2}
    assert [text_of(lines, index) for index in range(3)] == [NO_ANSWER_TEXT] * 3


def test_models_health_and_metrics(client: httpx.Client) -> None:
    assert client.get("/health").json()["status"] == "ready"
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [NAME]
    assert client.get(f"/v1/models/{NAME}").json()["owned_by"] == "ragspec"
    assert client.get("/v1/models/other").status_code == 404
    before = client.get("/metrics").text
    complete(client, temperature=0, max_tokens=7)
    after = client.get("/metrics").text

    def value(page: str, name: str) -> float:
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    for name, more in ("ragspec_tokens_total", 7), ("ragspec_first_token_seconds_count", 1):
        assert value(after, name) == value(before, name) + more
    assert value(after, "ragspec_max_batch_size ") == 8
    assert value(after, "process_resident_memory_bytes ") > 10**7


def test_malformed_bodies_and_unknown_routes_are_refused(client: httpx.Client) -> None:
    half = b'{"model": "tiny", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    bodies = (b"no", b"", b"\xff\xfe", b'{"model": "tiny"', half)
    for content, more in [(each, {}) for each in bodies] + [(gzip.compress(b"no"), GZIP)]:
        result = client.post("/v1/chat/completions", content=content, headers=JSON | more)
        assert result.status_code == 400, result.text
        assert result.json()["error"]["type"] == "invalid_request_error"
    for content, why in (b"[" * 10**5, "decoding"), (b"9" * 10**4, "digits"), (b'"\xe9"', "utf-8"):
        result = client.post("/v1/completions", content=content, headers=JSON)
        assert result.status_code == 400 and why in result.json()["error"]["message"]
    other = client.post("/v1/completions", content=b'{"model": "tiny", "prompt": "a"}')
    assert other.status_code == 400 and "application/json" in other.json()["error"]["message"]
    assert post(client, [1]).json()["error"]["param"] is None
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/nowhere").json()["error"]["message"]


def test_gzip_bodies_are_accepted(client: httpx.Client) -> None:
    body = json.dumps({"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 4}).encode()
    compressed = gzip.compress(body)

    def send(content: bytes, encoding: str) -> httpx.Response:
        headers = JSON | {"content-encoding": encoding}
        return client.post("/v1/completions", content=content, headers=headers)

    plain = send(body, "identity").json()
    for content, encoding in (body, ""), (compressed, "gzip"), (compressed, "X-Gzip"):
        assert send(content, encoding).json()["choices"] == plain["choices"]
    bomb = gzip.compress(bytes(10**7))
    cases = [(compressed, "br", 415), (compressed[:-9], "gzip", 400), (body, "gzip", 400)]
    for content, encoding, status in [*cases, (bomb, "gzip", 413), (compressed * 2, "gzip", 400)]:
        result = send(content, encoding)
        assert result.status_code == status and "xpected" in result.json()["error"]["message"]


def test_an_engine_without_a_tokenizer_is_refused(instance: Engine) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        Serving(Engine(instance.target, None), "bare")


def test_documents_of_a_request_are_part_of_the_prompt(
    instance: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage = "The verified tokens are the same, whatever the draft was."
    with served(instance) as (client, _):
        body = {"temperature": 0, "max_tokens": 20}
        documents = [{"title": "Rules", "text": passage}]
        with_it = chat(client, "What is the same?", **body, documents=documents).json()
        spaced = chat(client, " What is\n the  same?", **body, documents=documents).json()
        without = chat(client, "What is the same?", **body).json()
        monkeypatch.setattr(sentences, "RANK_COST", 9.0)  # they have no rank
        late = ["Ann sleeps.", passage]
        last = chat(client, "Are verified tokens the same?", **body, documents=late).json()
    assert last["choices"][0]["message"]["sentences"][0]["text"] == passage
    assert spaced["choices"] == with_it["choices"]
    assert spaced["usage"]["prompt_tokens"] == with_it["usage"]["prompt_tokens"]
    assert with_it["usage"]["prompt_tokens"] >= without["usage"]["prompt_tokens"] + len(passage)
    # An untrained model quotes nothing.
    assert with_it["choices"][0]["message"]["annotations"] == []
