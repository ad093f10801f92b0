"""OpenAI's protocol in detail: streams, bytes and offsets of tokens, extra fields, echoes."""

import copy
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from ragspec import Engine, Sampling
from ragspec.sampling.decoding import decoder_of
from tests.pipelines.server.test_refusals import CHAT, TEXT, USER
from tests.support import tiny
from tests.support.served import events, parts_of, post, text_of


@pytest.fixture(scope="module")
def instance() -> Engine:
    """Return an engine whose tokens are several characters, or parts of one."""
    tokenizer = copy.deepcopy(tiny.bpe_tokenizer())  # the shared one has no template
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %} Be brief.{% endif %}"
    )
    model = tiny.model("llama", vocab_size=len(tokenizer), seed=4)
    return Engine(model, tokenizer, "context", budget=4)


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_no_text_after_its_finish_reason(client: httpx.Client, usage: bool) -> None:
    body = {**CHAT, "max_tokens": 24}
    whole = post(client, body).json()["choices"][0]["message"]["content"]
    openai = OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    text, rest = "", []
    with openai.chat.completions.create(**body, stream=True, **options) as chunks:
        for chunk in chunks:
            if chunk.choices[0].finish_reason:
                assert not chunk.choices[0].delta.content
                break
            text += chunk.choices[0].delta.content or ""
        rest = list(chunks)
    assert text == whole
    assert [(each.choices, each.usage is not None) for each in rest] == [([], True)] * usage
    lines = events(post(client, {**TEXT, "stream": True, **options}))
    assert [bool(each["choices"]) for each in lines[-2:]] == [True, not usage]
    assert ("metrics" in lines[-1]) is usage


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_tokens_join_to_the_text(client: httpx.Client, stream: bool) -> None:
    incomplete = 0
    for seed in range(8):
        body = {**CHAT, "temperature": 1.5, "seed": seed, "max_tokens": 40, "logprobs": True}
        body |= {"stop": ["e"], "top_logprobs": 1, "ignore_eos": True, "stream": stream}
        lines = parts_of(post(client, body), stream)
        logprobs = [c["logprobs"] for each in lines for c in each["choices"] if c["logprobs"]]
        tokens = [token for part in logprobs for token in part["content"]]
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == text_of(lines)
        incomplete += sum(t["token"].startswith("bytes:") and not t["bytes"] for t in tokens)
        assert list("\ufffd".encode()) not in [t["top_logprobs"][0]["bytes"] for t in tokens]
    assert incomplete > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_cover_the_text_up_to_a_stop_with_the_offset_of_each_token(
    client: httpx.Client, instance: Engine, stream: bool, seed: int
) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    options: Any = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 1}
    plain = instance.with_drafter(None)
    free = plain.generate("A draft", sampling, **options)
    decode = partial(instance.tokenizer.decode, skip_special_tokens=True)
    decoder = decoder_of(instance.tokenizer)
    starts = [len(decode(free.tokens[:at]).rstrip("\ufffd")) for at in range(24)] + [len(free.text)]
    for stop in ("never written", free.text[9:11], free.text[12:15]):
        text, cut = free.text.partition(stop)[:2]
        count = sum(start < len(text) for start in starts[:-1]) if cut else 24
        body = {**TEXT, "temperature": 1.0, "seed": seed, "max_tokens": 24, "ignore_eos": True}
        body |= {"logprobs": 1, "stop": stop, "drafter": "none", "stream": stream}
        body |= {"stream_options": {"include_usage": True}}
        lines = parts_of(post(client, body), stream)
        assert text_of(lines) == text
        streamed, logprobs = "", dict[str, list[Any]]()
        for choice in (choice for each in lines for choice in each["choices"]):
            streamed += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[name] = logprobs.get(name, []) + values
            if choice["logprobs"] and len(streamed) < len(text):  # those that end in it
                ended = [end for end in starts[1:] if end <= len(streamed)]
                least = sum(end < len(streamed) for end in ended)
                assert least <= len(logprobs["tokens"]) <= len(ended)
        pieces = [(decoder.piece(t), decoder.piece_bytes(t)) for t in free.tokens[:count]]
        names = [f"bytes:{repr(b)[2:-1]}" if "\ufffd" in text else text for text, b in pieces]
        assert logprobs["tokens"] == names
        values = zip(logprobs["top_logprobs"], names, logprobs["token_logprobs"], strict=True)
        assert all(top[name] == logprob and len(top) <= 2 for top, name, logprob in values)
        assert logprobs["text_offset"] == starts[:count]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == count
        used = plain.generate("A draft", sampling, **options, stop=stop)
        assert lines[-1]["usage"]["completion_tokens"] == len(used.tokens) >= count


