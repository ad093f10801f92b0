"""Train the draft head of a chat model on its answers over long documents.

    python training/long_answers.py --shared DIR --out long.jsonl --minutes 40
    python training/long_head.py --answers long.jsonl --start HEAD --work WORK --out HEAD

The head reads what it reads in use: the target's states of the chunks that a question finds, as the
document gave them, then those of the question and the answer, each where its token stands; and
every answer once more without the chunks, as where none were kept. It learns from answers alone.
States are worked out once and kept in WORK; the training goes on from
where it was ended, and the best head on documents kept apart is written, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ragspec import Engine
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head, save_head
from ragspec.needs import LAST
from ragspec.pipelines.answering.long_document import LongDocument
from ragspec.retrievers.search.documents import Document
from ragspec.training.batches import StateRead
from ragspec.training.loss import agreement
from ragspec.training.run import HeadRun
from ragspec.training.trainer import CHECKPOINT, HeadTrainer, HeadTraining, load_state
from ragspec.verification.causal import CausalTarget

DISTANCE = 12  # one document in so many is kept apart
JUDGED = 64  # answers over them
ENDLESS = 1_000_000  # steps: the minutes end the training


@dataclass(frozen=True, slots=True)
class Answer:
    """What a head reads over one answer: pairs of a token and the state before it.

    tokens, places i64 [T]; states bf16 [T, H], the one at a token follows the pair of its number.
    learned: the first pair that the head is to learn from.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    learned: int


class AnswerReader:
    """Reads answers as batches of pairs; see `ragspec.training.batches.Reads`."""

    def __init__(self, target: CausalTarget, answers: Sequence[Answer]) -> None:
        self.target, self.answers = target, answers

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return some of the answers, padded on the right."""
        results = [self.answers[number] for number in numbers]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        with torch.no_grad():
            embedded = self.target.embed(pad([each.tokens for each in results])).float()
        at = torch.arange(embedded.shape[1])
        lengths = torch.tensor([[len(each.tokens)] for each in results])
        firsts = torch.tensor([[each.learned] for each in results])
        return StateRead(
            embedded,
            pad([each.states.float() for each in results]),
            (at >= firsts) & (at < lengths),
            pad([each.places for each in results]),
        )


def paired(tokens: Sequence[int], parts: Sequence[tuple[int, torch.Tensor]], prompt: int) -> Answer:
    """Return the pairs of a text as a head's cache holds them.

    parts: where states [n, H] begin in the text, in its order; the last reach to its end. prompt:
    tokens before the answer. A pair is a token and the state before it, so that of every part the
    token behind it belongs to it, and the first pair stands at number 1.
    """
    before = torch.cat([torch.arange(start, start + len(states)) for start, states in parts])
    after = torch.cat([before[:1], before[:-1] + 1])
    learned = int((after[1:] < prompt).sum()) + 1
    states = torch.cat([states for _, states in parts]).to(torch.bfloat16)
    return Answer(torch.tensor(tokens)[after], states, after, learned)


def without_chunks(answer: Answer) -> Answer:
    """Return the pairs behind the last gap, those of the question and the answer."""
    gaps = (answer.places.diff() != 1).nonzero()
    first = int(gaps[-1]) if len(gaps) else 0
    return Answer(
        answer.tokens[first:], answer.states[first:], answer.places[first:], answer.learned - first
    )


def read_record(engine: Engine, record: dict[str, Any]) -> list[Answer]:
    """Return the answers over one part of a document, which is read once."""
    opened = LongDocument.open(Document(record["title"], record["title"], record["text"]), engine)
    result = list[Answer]()
    for chat in record["chats"]:
        prompt = opened.prompt(chat["question"]).token_ids
        text = [*prompt, *chat["answer"]]
        assert opened.states is not None
        spans = opened.chunks.spans(chat["question"], opened.prefix)
        known = opened.states.of((LAST,))[0]
        parts = [(start, known[start:end]) for start, end in spans]
        states = engine.prefill(text, states=(LAST,))
        assert states is not None
        read = len(text) - len(states)
        result.append(paired(text, [*parts, (read, states.of((LAST,))[0])], len(prompt)))
    return result


def accepted_answers(engine: Engine, records: Sequence[dict[str, Any]], work: Path) -> list[Answer]:
    """Return the answers over some documents, those that were read before from a file."""
    results = []
    for record in records:
        path = work / f"states-{record['round']}.safetensors"
        if not path.is_file():
            answers = read_record(engine, record)
            flat = {
                f"{number}.{name}": getattr(each, name).contiguous()
                for number, each in enumerate(answers)
                for name in ("tokens", "states", "places")
            }
            learned = torch.tensor([each.learned for each in answers])
            part = path.with_suffix(".part")
            save_file({**flat, "learned": learned}, part)
            part.rename(path)
            print(f"read {record['round']}: {len(answers)} answers", flush=True)
        flat = load_file(path)
        for number, learned in enumerate(flat["learned"].tolist()):
            parts = (flat[f"{number}.{name}"] for name in ("tokens", "states", "places"))
            results.append(Answer(*parts, learned))
    return results


def main() -> None:
    """Work out what is lacking of the states, and train for the minutes that are left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="what long_answers.py wrote")
    parser.add_argument("--start", type=Path, required=True, help="the head to begin with")
    parser.add_argument("--work", type=Path, required=True, help="for states and the training")
    parser.add_argument("--out", type=Path, help="where to write the head; none: states alone")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in args.answers.read_text("utf-8").splitlines()]
    engine = Engine.from_pretrained(args.model, drafter=None, dtype=args.dtype)
    engine = Engine(engine.target, engine.tokenizer, HeadDrafter(args.start, engine.target))
    learned = [record for number, record in enumerate(records) if number % DISTANCE]
    answers = accepted_answers(engine, learned, args.work)
    answers += [without_chunks(answer) for answer in answers]
    judged = AnswerReader(
        engine.target, accepted_answers(engine, records[::DISTANCE], args.work)[:JUDGED]
    )
    if args.out is None:
        return
    settings = HeadTraining(
        steps=ENDLESS,
        seconds=60.0 * args.minutes,
        batch_size=4,
        length=max(len(answer.tokens) for answer in answers),
        learning_rate=args.rate,
        depth=args.depth,
    )
    head = open_head(args.start)
    reader = AnswerReader(engine.target, answers)
    texts = [answer.tokens.tolist() for answer in answers]
    trainer = HeadTrainer(engine.target, texts, settings, head=head, reader=reader)
    reads = [judged.read([number]) for number in range(len(judged.answers))]
    run = HeadRun(trainer, args.work, lambda: agreement(trainer.head, engine.target, reads), print)
    if (args.work / CHECKPOINT).is_file():
        trainer.resume(load_state(args.work))
    print(f"{len(answers)} answers; before: {run.judge():.4f}", flush=True)
    for progress in trainer.run():
        if progress.step % 50 == 0:
            run.save_checkpoint()
            best = run.best[0] if run.best else float("nan")
            print(
                f"step {progress.step}: loss {progress.loss:.3f}, {progress.agreement:.3f}, "
                f"apart {best:.4f}, {progress.seconds:.0f} s",
                flush=True,
            )
    run.update_best()
    run.write()
    save_head(open_head(args.work), args.out, torch.bfloat16)


if __name__ == "__main__":
    main()
