"""Train the draft head of a chat model: first on plain text beside its own chats, then on these.

    python training/chat_answers.py --shared DIR --out chats.jsonl --minutes 60
    python training/chat_head.py --shared DIR --chats chats.jsonl --work WORK --out HEAD

Chats are dear, the model has to write them; passages of permissive documents only have to be read,
and teach the head most of what it needs. Both stages go on from where they were ended. The head is
written in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from text_data import read_documents

from ragspec.drafters.heads.checkpoint import CONFIG
from ragspec.drafters.heads.files import open_head, save_head
from ragspec.pipelines.cli.train_head import HeadOptions, train_from_files
from ragspec.pipelines.console.options import PlaceOptions
from ragspec.pipelines.console.terminal import Terminal
from ragspec.training.trainer import CHECKPOINT, HeadTraining

PASSAGE = 1200  # characters, about 300 tokens
CHATS = "chats.jsonl"
ENDLESS = 1_000_000  # steps: the minutes end a stage


def write_passages(shared: Path, out: Path, count: int) -> None:
    """Write passages from anywhere in permissive documents, the longer of them more often."""
    chosen = random.Random(0)
    documents = read_documents(shared)
    weights = [len(document.text) for document in documents]
    with out.open("w", encoding="utf-8") as stream:
        for document in chosen.choices(documents, weights, k=count):
            start = chosen.randrange(max(1, len(document.text) - PASSAGE))
            passage = document.text[start : start + PASSAGE]
            stream.write(json.dumps({"text": passage}, ensure_ascii=False) + "\n")


def stage(args: argparse.Namespace, data: Path, out: Path, settings: HeadTraining) -> None:
    """Train for the minutes of a stage, or what is left of them."""
    if (out / CONFIG).is_file() and not (out / CHECKPOINT).is_file():
        return
    start = args.work / "first" if out.name != "first" else None
    options = HeadOptions(
        data,
        out,
        PlaceOptions(dtype=args.dtype),
        args.model,
        start=start,
        resume=(out / CHECKPOINT).is_file(),
    )
    instance = train_from_files(options, settings, Terminal())
    print(json.dumps(instance), flush=True)


def main() -> None:
    """Run what is left of both stages and write the head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/lm/")
    parser.add_argument("--chats", type=Path, required=True, help="what chat_answers.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="for texts and both stages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--passages", type=int, default=1500)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=3, help="rounds of the second stage")
    parser.add_argument("--minutes", type=float, nargs=2, default=(35.0, 35.0))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = args.work / "texts"
    if not texts.is_dir():
        part = args.work / "part"
        part.mkdir(parents=True, exist_ok=True)
        write_passages(args.shared, part / "passages.jsonl", args.passages)
        (part / CHATS).write_bytes(args.chats.read_bytes())
        part.rename(texts)
    both = HeadTraining(
        steps=ENDLESS,
        seconds=60.0 * args.minutes[0],
        batch_size=4,
        length=320,
        draft_vocab_size=args.vocabulary,
    )
    stage(args, texts, args.work / "first", both)
    current = replace(both, seconds=60.0 * args.minutes[1], depth=args.depth)
    stage(args, texts / CHATS, args.work / "second", current)
    save_head(open_head(args.work / "second"), args.out, torch.bfloat16)


if __name__ == "__main__":
    main()
