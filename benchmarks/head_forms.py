"""Acceptance by depth of every form of draft head, trained alike on one target's own texts.

    OMP_NUM_THREADS=1 python benchmarks/head_forms.py --data DIR/lm --model starter

The model continues the beginnings of texts; each form learns from most continuations for as many
steps, and drafts chains of the others under greedy decoding. A row has the share of drafted tokens
at each depth that are accepted, among those whose chain was accepted so far, and the tokens a
forward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness.data import read_records

from ragspec import Engine
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.fresh import FORMS
from ragspec.training.trainer import HeadTrainer, HeadTraining

DEPTH, BEGINNING = 4, 24  # drafted tokens, and tokens of a text that the model continues


def read_beginnings(data: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Return the first tokens of texts that have more."""
    texts = (str(record["text"]) for record in read_records(data / "train.jsonl.gz"))
    every = (tokenizer(text[:400])["input_ids"] for text in texts)
    return list(islice((each[:BEGINNING] for each in every if len(each) > BEGINNING), count))


def accepted_by_depth(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
    """Return the share of accepted tokens at each depth, and the tokens a forward."""
    reached, accepted, whole = [0] * DEPTH, [0] * DEPTH, [0, 0]
    for prompt in prompts:
        result = engine.generate(list(prompt), max_new_tokens=tokens, ignore_eos=True)
        for step in result.steps[1:-1]:
            length = len(step.tokens) - 1
            for depth in range(min(length + 1, len(step.tree))):
                reached[depth] += 1
                accepted[depth] += depth < length
        whole[0] += len(result.tokens)
        whole[1] += len(result.steps)
    shares = [round(a / max(1, n), 3) for a, n in zip(accepted, reached, strict=True)]
    return {"by_depth": shares, "tokens_per_forward": round(whole[0] / whole[1], 3)}


def main() -> None:
    """Write the texts, train each form, and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl.gz")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--texts", type=int, default=320)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(args.model, dtype="float32", drafter=None, runtime="torch")
    prompts = read_beginnings(args.data, engine.tokenizer, args.texts + args.held_out)
    results = engine.generate(prompts, max_new_tokens=args.tokens, ignore_eos=True)
    texts = [[*p, *r.tokens] for p, r in zip(prompts, results, strict=True)]
    for form in args.forms:
        depth = {"eagle1": 2, "eagle3": 3}.get(form, 1)
        slots = None if form.startswith("eagle") else DEPTH
        settings = HeadTraining(args.steps, form=form, depth=depth, slots=slots, length=128)
        trainer, began = HeadTrainer(engine.target, texts[args.held_out :], settings), time.time()
        last = list(trainer.run())[-1]
        drafter = HeadDrafter(
            trainer.head.eval(), engine.target, DEPTH, width=1, min_expected_gain=0.0
        )
        head = Engine(engine.target, engine.tokenizer, drafter, budget=DEPTH)
        row = {"form": form, "loss": round(last.loss, 3), "seconds": round(time.time() - began)}
        row["weights"] = sum(each.numel() for each in trainer.head.parameters())
        row |= accepted_by_depth(head, prompts[: args.held_out], args.tokens)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
