"""OpenAI's client, other clients if installed (of node: in NODE_PATH), and random requests."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from openai import AsyncOpenAI, OpenAI
from schemathesis import openapi
from schemathesis.core.result import Ok

from ragspec.engine.engine import Engine
from ragspec.pipelines.server.serving import Serving
from tests.support.served import NAME

MESSAGES: Any = [{"role": "user", "content": "Where does a draft come from?"}]


@pytest.fixture(scope="module")
def client(pair: tuple[httpx.Client, Serving]) -> OpenAI:
    return OpenAI(base_url=f"{pair[0].base_url}/v1", api_key="none", max_retries=0)


def test_the_client_chats(client: OpenAI, instance: Engine) -> None:
    selection = instance.generate(MESSAGES, max_new_tokens=16)
    result = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_completion_tokens=16, logprobs=True
    )
    assert result.choices[0].message.content == selection.text
    assert result.choices[0].finish_reason == selection.finish_reason
    assert result.usage is not None and result.usage.completion_tokens == len(selection.tokens)
    assert result.choices[0].logprobs is not None and result.choices[0].logprobs.content
    assert client.models.retrieve(NAME).id == NAME
    assert [each.id for each in client.models.list()] == [NAME]


@pytest.mark.parametrize("dump", [False, True])
def test_a_reply_is_a_turn_of_the_next_request(client: OpenAI, dump: bool) -> None:
    options: Any = {"model": NAME, "temperature": 0, "max_tokens": 6}
    first = client.chat.completions.create(**options, messages=MESSAGES, logprobs=True)
    assert first.choices[0].logprobs.content
    reply: Any = first.choices[0].message
    options["messages"] = [*MESSAGES, reply.model_dump() if dump else reply, *MESSAGES]

    async def stream() -> str:
        other = AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)
        chunks = await other.chat.completions.create(**options, stream=True)
        return "".join([each.choices[0].delta.content or "" async for each in chunks])

    whole = client.chat.completions.create(**options).choices[0].message.content
    assert asyncio.run(stream()) == whole


def test_litellm_falls_back_to_a_longer_context(client: OpenAI) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    server = {"model": f"openai/{NAME}", "api_base": str(client.base_url), "api_key": "none"}
    kinds = [("short", server), ("long", server | {"mock_response": "of the other"})]
    models = [{"model_name": name, "litellm_params": each} for name, each in kinds]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["long"]}])
    reply = router.completion("short", [{"role": "user", "content": "x" * 900}])
    assert reply.choices[0].message.content == "of the other"


def test_langchain_continues_a_conversation(client: OpenAI) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    options = {"model": NAME, "temperature": 0, "max_tokens": 6, "api_key": "none"}
    model = openai.ChatOpenAI(base_url=str(client.base_url), **options)
    turns = [("user", "Hello"), model.invoke("Hello"), ("user", "Go on")]
    assert "".join(each.content for each in model.stream(turns)) == model.invoke(turns).content


@pytest.mark.parametrize("package", ["openai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"])
def test_a_node_client_continues_a_chat(client: OpenAI, instance: Engine, package: str) -> None:
    node = shutil.which("node") or pytest.skip("node is not installed")
    script = str(Path(__file__).with_name("clients.cjs"))
    command = [node, script, package, str(client.base_url), NAME]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if process.returncode == 77:
        pytest.skip(f"{package} is not installed for node")
    assert process.returncode == 0, process.stderr
    first = instance.generate(MESSAGES, max_new_tokens=6).text
    turns = [*MESSAGES, {"role": "assistant", "content": first}, *MESSAGES]
    second = instance.generate(turns, max_new_tokens=6).text
    texts = {"first": first, "second": second, "streamed": second}
    assert json.loads(process.stdout) == texts | {"code": "context_length_exceeded"}


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_no_request_is_answered_with_a_server_error(
    pair: tuple[httpx.Client, Serving], examples: int
) -> None:
    client, serving = pair
    request: dict[str, int] = {}
    for result in openapi.from_url(f"{client.base_url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        request[operation.label] = try_all(operation, examples)
    assert len(request) == 9 and min(request.values()) >= 1, request
    assert serving.scheduler.live == 0


def try_all(operation: Any, examples: int) -> int:
    """Send valid and invalid requests of an operation; return their number."""
    sent = 0

    def once(case: Any) -> None:
        nonlocal sent
        body = case.body if isinstance(case.body, dict) else {}
        if isinstance(body.get("model"), str):
            body["model"] = NAME
            for name in {"max_tokens", "max_completion_tokens"} & body.keys() or {"max_tokens"}:
                if body.get(name) in (None, -1) or (type(body[name]) is int and body[name] > 8):
                    body[name] = 8  # long texts are not needed here
        response = case.call()
        sent += 1
        assert response.status_code < 500, response.text

    every = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    every(given(case=operation.as_strategy())(once))()
    return sent
