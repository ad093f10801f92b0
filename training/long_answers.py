"""Let a chat model answer questions over long documents, for a draft head to learn from.

    python training/long_answers.py --shared DIR --out long.jsonl --minutes 40

A part of a permissive document that no evaluation uses is read once, and several questions made by
templates are asked over it: of sentences, headings and words in it, for summaries and quotations.
Answers are greedy; what began to repeat itself ends there, as answers do in use. A record is a part
with its questions and answers, sealed line by line: a run that was ended goes on with the next
round. No share-alike text is read.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from chat_answers import next_round
from text_data import Document, read_documents, sentence_spans
from text_questions import clean, heading_question, is_askable, is_content, make_question

from ragspec import Engine
from ragspec.pipelines.answering.long_document import LongDocument
from ragspec.retrievers.search.documents import Document as ReadDocument

PART = (7_000, 18_000)  # characters, 1,800 to 4,500 tokens
QUESTIONS, OVER_ALL = 20, 4  # over a part; of them about the whole
NEW_TOKENS = 160
CUE_WORDS = 10
WHOLE = (
    "Summarise the text.",
    "Summarize the text above in a few sentences.",
    "What are the main points of the text?",
    "What happens in this part of the text?",
    "What is the most important thing that the reader learns here?",
    "Name three things that the text speaks of, and say what it says about each.",
    "How does the text begin, and how does it end?",
    "Who or what plays a role in the text, and how?",
    "Explain the text in simple words.",
)
ABOUT = (
    "What does the text say about {0}?",
    "What is {0} in the text?",
    "Why does the text speak of {0}?",
    "Explain what the text says about {0} and {1}.",
    "How are {0} and {1} related?",
)
QUOTES = (
    "Quote, word for word, the passage of the text that begins: “{0}”",
    "Copy the sentences of the text that begin with “{0}”.",
    "How does the text go on after “{0}”?",
)


def cut_part(documents: list[Document], chosen: random.Random) -> Document:
    """Return a part of one of the documents, cut at paragraphs, the longer ones more often."""
    weights = [len(document.text) for document in documents]
    document = chosen.choices(documents, weights)[0]
    size = chosen.randint(*PART)
    start = chosen.randrange(max(1, len(document.text) - size))
    part = document.text[start : start + size]
    blocks = part.split("\n\n")
    whole = "\n\n".join(blocks[1:-1]).strip() if len(blocks) > 2 else ""
    return Document(document.title, document.kind, whole if len(whole) > PART[0] // 2 else part)


def questions_over(part: Document, chosen: random.Random) -> list[str]:
    """Return questions over a part: on the whole, on words, headings, sentences, and quotations."""
    sentences = [part.text[start:end] for start, end in sentence_spans(part.text)]
    askable = [sentence for sentence in sentences if is_askable(sentence)]
    instance = chosen.sample(WHOLE, OVER_ALL)
    for sentence in chosen.sample(askable, min(QUESTIONS - OVER_ALL, len(askable))):
        words, draw = sentence.split(), chosen.random()
        telling = sorted({clean(word) for word in words if is_content(word)}, key=len)[-4:]
        if draw < 0.3:
            cue = " ".join(words[:CUE_WORDS])
            instance.append(chosen.choice(QUOTES).format(cue))
        elif draw < 0.6 and len(telling) > 1:
            instance.append(chosen.choice(ABOUT).format(*chosen.sample(telling, 2)))
        elif request := make_question(sentence, part.title, chosen, hardness=0.3):
            instance.append(request.question)
    headings = [line for line in part.text.splitlines() if line.startswith("#")]
    if headings:
        instance[-1] = heading_question(chosen.choice(headings), chosen)
    return instance


def answered(engine: Engine, part: Document, questions: list[str]) -> list[dict[str, Any]]:
    """Return the questions with the tokens of the model's greedy answers."""
    opened = LongDocument.open(ReadDocument(part.title, part.title, part.text), engine)
    results = []
    for question in questions:
        answer = opened.ask(question, max_new_tokens=NEW_TOKENS)
        results.append({"question": question, "answer": list(answer.generation.tokens)})
    return results


def main() -> None:
    """Write rounds, a part of a document each, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/lm/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=40.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    documents = [each for each in read_documents(args.shared) if len(each.text) >= PART[0]]
    engine = Engine.from_pretrained(args.model, dtype=args.dtype)
    began, number = time.monotonic(), next_round(args.out)
    while time.monotonic() - began < 60.0 * args.minutes:
        chosen = random.Random(number)
        part = cut_part(documents, chosen)
        chats = answered(engine, part, questions_over(part, chosen))
        record = {"round": number, "title": part.title, "text": part.text, "chats": chats}
        with args.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        written = sum(len(chat["answer"]) for chat in chats)
        print(
            f"round {number}: {len(part.text):,} characters, {len(chats)} answers, {written} "
            f"tokens, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        number += 1


if __name__ == "__main__":
    main()
