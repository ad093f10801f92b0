"""Let a chat model answer questions over long documents, for a draft head to learn from.

    python training/long_answers.py --shared DIR --out long.jsonl --minutes 40

A part of a permissive document that no evaluation uses is read once, and several questions made by
templates are asked over it: of sentences, headings and words in it, for summaries and quotations.
Answers are greedy; what began to repeat itself ends there, as answers do in use. A line has the ids
of a question and its answer; their hidden states are kept beside it (see `stored_states`). A run
that was ended goes on with the next round. No share-alike text is read.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from stored_states import Recording, StateRecorder, append_chats, next_round
from text_data import Document, read_documents, sentence_spans
from text_questions import clean, heading_question, is_askable, is_content, make_question

from ragspec import Engine
from ragspec.drafters.heads.head import default_taps
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


def answered(
    engine: Engine, recorder: StateRecorder, part: Document, questions: list[str]
) -> list[Recording]:
    """Return the model's greedy answers to questions over a part.

    Args:
        recorder: The engine's drafter.
    """
    opened = LongDocument.open(ReadDocument(part.title, part.title, part.text), engine)
    recorder.sessions.clear()
    with opened:
        for question in questions:
            opened.ask(question, max_new_tokens=NEW_TOKENS)
    return [session for session in recorder.sessions if len(session.answer) > 2]


def main() -> None:
    """Write rounds, a part of a document each, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/lm/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--minutes", type=float, default=40.0)
    args = parser.parse_args()
    documents = [each for each in read_documents(args.shared) if len(each.text) >= PART[0]]
    plain = Engine.from_pretrained(args.model, drafter=None, dtype=args.dtype)
    recorder = StateRecorder(default_taps(plain.target))
    engine = Engine(plain.target, plain.tokenizer, recorder, budget=1)
    width = len(recorder.order) * plain.model.config.hidden_size
    began, number = time.monotonic(), next_round(args.out, width)
    while time.monotonic() - began < 60.0 * args.minutes:
        chosen = random.Random(number)
        part = cut_part(documents, chosen)
        sessions = answered(engine, recorder, part, questions_over(part, chosen))
        append_chats(args.out, sessions, number)
        written = sum(len(session.answer) for session in sessions)
        print(
            f"round {number}: {len(part.text):,} characters, {len(sessions)} answers, {written} "
            f"tokens, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        number += 1


if __name__ == "__main__":
    main()
