"""Log-probabilities are told of the text alone, and say where in it their tokens begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from tests.support import tiny
from tests.support.served import NAME, events, served, text_of

PROMPT = "A draft tree"


@pytest.fixture(scope="module")
def instance() -> Engine:
    """Return an engine whose tokens are several characters."""
    tokenizer = tiny.bpe_tokenizer()
    return Engine(tiny.model("llama", vocab_size=len(tokenizer), seed=4), tokenizer, drafter=None)


@pytest.fixture(scope="module")
def client(instance: Engine) -> Iterator[httpx.Client]:
    with served(instance) as (client, _):
        yield client


def requests(instance: Engine) -> dict[str, Any]:
    """Return a request whose text has no half-written character."""
    count = len(instance.tokenizer)
    broken = [n for n in range(count) if not instance.tokenizer.decode([n]).isprintable()]
    broken += [n for n in range(count) if "\ufffd" in instance.tokenizer.decode([n])]
    bias = {str(token): -100.0 for token in broken}
    sampled = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "max_tokens": 24, "logprobs": 1}
    return {"model": NAME, "prompt": PROMPT, "logit_bias": bias, **sampled}


def whole(instance: Engine) -> tuple[str, list[str]]:
    """Return the text that is written where nothing stops it, and its tokens."""
    bias = {int(token): value for token, value in requests(instance)["logit_bias"].items()}
    sampling = Sampling(temperature=0.8, seed=3, logit_bias=bias)
    result = instance.generate(PROMPT, sampling, max_new_tokens=24, ignore_eos=True)
    return result.text, [instance.tokenizer.decode([token]) for token in result.tokens]


def reported(
    client: httpx.Client, body: dict[str, Any], stream: bool
) -> tuple[str, dict[str, Any]]:
    """Return the text of a request and its log-probabilities, those of a stream put together."""
    result = client.post("/v1/completions", json={**body, "stream": stream})
    if not stream:
        choice = result.json()["choices"][0]
        return choice["text"], choice["logprobs"]
    lines = events(result)
    parts = [c["logprobs"] for each in lines for c in each["choices"] if c["logprobs"]]
    assert len(parts) > 1
    return text_of(lines), {
        name: [one for part in parts for one in part[name]] for name in parts[0]
    }


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_are_left_out_and_one_that_is_cut_is_preserved(
    client: httpx.Client, instance: Engine, stream: bool
) -> None:
    text, tokens = whole(instance)
    starts = [len("".join(tokens[:at])) for at in range(len(tokens))]
    cut = next(at for at in range(8, 20) if len(tokens[at]) > 2)
    stop = text[starts[cut] + 1 : starts[cut + 3] + 1]  # from within a token to within a later one
    assert text.index(stop) == starts[cut] + 1
    result, logprobs = reported(client, {**requests(instance), "stop": stop}, stream)
    assert result == text[: starts[cut] + 1]
    assert logprobs["tokens"] == tokens[: cut + 1]
    assert logprobs["text_offset"] == starts[: cut + 1]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == cut + 1


def test_a_chunk_tells_of_the_tokens_that_end_in_it(client: httpx.Client, instance: Engine) -> None:
    text, tokens = whole(instance)
    ends = [len("".join(tokens[: at + 1])) for at in range(len(tokens))]
    body = {**requests(instance), "stop": ["never written"], "stream": True}
    inputs, known = "", 0
    for each in events(client.post("/v1/completions", json=body)):
        for choice in each["choices"]:
            inputs += choice["text"]
            known += len((choice["logprobs"] or {"tokens": []})["tokens"])
            assert known == sum(end <= len(inputs) for end in ends)
    assert inputs == text


@pytest.mark.parametrize("stream", [False, True])
def test_all_tokens_are_reported_where_nothing_is_cut(
    client: httpx.Client, instance: Engine, stream: bool
) -> None:
    text, tokens = whole(instance)
    result, logprobs = reported(client, {**requests(instance), "stop": ["never written"]}, stream)
    assert (result, logprobs["tokens"]) == (text, tokens)
    assert logprobs["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]


def test_a_chat_tells_of_its_text_alone(client: httpx.Client, instance: Engine) -> None:
    body: dict[str, Any] = {**requests(instance), "logprobs": True}
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    free = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = [each["token"] for each in free["logprobs"]["content"]]
    assert "".join(content) == free["message"]["content"]
    stop = content[6]
    first = content.index(stop)
    result = client.post("/v1/chat/completions", json={**body, "stop": stop}).json()
    choice = result["choices"][0]
    text = choice["message"]["content"]
    selected = [each["token"] for each in choice["logprobs"]["content"]]
    assert text == "".join(content)[: "".join(content).index(stop)]
    assert selected == content[: len(selected)]
    assert len("".join(selected[:-1])) < len(text) <= len("".join(selected))
    assert result["usage"]["completion_tokens"] > len(selected) <= first
