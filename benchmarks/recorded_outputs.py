"""The outputs of every way to ask a question, as lines of JSON, to compare two versions of it.

    python benchmarks/recorded_outputs.py before.jsonl    # before a change
    python benchmarks/recorded_outputs.py after.jsonl     # after it
    diff before.jsonl after.jsonl

The starter model answers on the CPU, with fixed seeds and a fixed budget. Speculative retrieval
chooses its strides by the clock, so its lines have no `forwards`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from ragspec.engine.engine import Engine
from ragspec.models.resolve import STARTER
from ragspec.pipelines import Conversation, DocQA, IterativeRag, IterativeSearch, LongDocument
from ragspec.retrievers import Rapid
from ragspec.sampling.settings import Sampling

GUIDE = STARTER / "guide"
QUESTIONS = [json.loads(line)["question"] for line in (STARTER / "questions.jsonl").open()]
UNCOVERED = "Which mountain did Hannibal cross?"
SAMPLINGS = (None, Sampling(temperature=0.8, seed=7), Sampling(temperature=1, top_p=0.9, seed=3))
TWO = {"sampling": Sampling(temperature=1.0, n=2)}
CHAT = "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }}\n{% endfor %}<assistant> "
Case = tuple[str, Callable[..., Any], str, dict[str, Any]]


def main() -> None:
    """Write the record of every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    engine, chat = (Engine.from_pretrained("starter", budget=8) for _ in range(2))
    qa = DocQA.from_documents(GUIDE, engine=engine)
    with tempfile.TemporaryDirectory() as folder, out.open("w", encoding="utf-8") as file:
        every = chain(qa_cases(qa), long_cases(engine, Path(folder)), search_cases(qa, chat))
        for number, (name, *case) in enumerate(every):
            file.write(json.dumps({"case": f"{number} {name}", **record(*case)}) + "\n")


def qa_cases(qa: DocQA) -> Iterator[Case]:
    """Yield the name, the function, the question and the options of the cases over passages."""
    for (n, question), prompt in product(enumerate(QUESTIONS), ("evidence", "quote", "answer")):
        over = DocQA(qa.retriever, engine=qa.engine, prompt=prompt, top_k=n % 3 + 1)
        yield f"qa {prompt}", over.ask, question, {"sampling": SAMPLINGS[n % 2]}
    for top_k, sampling in product((1, 2, 3, 40), SAMPLINGS):
        over = DocQA(qa.retriever, engine=qa.engine, top_k=top_k)
        yield f"qa {top_k}", over.ask, QUESTIONS[0], {"sampling": sampling}
    for more in ({"stop": "a"}, {"prediction": QUESTIONS[1], "logprobs": 2}, {"refuse": False}):
        yield f"qa {list(more)}", qa.ask, UNCOVERED, {"refuse": False, **more}
    for texts in (("", "A walk is a rule."), ()):
        bare = DocQA(lambda query, texts=texts: [(t, 1.0, {}) for t in texts], engine=qa.engine)
        yield f"qa over {texts}", bare.ask, "What is a walk?", {}
    yield from edges(qa.ask)


def long_cases(engine: Engine, folder: Path) -> Iterator[Case]:
    """Yield the cases over one document: whole, in part, saved, in every mode and prompt."""
    for file, token_range in product(("draft-trees.md", "budget.md"), (None, (40, 400))):
        book = LongDocument.open(GUIDE / file, engine, token_range=token_range)
        for sampling in SAMPLINGS:
            yield f"long {file} {token_range}", book.ask, QUESTIONS[4], {"sampling": sampling}
        book.save(folder / f"{file} {token_range}")
        again = LongDocument.open(folder / f"{file} {token_range}", engine)
        yield f"long {file} {token_range} saved", again.ask, QUESTIONS[4], {}
    with_rapid = engine.with_drafter(Rapid(engine.target), 8)
    steered = {"transform": Rapid(engine.target, eta=10.0).transform}
    modes = [(with_rapid, None, {}), (engine, None, steered)]
    modes += [(engine, prompt, {}) for prompt in ("quote", "answer")]
    for (over, prompt, more), sampling in product(modes, SAMPLINGS):
        book = LongDocument.open(GUIDE / "verification-rules.md", over, prompt=prompt)
        yield f"long {prompt} {list(more)}", book.ask, QUESTIONS[8], {"sampling": sampling, **more}
    yield from edges(book.ask)


def search_cases(qa: DocQA, chat: Engine) -> Iterator[Case]:
    """Yield the cases that search again (strides, FLARE, rounds), and the turns of chats."""
    strides = [{"stride": n, "search": s} for n in (2, 5, 16) for s in ("sparse", "dense", "fused")]
    strides += [{"flare": 0.5}, {"rounds": 2}, {"rounds": 3}, {"query_tokens": 5}]
    for (n, settings), speculate in product(enumerate(strides), ("off", "auto", 3)):
        rag = IterativeRag(
            qa.engine, qa.retriever, IterativeSearch(speculate=speculate, **settings)
        )
        options = {"sampling": SAMPLINGS[n % 3]}
        yield f"iterative {settings} {speculate}", rag.ask, QUESTIONS[n % 4], options
    yield "iterative, no passage", IterativeRag(qa.engine, lambda query: []).ask, QUESTIONS[0], {}
    yield "iterative, not refused", rag.ask, UNCOVERED, {"refuse": False}
    yield from edges(rag.ask)
    chat.tokenizer.chat_template = CHAT
    for sampling, documents in product(SAMPLINGS, (None, DocQA(qa.retriever, engine=chat))):
        talk = Conversation(chat, documents, system="Be brief.", top_k=2)
        for turn in (UNCOVERED, QUESTIONS[4], "And why?", QUESTIONS[0], QUESTIONS[8]):
            yield f"chat {documents is not None}", talk.ask, turn, {"sampling": sampling}
    yield from edges(talk.ask)


def edges(ask: Callable[..., Any]) -> Iterator[Case]:
    """Yield the questions that are refused, or answered without an answer's passages."""
    for question, options in ((" ", {}), (UNCOVERED, {}), (QUESTIONS[0], TWO), ("Why?", {"x": 1})):
        yield f"edge {list(options)}", ask, question, options


def record(ask: Callable[..., Any], question: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a streamed answer, or of the error."""
    streamed: list[str] = []
    try:
        answer = ask(question, stream=streamed.append, **{"max_new_tokens": 40, **options})
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    generation, report = answer.generation, answer.report
    ids = [json.dumps(tokens).encode() for tokens in (generation.tokens, generation.prompt_tokens)]
    return {
        "text": [answer.text, "".join(streamed) == answer.text],
        "tokens, prompt": [hashlib.sha256(each).hexdigest()[:12] for each in ids],
        "ended": [generation.label, generation.finish_reason, answer.refused],
        "citations": [astuple(each) for each in answer.citations],
        "forwards": report.forwards if report.retrieval is None else None,
    }


if __name__ == "__main__":
    main()
