"""The routes: texts are those of the engine, in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ragspec.engine.engine import Engine
from ragspec.pipelines.docqa.docqa import DocQA
from ragspec.pipelines.server.serving import Serving
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.sampling.settings import Sampling
from tests.support.served import NAME, engine, events, served, text_of

PROMPT = "A draft model proposes several tokens and the target"
JSON = {"content-type": "application/json"}
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def made() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def pair(made: Engine) -> Iterator[tuple[httpx.Client, Serving]]:
    with served(made) as found:
        yield found


@pytest.fixture(scope="module")
def client(pair: tuple[httpx.Client, Serving]) -> httpx.Client:
    return pair[0]


def complete(client: httpx.Client, **body: Any) -> Any:
    whole = {"model": NAME, "prompt": PROMPT, "ignore_eos": True, **body}
    return client.post("/v1/completions", json=whole)


def chat(client: httpx.Client, *turns: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": each} for each in turns]
    return client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **body})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drafter", ["none", "context", "auto", ["context", "recycling"]])
def test_texts_are_those_of_the_engine(
    client: httpx.Client, made: Engine, stream: bool, drafter: Any
) -> None:
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 24}
    wanted = made.drafting(None).generate(PROMPT, SAMPLED, max_new_tokens=24, ignore_eos=True)
    found = complete(client, **settings, stream=stream, drafter=drafter)
    assert found.status_code == 200
    if stream:
        assert text_of(events(found)) == wanted.text
        return
    choice = found.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, wanted.finish_reason)
    assert found.json()["usage"]["completion_tokens"] == len(wanted.tokens)
    assert found.json()["metrics"]["speculative_decoding"]["label"] == "exact"


def test_samples_are_those_of_the_engine_and_count_their_prompt_once(
    client: httpx.Client, made: Engine
) -> None:
    body = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 12, "n": 3}
    wanted = made.generate(
        PROMPT,
        Sampling(temperature=0.8, top_p=0.9, seed=11, n=3),
        max_new_tokens=12,
        ignore_eos=True,
    )
    found = complete(client, **body).json()
    assert [choice["text"] for choice in found["choices"]] == [each.text for each in wanted]
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    told = events(complete(client, **body, stream=True, stream_options={"include_usage": True}))
    assert [text_of(told, i) for i in range(3)] == [each.text for each in wanted]
    assert told[-1]["usage"] == {
        **found["usage"],
        "prompt_tokens_details": told[-1]["usage"]["prompt_tokens_details"],
    }
    assert [each for each in told if "usage" in each] == told[-1:]


def test_several_prompts_and_token_ids(client: httpx.Client, made: Engine) -> None:
    ids = made.tokenizer(PROMPT)["input_ids"]
    one = complete(client, temperature=0, max_tokens=8).json()["choices"][0]["text"]
    many = complete(client, prompt=[PROMPT, "Other"], temperature=0, max_tokens=8).json()
    assert many["choices"][0]["text"] == one
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["usage"]["prompt_tokens"] == len(ids) + 5
    by_id = complete(client, prompt=[ids, ids], temperature=0, max_tokens=8).json()
    assert [choice["text"] for choice in by_id["choices"]] == [one, one]


def test_a_chat_goes_through_the_template(client: httpx.Client, made: Engine) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Where does "},
                {"type": "text", "text": "it come from?"},
            ],
        },
    ]
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where does it come from?"},
    ]
    wanted = made.generate(plain, max_new_tokens=20)
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    found = client.post("/v1/chat/completions", json=body).json()
    message = found["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", wanted.text)
    told = events(client.post("/v1/chat/completions", json={**body, "stream": True}))
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(told) == wanted.text
    assert told[-2]["choices"][0]["finish_reason"] == wanted.finish_reason


def test_special_tokens_of_callers_stay_text(client: httpx.Client, made: Engine) -> None:
    end = made.tokenizer.eos_token
    found = chat(client, f"a {end} b", temperature=0, max_tokens=2).json()
    shorter = chat(client, "a  b", temperature=0, max_tokens=2).json()
    assert found["usage"]["prompt_tokens"] > shorter["usage"]["prompt_tokens"] + 1


def test_half_of_a_surrogate_pair_is_told_of(client: httpx.Client) -> None:
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    found = client.post("/v1/chat/completions", content=raw, headers=JSON)
    assert found.status_code == 400 and "unicode" in found.json()["error"]["message"]


def test_a_body_of_another_type_is_told_of(client: httpx.Client) -> None:
    found = client.post("/v1/completions", content=b'{"model": "tiny", "prompt": "a"}')
    assert found.status_code == 400 and "application/json" in found.json()["error"]["message"]


def test_stops_bias_and_penalties_count(client: httpx.Client, made: Engine) -> None:
    whole = complete(client, temperature=0, max_tokens=24).json()["choices"][0]["text"]
    stop = whole[5:7]
    for stream in (False, True):
        found = complete(client, temperature=0, max_tokens=24, stop=[stop], stream=stream)
        text = text_of(events(found)) if stream else found.json()["choices"][0]["text"]
        assert text == whole[: whole.index(stop)]
    token = made.tokenizer("Z")["input_ids"][0]
    forced = complete(client, temperature=0, max_tokens=4, logit_bias={str(token): 100}).json()
    assert forced["choices"][0]["text"] == "ZZZZ"
    wanted = made.generate(
        PROMPT,
        Sampling(frequency_penalty=1.5, presence_penalty=0.5),
        max_new_tokens=24,
        ignore_eos=True,
    )
    asked = complete(
        client, temperature=0, frequency_penalty=1.5, presence_penalty=0.5, max_tokens=24
    )
    assert asked.json()["choices"][0]["text"] == wanted.text != whole


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: httpx.Client, made: Engine, stream: bool) -> None:
    wanted = made.generate([{"role": "user", "content": "Hello"}], max_new_tokens=10, logprobs=3)
    asked = chat(
        client, "Hello", temperature=0, max_tokens=10, logprobs=True, top_logprobs=3, stream=stream
    )
    if stream:
        choices = [choice for each in events(asked) for choice in each["choices"]]
        told = [
            one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]
        ]
    else:
        told = asked.json()["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in told] == pytest.approx(
        [each.logprob for each in wanted.logprobs]
    )
    assert all(len(each["top_logprobs"]) == 3 for each in told)
    assert "".join(each["token"] for each in told) == wanted.text


def test_logprobs_of_a_completion(client: httpx.Client) -> None:
    found = complete(client, temperature=0, max_tokens=6, logprobs=2).json()["choices"][0]
    told = found["logprobs"]
    assert "".join(told["tokens"]) == found["text"]
    assert told["text_offset"] == list(range(6)) and len(told["token_logprobs"]) == 6
    assert all(len(each) == 2 for each in told["top_logprobs"])


def test_the_right_prediction_pays(client: httpx.Client) -> None:
    plain = complete(client, temperature=0, max_tokens=48, drafter="none").json()
    text = plain["choices"][0]["text"]
    asked = {"prediction": {"type": "content", "content": text}, "drafter": "context", "budget": 8}
    found = complete(client, temperature=0, max_tokens=48, **asked).json()
    assert found["choices"][0]["text"] == text
    details = found["usage"]["completion_tokens_details"]
    told = found["metrics"]["speculative_decoding"]
    assert details["accepted_prediction_tokens"] > 24
    assert len(text) / told["num_forwards"] >= 3
    assert told["num_accepted_tokens_per_pos"][0] <= told["num_drafts"]
    wrong = complete(
        client,
        temperature=0,
        max_tokens=48,
        **{**asked, "prediction": {"type": "content", "content": "QQQQQQQQ"}},
    )
    assert wrong.json()["choices"][0]["text"] == text


def test_documents_of_a_request_are_shown_and_cited(made: Engine) -> None:
    passage = "The verified tokens are the same, whatever the draft was."
    with served(made) as (client, _):
        body = {
            "documents": [{"title": "Rules", "text": passage}],
            "temperature": 0,
            "max_tokens": 20,
        }
        with_it = chat(client, "What is the same?", **body).json()
        without = chat(client, "What is the same?", temperature=0, max_tokens=20).json()
    assert with_it["usage"]["prompt_tokens"] >= without["usage"]["prompt_tokens"] + len(passage)
    assert (
        with_it["choices"][0]["message"]["annotations"] == []
    )  # an untrained model quotes nothing


def test_documents_of_the_server_are_searched(made: Engine) -> None:
    passage = "The verified tokens are the same, whatever the draft was."
    index = PassageIndex.build([Document("rules.txt", "Rules", passage)], embedder=None)
    with served(made, documents=DocQA(index, engine=made)) as (client, _):
        found = chat(client, "Are verified tokens the same?", temperature=0, max_tokens=4).json()
        assert found["usage"]["prompt_tokens"] > len(passage)
        lost = chat(client, "Who won the cup in Uruguay?", max_tokens=4).json()["choices"][0]
        assert lost["message"]["refusal"] and "do not speak" in lost["message"]["content"]
        told = events(chat(client, "Who won the cup in Uruguay?", stream=True))
        assert "do not speak" in text_of(told)
        bare = chat(client, "Who won the cup?", documents=[], temperature=0, max_tokens=4).json()
        assert bare["usage"]["prompt_tokens"] < len(passage)


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

    assert value(after, "ragspec_tokens_total") == value(before, "ragspec_tokens_total") + 7
    assert (
        value(after, "ragspec_first_token_seconds_count")
        == value(before, "ragspec_first_token_seconds_count") + 1
    )
    assert value(after, "ragspec_slots ") == 8


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"n": 0}, 400, "n"),
        ({"n": 10_000}, 400, "n"),
        ({"stop": ["x"] * 100}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"seed": "7"}, 400, "seed"),
        ({"seed": True}, 400, "seed"),
        ({"prompt": [5, 10**6]}, 400, "10"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x" * 600}, 400, "context_length_exceeded"),
        ({"max_tokens": 10**6}, 400, "context_length_exceeded"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"prediction": {"type": "content"}}, 400, "prediction"),
        ({"prediction": "text"}, 400, "prediction"),
        ({"prediction": {"type": "content", "content": "a"}, "drafter": "none"}, 400, "prediction"),
        ({"logit_bias": {"many": 1.0}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1.0}}, 400, "logit_bias"),
        ({"drafter": "nobody"}, 400, "nobody"),
        ({"drafter": "../../etc"}, 400, "unknown_name"),
        ({"drafter": "rest"}, 400, "rest"),
        ({"store": "nowhere"}, 400, "nowhere"),
        ({"temperature": 3.0}, 400, "temperature"),
        ({"tools": []}, 400, "tools"),
        ({"echo": True}, 400, "echo"),
    ],
)
def test_bad_requests_are_told_in_openais_form(
    client: httpx.Client, body: dict[str, Any], status: int, word: str
) -> None:
    found = complete(client, **body)
    assert found.status_code == status
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in f"{error['message']} {error['param']} {error['code']}"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"documents": [7]},
        {"documents": [""]},
        {"documents": [{"title": "x"}]},
        {"documents": ["x"], "messages": [{"role": "assistant", "content": "x"}]},
        {"top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_bad_chats(client: httpx.Client, body: dict[str, Any]) -> None:
    whole = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], **body}
    found = client.post("/v1/chat/completions", json=whole)
    assert found.status_code == 400 and found.json()["error"]["message"]


def test_what_is_no_json_or_no_route(client: httpx.Client) -> None:
    for content in (b"no", b"", b"[1, 2]", b"\xff\xfe", b'{"model": "tiny"'):
        found = client.post("/v1/completions", content=content, headers=JSON)
        assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/nowhere").json()["error"]["message"]


def test_an_engine_without_a_tokenizer_is_refused(made: Engine) -> None:
    from ragspec.errors import ModelError

    with pytest.raises(ModelError, match="tokenizer"):
        Serving(Engine(made.target, None), "bare")
