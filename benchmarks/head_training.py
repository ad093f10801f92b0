"""Speed and progress of training draft heads, by form and rounds.

    OMP_NUM_THREADS=1 python benchmarks/head_training.py --data TEXTS --model starter

Tokens a second of processor time are medians over the steps after the first epoch, whose states are
read before. The agreement is that of the last ten steps, in round one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median

import torch

from ragspec.models.load import load_model
from ragspec.pipelines.console.texts import TextColumns, read_texts
from ragspec.training.trainer import HeadTrainer, HeadTraining
from ragspec.verification.open import open_target


def main() -> None:
    """Train each form with each number of rounds, and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="as for `ragspec train-head`")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--forms", nargs="+", default=["eagle1", "eagle3"])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vocabulary", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model, "cpu", "float32")
    target = open_target(model)
    rows = read_texts([str(args.data)], TextColumns(), lambda path, reason: None)
    texts = [tokenizer(text)["input_ids"] for text, _ in zip(rows, range(args.texts), strict=False)]
    for form in args.forms:
        for depth in args.depths:
            settings = HeadTraining(
                args.steps, batch_size=4, depth=depth, draft_vocab_size=args.vocabulary, form=form
            )
            trainer = HeadTrainer(target, texts, settings)
            tokens = sum(map(len, trainer.batches.chunks)) / len(trainer.batches)
            ends, agreements = [time.process_time()], list[float]()
            for progress in trainer.run():
                ends.append(time.process_time())
                agreements.append(progress.agreement)
            first = len(trainer.batches)
            seconds = median(b - a for a, b in zip(ends[first:], ends[first + 1 :], strict=False))
            row = {"form": form, "depth": depth, "tokens_per_second": round(tokens / seconds)}
            print(json.dumps(row | {"agreement": round(mean(agreements[-10:]), 3)}), flush=True)


if __name__ == "__main__":
    main()
