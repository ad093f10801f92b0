"""LangChain over a tiny chat model: all of its calls give the engine's text."""

import asyncio
from typing import Any

import pytest

from ragspec import Engine, Sampling
from ragspec.errors import InputError, SamplingError, UnsupportedModelError
from tests.support import chatting, tiny

pytest.importorskip("langchain_core", reason="LangChain is not installed")
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage

from ragspec.adapters.langchain import ChatRagspec

REQUESTS = "Name three rivers."
TURN = ("user", REQUESTS)


def chat(**inputs: Any) -> ChatRagspec:
    inputs.setdefault("engine", chatting.engine())
    return ChatRagspec(**{"max_tokens": chatting.NEW, **inputs})


def test_invoke_gives_the_text_of_plain_decoding_and_its_figures() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm"}, "Be ", {"type": "text", "text": "brief."}]
    result = chat().invoke([SystemMessage(thoughts), HumanMessage(REQUESTS)])
    expected = chatting.alone(("system", "Be brief."), TURN)
    assert result.content == expected.text
    assert result.usage_metadata is not None
    assert result.usage_metadata["input_tokens"] == len(expected.prompt_tokens)
    assert result.usage_metadata["output_tokens"] == len(expected.tokens)
    assert chat().get_num_tokens(REQUESTS) == len(tiny.tokenizer()(REQUESTS)["input_ids"])
    assert chat(custom_get_token_ids=lambda text: [0]).get_num_tokens(REQUESTS) == 1
    facts = result.response_metadata
    assert facts["finish_reason"] == expected.finish_reason
    assert facts["label"] == "exact"
    assert facts["speculative_decoding"]["num_spec_steps"] > 0


def test_a_stream_adds_up_to_the_message_with_its_figures() -> None:
    llm = chat()
    llm.invoke(REQUESTS)  # its prompt is cached for both that follow
    chunks = list(llm.stream(REQUESTS))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    called = llm.invoke(REQUESTS)
    assert len(chunks) > 2
    assert whole.content == called.content
    assert whole.usage_metadata == called.usage_metadata
    counts = {k: v for k, v in called.response_metadata.items() if k != "seed"}
    assert {k: v for k, v in whole.response_metadata.items() if k != "seed"} == counts


def test_closing_a_stream_frees_its_row() -> None:
    llm = chat(engine=chatting.engine().with_limits(1), max_tokens=400)
    stream = llm.stream(REQUESTS)
    next(stream)
    stream.close()
    assert llm.engine.scheduler.open_requests == 0
    assert llm.invoke(REQUESTS, max_tokens=3).usage_metadata["output_tokens"] <= 3


def test_async_calls_and_batches_share_an_engine() -> None:
    requests = [f"Name {n} rivers." for n in range(5)]
    llm = chat(engine=chatting.engine().with_limits(3))
    expected = [chatting.alone(("user", text)).text for text in requests]
    assert [result.content for result in llm.batch(requests)] == expected

    async def together() -> list[str]:
        result = await asyncio.gather(*map(llm.ainvoke, requests))
        return [str(each.content) for each in result]

    async def streamed() -> str:
        return "".join([str(chunk.content) async for chunk in llm.astream(requests[0])])

    assert asyncio.run(together()) == expected
    assert asyncio.run(streamed()) == expected[0]


def test_a_cancelled_call_ends_its_texts() -> None:
    llm, done = chat(engine=chatting.engine().with_limits(1), max_tokens=400), list[Any]()
    llm.engine.on_finish(done.append)

    async def impatient() -> None:
        call = llm.agenerate([[HumanMessage(REQUESTS)]], n=2, temperature=1.0, ignore_eos=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)

    asyncio.run(impatient())
    assert not done and llm.invoke(REQUESTS, max_tokens=3).content


def test_settings_of_a_call_win_over_those_of_the_model() -> None:
    llm = chat(temperature=0.9, seed=4, stop="in no text")
    sampled = chatting.alone(TURN, sampling=Sampling(temperature=0.9, seed=4))
    assert llm.invoke(REQUESTS).content == sampled.text
    assert llm.bind(temperature=0.0).invoke(REQUESTS).content == chatting.alone(TURN).text
    text = chatting.alone(TURN).text
    cut = llm.bind(temperature=0.0, stop=[text[5:8]]).invoke(REQUESTS)
    assert cut.content == text[: text.index(text[5:8])]
    assert cut.response_metadata["finish_reason"] == "stop"
    assert llm._get_ls_params(stop=["x"])["ls_stop"] == ["in no text", "x"]


def test_several_texts_of_one_prompt() -> None:
    result = chat().generate([[HumanMessage(REQUESTS)]], n=2, temperature=1.0, seed=3)
    expected = chatting.alone(TURN, sampling=Sampling(temperature=1.0, seed=3, n=2))
    assert [each.text for each in result.generations[0]] == [each.text for each in expected]


def test_documents_are_drafted_from() -> None:
    llm = chat(engine=Engine(tiny.model(), tiny.tokenizer(chat=True), "context", budget=8))
    plain = llm.invoke(REQUESTS, ignore_eos=True)
    said = Document(str(plain.content), metadata={"source": "notes"})
    helped = llm.bind(documents=[said, "and a text"]).invoke(REQUESTS, ignore_eos=True)
    assert helped.content == plain.content
    assert helped.response_metadata["forwards"] < plain.response_metadata["forwards"]


def test_a_cache_tells_models_and_settings_separately() -> None:
    cache = InMemoryCache()
    assert chat(cache=cache).invoke(REQUESTS).content == chatting.alone(TURN).text
    assert chat(cache=cache, max_tokens=2).invoke(REQUESTS).usage_metadata["output_tokens"] == 2
    other = chat(cache=cache, engine=Engine(tiny.model(seed=1), tiny.tokenizer(chat=True), None))
    assert other.invoke(REQUESTS).content != chatting.alone(TURN).text


def test_a_change_of_a_setting_that_loads_a_model_has_an_effect() -> None:
    llm, template = chat(), {"chat_template": "{{ messages[0].content }}"}
    expected = chatting.engine().generate(REQUESTS, max_new_tokens=chatting.NEW).text
    assert llm.model_copy(update=template).invoke(REQUESTS).content == expected
    assert llm.invoke(REQUESTS).content == chatting.alone(TURN).text
    assert ChatRagspec(model="starter", drafter="none")._writer.engine.drafter is None
    llm.model = "starter"
    with pytest.raises(InputError, match="got both of model and engine"):
        llm.invoke(REQUESTS)


def test_bad_input_is_reported_by_our_errors() -> None:
    with pytest.raises(InputError, match="got neither of model"):
        ChatRagspec()
    with pytest.raises(SamplingError, match="temperature"):
        chat(temperature=-1.0)
    with pytest.raises(InputError, match="unknown setting 'temperatur'"):
        chat().invoke(REQUESTS, temperatur=1)
    with pytest.raises(InputError, match="got tools"):
        chat().invoke(REQUESTS, tools=[{}])
    with pytest.raises(InputError, match="unknown setting 'max_tokenz'"):
        chat(max_tokenz=5)
    for document in (3, (), (1, 2, 3)):
        with pytest.raises(InputError, match="among the documents"):
            chat().invoke(REQUESTS, documents=[document])
    with pytest.raises(InputError, match="reads text"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
        chat().invoke([HumanMessage([image])])
    with pytest.raises(UnsupportedModelError, match="chat template"):
        chat(engine=Engine(tiny.model(), tiny.tokenizer(), None)).invoke(REQUESTS)
