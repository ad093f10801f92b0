"""Let a chat model write what a draft head learns from: prompts, and its own answers to them.

    python training/chat_answers.py --shared DIR --out answers.jsonl --minutes 60
    python training/chat_answers.py --shared DIR --out passages.jsonl --minutes 10 --passages

With --passages it reads parts of documents instead, as general text. Most prompts are the model's
own (as in Magpie, arXiv 2406.08464: it goes on after the chat template's opening of a user's turn,
and after the first words of one, so that there is enough of each kind); the rest ask about passages
of permissive documents. Half of the answers are greedy; all end where they begin to repeat. A line
has the ids of a chat, without what the prefix cache had, and where the answer starts; their hidden
states are kept beside it (see `stored_states`). A run that was ended goes on with the next round.
No share-alike text is read.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from stored_states import Recording, StateRecorder, append_chats, next_round
from text_data import Document, read_documents

from ragspec import Engine, Sampling
from ragspec.drafters.heads.head import default_taps
from ragspec.sampling.stopping import EndRepetition, repeats

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands where a user's words go in the template
GROUPS, OF_GROUP, PASSAGES = 6, 14, 14  # openings of a round, prompts of each, and passages
NEW_TOKENS = 300
LONGEST_LOCAL = 110
WARM = 0.7  # temperature of half of the answers
OPENINGS = Path(__file__).with_name("openings.txt").read_text(encoding="utf-8").splitlines()
PASSAGE = (300, 1600)  # characters
READ = 64  # parts of documents of a round
MOST_TRIES = 100  # of cutting one, where paragraphs are too long for it
REQUESTS = (
    "Summarize: {passage}",
    "Summarize the following text in two sentences.\n\n{passage}",
    "What are the main points of this passage?\n\n{passage}",
    "Explain the following in simple words:\n\n{passage}",
    "{passage}\n\nWhat does the text above say about {title}?",
    "Use the following passage to answer the question.\n\nPassage: {passage}\n\nQuestion: What is "
    "said about {title}?",
    "Write three questions that this text answers, and answer them.\n\n{passage}",
    "Rewrite this text so that it is shorter and clearer.\n\n{passage}",
    "What is {title}?",
    "Tell me how {title} works, and give an example.",
)


def turn_parts(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template writes before a user's words, and after them."""
    before, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    ).split(MARK)
    return before, after


def local_prompts(engine: Engine, before: str, opening: str, count: int, seed: int) -> list[str]:
    """Return prompts with the same first words, which the model ends itself."""
    ids = engine.tokenizer(before + opening, add_special_tokens=False)["input_ids"]
    written = engine.generate(
        [ids] * count,
        Sampling(temperature=1.0, top_p=0.95, seed=range(seed * count, (seed + 1) * count)),
        max_new_tokens=LONGEST_LOCAL,
    )
    sound = (w for w in written if w.finish_reason == "stop" and not repeats(w.tokens[:-1]))
    return [text for w in sound if len(text := (opening + w.text).strip()) >= 12]


def passage_prompts(documents: list[Document], count: int, random_: random.Random) -> list[str]:
    """Return prompts about passages that are cut at paragraphs from anywhere in a document."""
    results: list[str] = []
    for _ in range(MOST_TRIES * count):
        if len(results) == count:
            break
        document = random_.choice(documents)
        blocks = document.text[random_.randrange(max(1, len(document.text) - PASSAGE[1])) :]
        passage = "\n\n".join(blocks[: random_.randint(*PASSAGE)].split("\n\n")[1:-1]).strip()
        if len(passage) >= PASSAGE[0]:
            template = random_.choice(REQUESTS)
            results.append(template.format(passage=passage, title=document.title))
    return results


def answered(
    engine: Engine,
    recorder: StateRecorder,
    prompts: list[str],
    parts: tuple[str, str],
    sampling: Sampling | None = None,
) -> list[Recording]:
    """Return whole chats with the model's answers, which end where they begin to repeat.

    Args:
        recorder: The engine's drafter.
    """
    texts = [parts[0] + prompt + parts[1] for prompt in prompts]
    ids = [engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    recorder.sessions.clear()
    ends = [EndRepetition(0)]
    engine.generate(ids, sampling, max_new_tokens=NEW_TOKENS, stopping_criteria=ends)
    return [session for session in recorder.sessions if len(session.answer) > 2]


def parts_read(
    engine: Engine, recorder: StateRecorder, documents: list[Document], chosen: random.Random
) -> list[Recording]:
    """Return parts from anywhere in documents, all of which is learned.

    Args:
        recorder: The engine's drafter.
    """
    weights, ids = [len(document.text) for document in documents], []
    for document in chosen.choices(documents, weights, k=READ):
        start = chosen.randrange(max(1, len(document.text) - PASSAGE[1]))
        text = document.text[start : start + PASSAGE[1]]
        ids.append(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    recorder.sessions.clear()
    engine.generate(ids, max_new_tokens=2, ignore_eos=True)
    for session in recorder.sessions:
        session.start = 1
    return recorder.sessions


def main() -> None:
    """Write rounds of chats until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/lm/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="another one for each process")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--passages", action="store_true", help="read parts of documents instead")
    args = parser.parse_args()
    documents = read_documents(args.shared)
    writer = Engine.from_pretrained(
        args.model, drafter=None, dtype=args.dtype, max_batch_size=args.batch_size
    )
    target, parts = writer.target, turn_parts(writer.tokenizer)
    recorder = StateRecorder(default_taps(target))
    size = args.batch_size
    engine = Engine(target, writer.tokenizer, recorder, budget=1, max_batch_size=size)
    width = len(recorder.order) * target.config.hidden_size
    number, began = next_round(args.out, width), time.monotonic()
    while time.monotonic() - began < 60.0 * args.minutes:
        chosen = random.Random(f"{args.seed} {number}")
        if args.passages:
            chats = parts_read(engine, recorder, documents, chosen)
        else:
            prompts = passage_prompts(documents, PASSAGES, chosen)
            for opening in chosen.sample(OPENINGS, GROUPS):
                seed = chosen.randrange(1 << 20)
                prompts += local_prompts(writer, parts[0], opening, OF_GROUP, seed)
            prompts = sorted(set(prompts))
            chosen.shuffle(prompts)
            half = len(prompts) // 2
            warm = Sampling(temperature=WARM, seed=range(number * 1000, number * 1000 + half))
            chats = answered(engine, recorder, prompts[half:], parts)
            chats += answered(engine, recorder, prompts[:half], parts, warm)
        append_chats(args.out, chats, number)
        print(f"round {number}: {len(chats)} texts, {time.monotonic() - began:.0f} s", flush=True)
        number += 1


if __name__ == "__main__":
    main()
