"""Haystack over a tiny chat model: components, streaming and pipelines that are written to text."""

import asyncio
from typing import Any

import pytest

from ragspec import Engine, Sampling
from ragspec.errors import InputError, SamplingError
from tests.support import chatting, tiny

pytest.importorskip("haystack", reason="Haystack is not installed")
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import FallbackChatGenerator
from haystack.core.errors import SerializationError
from haystack.core.serialization import component_to_dict
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk

from ragspec.adapters.haystack import RagspecChatGenerator

REQUESTS = "Name three rivers."
TURN = ("user", REQUESTS)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
OURS = "ragspec.adapters.haystack"


def generator(**inputs: Any) -> RagspecChatGenerator:
    settings = {"max_tokens": chatting.NEW, **inputs.pop("generation_kwargs", {})}
    if "model" not in inputs:
        inputs.setdefault("engine", chatting.engine())
    return RagspecChatGenerator(generation_kwargs=settings, **inputs)


def reported(_: StreamingChunk) -> None:
    """A callback that a saved pipeline can name."""


def test_replies_are_the_texts_of_plain_decoding() -> None:
    component = generator()
    expected = chatting.alone(TURN)
    fallback = FallbackChatGenerator([component])  # which passes tools=None
    reply = fallback.run([ChatMessage.from_user(REQUESTS)])["replies"][0]
    assert reply.text == component.run(REQUESTS)["replies"][0].text == expected.text
    assert reply.meta["finish_reason"] == expected.finish_reason
    assert reply.meta["usage"]["completion_tokens"] == len(expected.tokens)
    assert reply.meta["speculative_decoding"]["num_spec_steps"] > 0


def test_settings_of_a_run_win_and_n_gives_several_replies() -> None:
    request = {"temperature": 1.0, "seed": 3, "n": 2}
    result = generator(generation_kwargs={"seed": 9}).run(REQUESTS, generation_kwargs=request)
    expected = chatting.alone(TURN, sampling=Sampling(temperature=1.0, seed=3, n=2))
    assert [reply.text for reply in result["replies"]] == [text.text for text in expected]
    assert [reply.meta["index"] for reply in result["replies"]] == [0, 1]


def test_chunks_go_to_the_callback_of_the_run_or_of_the_component() -> None:
    chunks: list[StreamingChunk] = []
    result = generator(streaming_callback=reported).run(REQUESTS, streaming_callback=chunks.append)
    assert "".join(chunk.content for chunk in chunks) == result["replies"][0].text
    assert [chunk.start for chunk in chunks[:2]] == [True, False]
    assert chunks[-1].finish_reason == result["replies"][0].meta["finish_reason"]
    again: list[StreamingChunk] = []
    generator(streaming_callback=again.append).run(REQUESTS)
    assert [chunk.content for chunk in again] == [chunk.content for chunk in chunks]


def test_asynchronous_runs_stream_and_a_cancelled_one_ends_its_texts() -> None:
    engine, done = chatting.engine().with_limits(1), list[Any]()
    engine.on_finish(done.append)
    pipeline, chunks = Pipeline(), list[StreamingChunk]()
    pipeline.add_component("llm", generator(engine=engine))

    async def noted(chunk: StreamingChunk) -> None:
        chunks.append(chunk)

    async def run(**more: Any) -> str:
        inputs = {"messages": REQUESTS, **more}
        return str((await pipeline.run_async({"llm": inputs}))["llm"]["replies"][0].text)

    expected = chatting.alone(TURN).text
    assert asyncio.run(run()) == asyncio.run(run(streaming_callback=noted)) == expected
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 2

    async def impatient() -> None:
        done.clear()
        settings = {"max_tokens": 400, "ignore_eos": True}
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run(generation_kwargs=settings), 0.05)

    asyncio.run(impatient())
    assert asyncio.run(run(generation_kwargs={"max_tokens": 3})) and len(done) == 1


def test_documents_are_drafted_from() -> None:
    engine = Engine(tiny.model(), tiny.tokenizer(chat=True), "context", None, 8)
    component, settings = generator(engine=engine), {"ignore_eos": True}
    plain = component.run(REQUESTS, generation_kwargs=settings)["replies"][0]
    documents = [Document(content=plain.text)]
    helped = component.run(REQUESTS, generation_kwargs=settings, documents=documents)["replies"][0]
    assert helped.text == plain.text
    assert helped.meta["forwards"] < plain.meta["forwards"]


def test_a_pipeline_is_the_same_after_it_was_written_and_read() -> None:
    pipeline = Pipeline()
    template = [ChatMessage.from_user("{{ documents[0].content }}\nQuestion: {{ question }}\n")]
    pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
    llm = generator(
        model="starter", drafter="context", chat_template=TEMPLATE, streaming_callback=reported
    )
    pipeline.add_component("llm", llm)
    pipeline.connect("prompt.prompt", "llm.messages")
    question = "Where does an oak stand?"
    documents = [Document(content=chatting.TEXTS["trees.txt"])]
    prompt = {"documents": documents, "question": question}
    request = {"prompt": prompt, "llm": {"documents": documents}}
    first = pipeline.run(request)["llm"]["replies"][0]
    here = "tests.ragspec.adapters.test_haystack"
    read = Pipeline.loads(pipeline.dumps(), allowed_modules=[OURS, here, __name__])
    assert read.to_dict() == pipeline.to_dict()
    assert read.run(request)["llm"]["replies"][0].text == first.text
    assert first.meta["usage"]["prompt_tokens"] > 10


def test_bad_input_is_reported_by_our_errors() -> None:
    with pytest.raises(InputError, match="got neither of model"):
        RagspecChatGenerator()
    with pytest.raises(InputError, match="got both of model"):
        RagspecChatGenerator("starter", engine=chatting.engine())
    with pytest.raises(SamplingError, match="min_p"):
        generator(generation_kwargs={"min_p": 3.0})
    with pytest.raises(InputError, match="unknown setting"):
        generator().run(REQUESTS, generation_kwargs={"temprature": 1})
    with pytest.raises(InputError, match="no role"):
        generator().run(["x"])
    with pytest.raises(InputError, match="got tools"):
        generator().run(REQUESTS, tools=[object()])
    with pytest.raises(InputError, match="Did you mean 'drafter'"):
        RagspecChatGenerator("starter", drafters="context")
    with pytest.raises(InputError, match="expected n=1 in a stream"):
        generator().run(REQUESTS, streaming_callback=reported, generation_kwargs={"n": 2})
    with pytest.raises(InputError, match="reads text"):
        image = ImageContent(base64_image="AA==", mime_type="image/png", validation=False)
        generator().run([ChatMessage.from_user(content_parts=["see", image])])
    with pytest.raises(SerializationError, match="Engine"):
        component_to_dict(generator(), "llm")  # as a pipeline does
