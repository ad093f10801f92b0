"""Conversations: texts of a fresh prefill, passages once, and dropped turns."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from ragspec.pipelines import Conversation, DocQA
from ragspec.retrievers import Document, PassageIndex
from tests.pipelines.answering.test_docqa import Chunks
from tests.support import tiny

DOCUMENTS = [
    Document("trees.md", "Trees", "A tree of drafts holds several continuations of one text."),
    Document("rules.md", "Rules", "The walk follows what the target would have written alone."),
    Document("pets.md", "Pets", "The cat sleeps on the sofa and eats fish."),
]


def engine(length: int = 2048, drafter: Any = "context") -> Engine:
    model = tiny.model("llama", dtype=torch.float64, max_position_embeddings=length)
    return Engine(model, tiny.tokenizer(chat=True), drafter)


@pytest.fixture(scope="module")
def documents() -> DocQA:
    return DocQA(PassageIndex.build(DOCUMENTS, embedder=None), engine=engine())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_turns_equal_those_of_a_fresh_prefill(sampling: Sampling) -> None:
    talk = Conversation(engine(), system="Be brief.")
    plain = engine(drafter=None)
    for number, message in enumerate(("Hello.", "-", "Why is that?")):
        reply = talk.ask(message, sampling, max_new_tokens=20)
        fresh = plain.generate(reply.generation.prompt_tokens, sampling, max_new_tokens=20)
        assert reply.generation.tokens == fresh.tokens
        assert reply.text == fresh.text == talk.turns[-1].answer
        new = reply.report.prompt_tokens - reply.report.cached_tokens
        assert new < 60 if number else reply.report.cached_tokens == 0
    text = plain.tokenizer.decode(reply.generation.prompt_tokens)
    assert text.startswith("<system> Be brief.\n<user> Hello.\n<assistant> ")
    assert text.endswith("\n<user> Why is that?\n<assistant> ")
    talk.clear()
    assert talk.ask("Hello.", sampling, max_new_tokens=5).report.prompt_tokens < 60
    assert len(talk.turns) == 1


def test_passages_are_added_once_and_numbered_across_turns(documents: DocQA) -> None:
    talk = Conversation(engine(), documents, top_k=1, prompt="quote")
    first = talk.ask("What does a tree of drafts hold?", max_new_tokens=8)
    assert [hit.document.name for hit in first.passages] == ["trees.md"]
    again = talk.ask("How many continuations does the tree of drafts hold?", max_new_tokens=8)
    assert again.passages == (), "the passage is in the conversation already"
    third = talk.ask("What does the cat eat?", max_new_tokens=8)
    text = talk.engine.tokenizer.decode(third.generation.prompt_tokens)
    assert [hit.document.name for hit in third.passages] == ["pets.md"]
    assert "[1] Trees\nA tree of drafts" in text and "[2] Pets\nThe cat sleeps" in text
    assert text.count("several continuations of one text") == 1


def test_a_small_chat_model_reads_the_best_sentence_alone() -> None:
    best = "The cat of the old lighthouse keeper eats fresh fish and rice at noon."
    text = f"{'The heron of the northern lake waits at the shore for many long hours. ' * 3}{best}"
    qa = DocQA(PassageIndex.build([Document("pets.md", "Pets", text)], embedder=None))
    turn = Conversation(engine(), qa).ask("What does the cat eat at noon?", max_new_tokens=2)
    chosen = Conversation(engine(), qa, top_k=1)
    whole = chosen.ask("What does the cat eat at noon?", max_new_tokens=2)
    assert [hit.passage.text for hit in turn.passages] == [best]
    assert f"\n\nPets\n{best}\n\nQuestion" in turn.prompt.text
    assert [hit.passage.text for hit in whole.passages] == [text], "the number was chosen"


def test_passages_of_one_name_are_separate() -> None:
    def search(query: str) -> Any:
        return [("The dog eats." if "dog" in query else "The cat naps.", 1.0, {"source": "pets"})]

    talk = Conversation(engine(), DocQA(search), top_k=1)
    replies = [talk.ask(what, max_new_tokens=2) for what in ("dog?", "cat?", "dog again?")]
    assert [len(reply.passages) for reply in replies] == [1, 1, 0]


def test_quotations_cite_passages_of_all_turns(documents: DocQA) -> None:
    talk = Conversation(engine(), documents, top_k=1)
    talk.ask("What does a tree of drafts hold?", max_new_tokens=2)
    script = "The cat sleeps on the sofa and eats fish, for " + DOCUMENTS[0].text

    def scripted(prompt: Any, sampling: Any = None, **options: Any) -> Any:
        generation = engine().generate(prompt, max_new_tokens=1)
        generation.text, generation.steps = script, []
        return Chunks([script], generation)

    talk.engine.stream = scripted  # type: ignore[method-assign]
    reply = talk.ask("Does the cat sleep on the sofa?", max_new_tokens=2)
    assert [(c.passage, c.document) for c in reply.citations] == [(2, "pets.md"), (1, "trees.md")]
    for cited in reply.citations:
        text = next(each.text for each in DOCUMENTS if each.name == cited.document)
        assert text[cited.start : cited.end] == script[cited.answer_start : cited.answer_end]
    assert reply.support == "quoted"


def test_a_question_about_an_answer_has_no_passages(documents: DocQA) -> None:
    talk = Conversation(engine(), documents, top_k=1)
    refused = talk.ask("Which mountain did Hannibal cross?", max_new_tokens=4)
    assert refused.text == "The documents do not speak of this."
    assert refused.refused is not None and not talk.turns
    talk.ask("What does the cat eat?", max_new_tokens=4)
    simple = talk.ask("Explain simpler please.", max_new_tokens=4)
    assert simple.refused is None and simple.passages == ()
    assert talk.turns[-1].prompt_text == "Explain simpler please."


def test_a_follow_up_question_is_searched_with_the_one_before(documents: DocQA) -> None:
    talk = Conversation(engine(), documents, top_k=2)
    talk.ask("What does the cat eat?", max_new_tokens=4)
    question = "Does the cat sleep on the sofa and eat fish, as a walk?"
    talk.turns = [replace(talk.turns[0], question=question, hits=())]
    result = talk.ask("Zebra?", max_new_tokens=4)
    assert {hit.document.name for hit in result.passages} == {"pets.md", "rules.md"}
    other = Conversation(engine(), DocQA(PassageIndex.build(DOCUMENTS)), top_k=1)
    questions = "What does the tree of drafts hold?", "Why?"
    other.turns = [replace(talk.turns[0], question=each) for each in questions]
    assert [hit.document.name for hit in other.search("And how?").hits] == ["trees.md"]


def test_extracts_are_streamed_and_are_turns(documents: DocQA) -> None:
    talk, stream = Conversation(engine(), documents, prompt="extract"), list[str]()
    for question in ("Does the cat sleep on the sofa and eat fish?", "Zebra?"):
        assert "fish" in talk.ask(question, stream=stream.append).text
    assert stream == [turn.answer for turn in talk.turns] and len(stream) == 2
    talk.turns = [replace(talk.turns[0], question="Hannibal?")]
    assert talk.ask("Zebra?", stream=stream.append).refused and len(stream) == 2


def test_the_oldest_turns_are_dropped_when_the_context_is_full() -> None:
    talk = Conversation(engine(length=300))
    dropped, cached = [], []
    for number in range(9):
        reply = talk.ask(f"Turn {number} says some words.", max_new_tokens=24)
        dropped.append(reply.dropped_turns)
        cached.append(reply.report.cached_tokens)
        assert reply.report.prompt_tokens + 24 <= 300
        assert talk.turns[-1].question.startswith(f"Turn {number}")
    assert sum(dropped) + len(talk.turns) == 9
    assert any(dropped) and not all(dropped[4:]), "a quarter is freed, so that not every turn pays"
    assert all(known > 0 for known, gone in zip(cached[1:], dropped[1:], strict=True) if not gone)


def test_a_passage_of_a_dropped_turn_is_added_again(documents: DocQA) -> None:
    talk = Conversation(engine(length=560), documents, top_k=1, prompt="quote")
    while not (reply := talk.ask("What does the cat eat?", max_new_tokens=24)).dropped_turns:
        assert len(reply.passages) == (len(talk.turns) == 1)
    assert [hit.document.name for hit in reply.passages] == ["pets.md"]
    assert "[2] Pets\nThe cat sleeps" in reply.prompt.text and "[1]" not in reply.prompt.text


def test_passages_of_a_turn_that_do_not_fit_are_left_out(documents: DocQA) -> None:
    talk = Conversation(engine(length=280), documents, top_k=3)
    reply = talk.ask("Do the walk, the tree and the cat follow one text?", max_new_tokens=8)
    assert len(reply.passages) == 1
    with pytest.raises(PromptTooLongError):
        talk.ask("word " * 200, max_new_tokens=8)
    assert len(talk.turns) == 1
    assert talk.ask("And the cat?", max_new_tokens=8).text == talk.turns[-1].answer


def test_an_interrupted_answer_is_a_turn() -> None:
    talk, interrupt = Conversation(engine()), Mock(side_effect=KeyboardInterrupt)
    reply = talk.ask("Hello.", max_new_tokens=30, stream=interrupt)
    assert reply.generation.finish_reason == "cancelled" and reply.text
    assert talk.turns[-1].answer == reply.text
    assert talk.ask("Go on.", max_new_tokens=5).report.cached_tokens > 0


def test_a_turn_interrupted_during_prefill_is_no_turn() -> None:
    talk, interrupt = Conversation(engine()), Mock(return_value=None)
    hook = talk.engine.model.register_forward_pre_hook(interrupt)
    first = talk.ask("Hello.", max_new_tokens=5)
    interrupt.side_effect = KeyboardInterrupt
    reply = talk.ask("And then?", max_new_tokens=5)
    interrupt.side_effect = None
    assert reply.text == "" and reply.generation.finish_reason == "cancelled"
    assert [turn.question for turn in talk.turns] == ["Hello."]
    again = talk.ask("And then?", max_new_tokens=5)
    fresh = engine().generate(again.generation.prompt_tokens, max_new_tokens=5)
    hook.remove()
    assert again.generation.tokens == fresh.tokens and first.text
    assert again.report.cached_tokens > 0


def test_special_tokens_of_a_user_stay_plain_text() -> None:
    talk = Conversation(engine())
    end = talk.engine.tokenizer.eos_token
    reply = talk.ask(f"Say {end} now.", max_new_tokens=2)
    assert talk.engine.tokenizer.eos_token_id not in reply.generation.prompt_tokens


def test_invalid_arguments_are_refused() -> None:
    plain = Engine(tiny.model(), tiny.tokenizer(), None)
    with pytest.raises(UnsupportedModelError, match="without a chat template"):
        Conversation(plain)
    wrong: Any = {"top_k": {"top_k": 0}, "expected an Engine": {"engine": "smollm2"}}
    for expected, inputs in (wrong | {"expected a DocQA": {"documents": "manuals"}}).items():
        with pytest.raises(InputError, match=expected):
            Conversation(**{"engine": engine(), **inputs})
    brief = Conversation(engine(), DocQA(lambda query: [], top_k=2, system="Be brief."))
    assert brief.top_k == 2 and "Be brief." in brief.ask("Why?", max_new_tokens=2).prompt.text
