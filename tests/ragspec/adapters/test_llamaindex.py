"""LlamaIndex over a tiny model: completions, conversations and query engines."""

import asyncio
from typing import Any

import pytest

from ragspec import Engine, Sampling
from ragspec.errors import InputError
from ragspec.retrievers import SuffixDrafter
from tests.support import chatting, tiny

pytest.importorskip("llama_index.core", reason="LlamaIndex is not installed")
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.schema import NodeWithScore, TextNode

from ragspec.adapters.llamaindex import RagspecLLM

REQUESTS = "Name three rivers."
TURN = ("user", REQUESTS)


def llm(**inputs: Any) -> RagspecLLM:
    return RagspecLLM(**{"engine": chatting.engine(), "max_tokens": chatting.NEW, **inputs})


def user(text: str = REQUESTS) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=text)]


def test_a_chat_model_answers_conversations_and_prompts_in_its_template() -> None:
    expected = chatting.alone(TURN)
    result = llm().chat(user())
    assert result.message.content == expected.text
    assert result.message.role == MessageRole.ASSISTANT
    assert result.additional_kwargs["completion_tokens"] == len(expected.tokens)
    assert result.additional_kwargs["speculative_decoding"]["num_spec_steps"] > 0
    assert llm().complete(REQUESTS).text == expected.text
    formatted = engine_text(REQUESTS)
    assert llm().complete(REQUESTS, formatted=True).text == formatted
    assert llm().metadata.is_chat_model
    assert llm().metadata.context_window == 512
    assert llm().metadata.num_output == chatting.NEW


def engine_text(prompt: str) -> str:
    return str(chatting.engine(None).generate(prompt, max_new_tokens=chatting.NEW).text)


def test_a_plain_model_goes_on_with_the_text() -> None:
    plain = llm(engine=Engine(tiny.model(), tiny.tokenizer(), "context"))
    assert not plain.metadata.is_chat_model
    assert plain.complete(REQUESTS).text == engine_text(REQUESTS)
    assert plain.chat(user()).message.content == engine_text(f"user: {REQUESTS}\nassistant: ")


def test_streams_grow_to_the_whole_text() -> None:
    model, expected = llm(), chatting.alone(TURN).text
    for chunks in (list(model.stream_chat(user())), list(model.stream_complete(REQUESTS))):
        assert "".join(str(piece.delta) for piece in chunks) == expected
        assert len(chunks) > 2
        assert chunks[-1].additional_kwargs["finish_reason"] in ("stop", "length")
    assert chunks[-1].text == expected


def test_async_calls_share_an_engine() -> None:
    model = llm()
    requests = [f"Name {n} rivers." for n in range(4)]
    expected = [chatting.alone(("user", text)).text for text in requests]

    async def together() -> list[str]:
        result = await asyncio.gather(*(model.achat(user(text)) for text in requests))
        return [str(each.message.content) for each in result]

    async def streamed() -> str:
        chunks = await model.astream_chat(user(requests[0]))
        return "".join([str(piece.delta) async for piece in chunks])

    async def completed() -> str:
        chunks = await model.astream_complete(requests[0])
        whole = "".join([str(piece.delta) async for piece in chunks])
        assert whole == (await model.acomplete(requests[0])).text
        return whole

    assert asyncio.run(together()) == expected
    assert asyncio.run(streamed()) == asyncio.run(completed()) == expected[0]


def test_settings_of_a_call_win_over_those_of_the_model() -> None:
    sampled = chatting.alone(TURN, sampling=Sampling(temperature=0.9, seed=4)).text
    assert llm(temperature=0.9, seed=4).complete(REQUESTS).text == sampled
    assert llm(temperature=0.5).complete(REQUESTS, temperature=0.9, seed=4).text == sampled


def test_documents_are_drafted_from() -> None:
    model = llm(engine=Engine(tiny.model(), tiny.tokenizer(chat=True), "context", budget=8))
    plain = model.complete(REQUESTS, ignore_eos=True)
    nodes = [NodeWithScore(node=TextNode(text=plain.text), score=0.5), "and a text"]
    helped = model.complete(REQUESTS, ignore_eos=True, documents=nodes)
    assert helped.text == plain.text
    assert helped.additional_kwargs["forwards"] < plain.additional_kwargs["forwards"]


def test_a_model_is_the_same_after_it_was_written_and_read() -> None:
    model = RagspecLLM(model="starter", drafter=["suffix", "context"], budget=3, max_tokens=8)
    again = RagspecLLM.from_dict(model.to_dict())
    assert (again.drafter, again.budget) == (["suffix", "context"], 3)
    saved = model.model_copy(update={"drafter": SuffixDrafter()})
    with pytest.raises(InputError, match="unknown drafter '<"):
        RagspecLLM.from_dict(saved.to_dict())


def test_turns_of_other_models_are_read() -> None:
    """Without their thoughts, and with their calls of tools."""
    block = ToolCallBlock(tool_call_id="1", tool_name="rivers", tool_kwargs={"n": 3})
    blocks = [ThinkingBlock(content="hmm"), TextBlock(text="The Elbe."), block]
    turns = [ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks), *user()]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    model = llm(chat_template=template, engine=(engine := chatting.engine()))
    call = "{'type': 'function', 'id': '1', 'function': {'name': 'rivers', 'arguments': {'n': 3}}}"
    expected = engine.generate(f"The Elbe.[{call}]{REQUESTS}", max_new_tokens=chatting.NEW)
    assert model.chat(turns).message.content == expected.text


def test_bad_input_is_reported_by_our_errors() -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        llm(engine=Engine(tiny.model(), tiny.tokenizer(), None)).complete("")
    with pytest.raises(InputError, match="got neither of model"):
        RagspecLLM()
    with pytest.raises(InputError, match="unknown setting 'seeed'"):
        llm().complete(REQUESTS, seeed=1)
    with pytest.raises(InputError, match="expected n=1"):
        llm().complete(REQUESTS, n=2)
    with pytest.raises(InputError, match="got tools"):
        llm().chat(user(), tools=[{}])
    with pytest.raises(InputError, match="reads text"):
        image = ImageBlock(url="https://example.com/a.png")
        llm().chat([ChatMessage(role=MessageRole.USER, blocks=[image])])
    plain = llm(engine=Engine(tiny.model(), tiny.tokenizer(), None))
    with pytest.raises(InputError, match="reads text"):
        plain.chat([ChatMessage(role=MessageRole.USER, blocks=[image])])
    with pytest.raises(InputError, match="no messages"):
        plain.chat([])