def test_ignored_fields_are_named_in_a_header(client: httpx.Client) -> None:
    reply: Any = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    reply |= {"tool_calls": [], "type": "message", "id": "m\n1", "reasoning_content": "so"}
    silent: Any = [{"role": "assistant"}, {"role": "assistant", "content": []}]
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    body = {**CHAT, "messages": [USER, reply, *silent, {**USER, "content": [part]}]}
    body |= {"quality": "hd", "tools": [], "tool_choice": "none", "user_id": "x\n"}
    body |= {"response_format": {"type": "text"}, "max_tokens": 8.0, "n": 1.0, "seed": 3.0}
    body |= {"store": True, "top_logprobs": 0, "mirostat": 0, "do_sample": True, "tfs": 1.0}
    body["add_special_tokens"] = False  # which the template decides
    result = post(client, body)
    assert result.status_code == 200, result.text
    assert set(result.headers["x-ignored-fields"].split(", ")) == {
        *("messages.type", "messages.id", "messages.reasoning_content"),
        *("messages.annotations", "messages.content.cache_control", "quality", "user_id"),
        "add_special_tokens",
    }
    assert "x-ignored-fields" not in post(client, CHAT).headers
    more = {"metadata": {"a": "b"}, "best_of": 1, "logprobs": False, "": 1, "stream": True}
    assert post(client, TEXT | more).headers["x-ignored-fields"] == "metadata, ''"


def test_fields_that_change_the_result_are_applied(client: httpx.Client, instance: Engine) -> None:
    def text(**body: Any) -> Any:
        return post(client, {**TEXT, **body}).json()["choices"][0]["text"]

    plain = instance.generate("A draft", max_new_tokens=8, ignore_eos=True)
    cut = instance.generate("A draft", max_new_tokens=8, stop_token_ids=plain.tokens[3:4])
    assert text(stop_token_ids=plain.tokens[3:4]) == cut.text
    end = int(instance.model.generation_config.eos_token_id)
    biased = {"logit_bias": {str(end): 90.0}}
    for least in (0, 4):
        sampling = Sampling(logit_bias={end: 90.0}, min_new_tokens=least)
        selection = instance.generate("A draft", sampling, max_new_tokens=8)
        assert text(**biased, min_tokens=least) == selection.text
        assert len(selection.tokens) == least + 1
    nothing = {"tokenize": False, "add_generation_prompt": True, "messages": None}
    options = {"chat_template_kwargs": {"brief": True, **nothing}}
    brief = post(client, {**CHAT, **options}).json()
    assert brief["usage"]["prompt_tokens"] > post(client, CHAT).json()["usage"]["prompt_tokens"]
    for limit in ({"max_tokens": -1}, {"max_tokens": None, "max_completion_tokens": -1}):
        rest = post(client, {**TEXT, **limit, "ignore_eos": True}).json()
        assert rest["usage"]["total_tokens"] == 512


def test_an_echo_has_the_logprobs_of_the_prompt(client: httpx.Client, instance: Engine) -> None:
    ids = [tiny.prompt(length, vocab_size=300, seed=length) for length in (90, 5, 1)]
    ids.append([instance.tokenizer.eos_token_id] * 2)  # without any text
    body = {**TEXT, "prompt": ids, "max_tokens": 1, "logprobs": 2, "echo": True}
    for choice, prompt in zip(post(client, body).json()["choices"], ids, strict=True):
        logits = instance.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        scores = logits[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
        values = torch.tensor(logprobs["token_logprobs"][1:-1], dtype=torch.float64)
        assert torch.allclose(values, scores, atol=1e-5)
        assert len(logprobs["text_offset"]) == len(prompt) + 1
        text = instance.tokenizer.decode(prompt, skip_special_tokens=True)
        assert choice["text"].startswith(text)
    bare = post(client, {**TEXT, "echo": True}).json()["choices"][0]
    assert bare["text"] == "A draft" + post(client, TEXT).json()["choices"][0]["text"]
    assert bare["logprobs"] is None
