"""Errors of requests in OpenAI's form: they name the field and the expected value."""

from typing import Any

import httpx
import pytest

from tests.support.served import NAME, engine, post, served

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER], "temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "A draft", "temperature": 0, "max_tokens": 8}
KWARGS = "chat_template_kwargs"
PREDICTED = {"type": "content", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *[({"n": number}, "n") for number in (0, 10_000)],
        ({"stop": ""}, "stop"),
        *[({"seed": seed}, "seed") for seed in ("7", True)],
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3.0}, "temperature"),
        ({"drafter": []}, "drafter"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": "text"}, "prediction"),
        ({"logit_bias": {"many": 1.0}}, "logit_bias.many"),
        *[({"logit_bias": {"7": bias}}, "logit_bias.7") for bias in ("x", 1e308)],
        ({"logit_bias": {"9" * 5000: 1.0}}, f"logit_bias.{'9' * 5000}"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        *[({name: False}, name) for name in ("skip_special_tokens", "do_sample", "detokenize")],
        ({"add_special_tokens": False}, "add_special_tokens"),
        *[({name: 2}, name) for name in ("best_of", "mirostat", "tfs", "top_n_sigma", "n_probs")],
        *[({name: ["e"]}, name) for name in ("stop_sequences", "bad_words_ids", "sampling_params")],
        *[({name: 0}, name) for name in ("eos_token_id", "forced_eos_token_id")],
        ({"temprature": 0}, "temprature"),
        ({"messages": [USER], "documnts": []}, "documnts"),
        ({"stream_options": {"include_usag": False}}, "stream_options.include_usag"),
        ({"max_new_tokens": 3}, "max_new_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{**USER, "content": None}]}, "messages.0.content"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{**USER, "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
        *[({"documents": [each]}, "documents.0") for each in (7, "", " ")],
        ({"documents": ["x", 7]}, "documents.1"),
        ({"documents": [{"title": "x"}]}, "documents.0.text"),
        ({"messages": [USER], "echo": True}, "echo"),
        *[({KWARGS: {n: [7]}}, f"{KWARGS}.{n}") for n in ("chat_template", "messages", "tokenize")],
    ],
)
def test_errors_name_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    chat = body.keys() & {"messages", "documents", "response_format", "chat_template_kwargs"}
    result = post(client, {**(CHAT if chat else TEXT), **body})
    error = result.json()["error"]
    assert (result.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: expected ")
    assert not any(word in error["message"] for word in ("valid", "pattern", "dictionary"))
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({**TEXT, "model": "other"}, 404, "model_not_found"),
        ({**TEXT, "prompt": [5, 10**6]}, 400, "tokenizer? prompt None"),
        ({**TEXT, "prompt": ""}, 400, "expected at least one token to go on from. prompt None"),
        ({**TEXT, "prompt": "x" * 600, "max_tokens": -1}, 400, "prompt and the text needs one"),
        ({**TEXT, "echo": True, "stream": True}, 400, "echo"),
        ({**TEXT, "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens is 9 and max_tokens is 8"),
        ({**CHAT, "min_tokens": 9, "max_completion_tokens": 8}, 400, "max_completion_tokens is 8"),
        ({**TEXT, "max_completion_tokens": 6}, 400, "max_completion_tokens 6; expected one of"),
        ({**TEXT, "prediction": PREDICTED, "drafter": "none"}, 400, "prediction"),
        ({**TEXT, "prediction": {**PREDICTED, "content": "x" * 10**5}}, 400, "prediction"),
        ({**TEXT, "logit_bias": {"99999": 1.0}}, 400, "tokenizer? logit_bias None"),
        ({**TEXT, "drafter": "nobody"}, 400, " drafter unknown_name"),
        ({**TEXT, "drafter": ["none", "context"]}, 400, "none by itself. Leave it out. drafter"),
        ({**TEXT, "drafter": "../../etc"}, 400, "unknown_name"),
        ({**TEXT, "drafter": "rest"}, 400, "rest got no store; expected one. Name another dr"),
        ({**TEXT, "drafter": "fused"}, 400, "got no draft model; expected one. Name another"),
        ({**TEXT, "documents": ["x"]}, 400, "none. It is a field of /v1/chat/completions. doc"),
        ({**TEXT, "store": "nowhere"}, 400, "Known: none. store unknown_name"),
        ({**TEXT, **{f"field{n}": n for n in range(100)}}, 400, "further fields"),
        ({**TEXT, "x" * 10**5: 1}, 400, "further fields"),
        ({**CHAT, "top_logprobs": 2}, 400, " top_logprobs None"),
        ({**CHAT, "documents": ["x"], "messages": [{**USER, "role": "assistant"}]}, 400, "last"),
        ({"model": NAME}, 400, "prompt"),
        ({**CHAT, "messages": [{"role": "assistant", "content": ""}]}, 400, " messages None"),
        ({**TEXT, "stop": ["x"] * 100}, 400, "expected at most 16 items, got ["),
        ({**TEXT, "prompt": ["x"] * 65}, 400, "prompt: expected at most 64 items, got ["),
        ({**TEXT, "stop": 7}, 400, "expected string or list, got 7."),
        ({**TEXT, "seed": 1 << 63}, 400, f"seed is {1 << 63}; expected a whole number from -"),
        ({**TEXT, "budget": "x"}, 400, "expected 'auto' or integer, got 'x'."),
        (TEXT | {"prompt": [1, -2]}, 400, "prompt.1: expected greater than or equal to 0, got -2."),
    ],
)
def test_errors_name_the_cause(
    client: httpx.Client, body: dict[str, Any], status: int, word: str
) -> None:
    error = (result := post(client, body)).json()["error"]
    assert result.status_code == status
    assert word in f"{error['message']} {error['param']} {error['code']}"


@pytest.mark.parametrize(("text", "goes_on"), [("A draft", True), ("\n", False)])
def test_fields_may_say_what_follows(client: httpx.Client, text: str, goes_on: bool) -> None:
    turns = {**CHAT, "messages": [USER, {"role": "assistant", "content": text}]}
    values = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on}
    for name, value in values.items():
        for fields, status in (({name: value}, 200), ({name: not value}, 400)):
            for result in (post(client, turns | each) for each in (fields, {KWARGS: fields})):
                why = f"{name}: expected none. A last message" in result.text
                assert (result.status_code, why) == (status, status == 400)


def test_a_chat_without_text_and_template_is_refused() -> None:
    with served(engine(chat=False)) as (client, _):
        error = post(client, {**CHAT, "messages": [{**USER, "content": ""}]}).json()["error"]
    assert error["param"] == "messages"
    assert error["message"] == "messages: expected some text, got none."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**TEXT, "prompt": "x" * 600}, "prompt"),
        ({**TEXT, "prompt": [5] * 500, "max_tokens": 100}, "max_tokens"),
        ({**TEXT, "max_tokens": 10**6}, "max_tokens"),
        ({**CHAT, "messages": [{**USER, "content": "x" * 600}]}, "messages"),
        ({**CHAT, "documents": [{"title": None, "text": "x" * 600}]}, "documents"),
        ({**CHAT, "max_tokens": None, "max_completion_tokens": 512}, "max_completion_tokens"),
    ],
)
def test_errors_state_the_context(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = post(client, body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 512 tokens, but ")
    assert "max_new_tokens" not in error["message"]
