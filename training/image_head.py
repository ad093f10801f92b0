"""Train the draft heads of the starter image sets, after their targets are exported.

A head learns from the target's states on the training pictures, changed as they were for the
target, one in ten without its condition. Some minutes each on one core; to be run again whenever
the target has changed, since a head fits no other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from image_data import SETS, read_pictures, split
from image_train import Rows
from masters import readable

from ragspec.drafters.heads.files import save_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.training.image_texts import code_texts
from ragspec.training.trainer import HeadTrainer, HeadTraining, TrainingProgress
from ragspec.visual.families.llamagen import LlamaGen
from ragspec.visual.loading import find_folder
from ragspec.visual.models.vq import VQTokenizer

BATCH = 16
PICTURES = 8000


def notify(progress: TrainingProgress) -> None:
    """Print how a training is doing, now and then."""
    if progress.step % 100 == 0:
        print(
            f"step {progress.step}: loss {progress.loss:.3f}, best code right in "
            f"{progress.agreement:.1%}, {progress.seconds:.0f} s",
            flush=True,
        )


def train(kind: str, args: argparse.Namespace) -> DraftHead:
    """Train the head of a set on pictures drawn anew."""
    folder = find_folder(args.models / kind)
    model = LlamaGen.load_model(folder.target, dtype="float32")
    rng = torch.Generator().manual_seed(args.seed)
    tokenizer = VQTokenizer.from_pretrained(args.models / "tokenizer")
    rows = Rows(tokenizer, split(read_pictures(args.shared, kind))[0], args.embedder)
    sample = [rows.draw(100, rng) for _ in range(args.pictures // 100)]
    codes, inputs = (torch.cat(parts) for parts in zip(*sample, strict=True))
    target, texts = code_texts(model, codes, inputs, rng)
    settings = HeadTraining(
        steps=args.steps,
        seconds=60 * args.minutes,
        batch_size=BATCH,
        length=len(texts[0]),
        seed=args.seed,
    )
    trainer = HeadTrainer(target, texts, settings)
    for progress in trainer.run():
        notify(progress)
    return trainer.head.eval()


def main() -> None:
    """Read the arguments and write a head beside each target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--embedder", type=Path, default=Path("ragspec/starter/embedder"))
    parser.add_argument("--models", type=Path, default=Path("ragspec/starter/images"))
    parser.add_argument("--minutes", type=float, default=4.0, help="most minutes of a set")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    for kind in args.sets:
        print(kind, flush=True)
        out = args.models / kind / "head"
        save_head(train(kind, args), out, torch.bfloat16)
        readable(out)


if __name__ == "__main__":
    main()
