"""Train the draft head of a chat model on its own answers, with EAGLE-3's form and rounds.

    python training/chat_answers.py --shared DIR --out answers.jsonl --minutes 60
    python training/chat_head.py --answers answers.jsonl --passages passages.jsonl --work WORK \\
        --out HEAD

Answers over long documents (`long_answers.py`) serve as well, with the head to begin with as
--start. A fresh head begins as the model's last layer, its logits are by the model's own rows, and
only answers and passages are learned, not prompts. Answers alone are soon known by heart. The
second stage adds rounds in which the head reads itself: without them its second token is rarely
right. Both go on from where they were ended. The head is written in 8 bits; `auto` drafts with the
one in `heads/NAME` of the cache.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from stored_states import StoredStates, read_chats

from ragspec.drafters.heads.files import open_head, save_head
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import DraftHead, default_taps
from ragspec.drafters.heads.vocabulary import frequent_tokens
from ragspec.models.load import load_model
from ragspec.training.files import CHECKPOINT
from ragspec.training.loss import agreement
from ragspec.training.run import HeadRun, stop_signals
from ragspec.training.trainer import HeadTrainer, HeadTraining, TrainingProgress, load_state
from ragspec.verification.causal import CausalTarget

HELD_OUT = 40  # answers that judge the head
ENDLESS = 1_000_000  # steps: the minutes end a stage
LONGEST = 1024  # tokens of a text


def stage(
    target: CausalTarget,
    states: StoredStates,
    held_out: StoredStates,
    out: Path,
    settings: HeadTraining,
    head: DraftHead | None,
) -> None:
    """Train for the minutes of a stage, or what is left of them."""
    if (out / "config.json").is_file() and not (out / CHECKPOINT).is_file():
        return
    texts = [chat.ids for chat in states.chats]
    trainer = HeadTrainer(target, texts, settings, head=head, read=states.read)
    judged = [held_out.read([number]) for number in range(len(held_out.chats))]
    run = HeadRun(trainer, out, judged, print)
    if (out / CHECKPOINT).is_file():
        run.resume(load_state(out))

    def report(step: TrainingProgress) -> None:
        if step.step % 50 == 0:
            print(f"{step.part:.0%}: loss {step.loss:.3f}, agreement {step.agreement:.3f}")

    with stop_signals() as stop:
        last = run.run(report, stop)
    run.finish(last)
    share = agreement(trainer.head, target, judged)
    about = {"out": out.name, "steps": trainer.steps, "texts": len(texts), "agreement": share}
    print(json.dumps(about), flush=True)


def main() -> None:
    """Run what is left of both stages and write the head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, help="as they were written"
    )
    parser.add_argument("--passages", type=Path, nargs="*", default=[], help="what it read besides")
    parser.add_argument("--start", type=Path, help="a head for the second stage; none: a fresh one")
    parser.add_argument("--work", type=Path, required=True, help="for both stages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=3, help="rounds of the second stage")
    parser.add_argument("--minutes", type=float, nargs=2, default=(50.0, 40.0))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = CausalTarget(load_model(args.model, "cpu", args.dtype)[0])
    longest = min(LONGEST, target.max_length or LONGEST)  # the trainer would split a longer one
    width = (1 + len(default_taps(target))) * target.config.hidden_size
    chats = [chat for path in args.answers for chat in read_chats(path, width, longest)]
    held_out = chats[-HELD_OUT:]  # with the rest of their rounds, so that no subject is learned
    groups = {chat.group for chat in held_out}
    learned = [chat for chat in chats if chat.group not in groups]
    if not learned:
        parser.error(
            f"got {len(groups)} rounds; expected more, as the last {HELD_OUT} answers judge"
        )
    more = [part for path in args.passages for part in read_chats(path, width, longest)]
    stored = StoredStates(target, learned + more), StoredStates(target, held_out)
    first, second = args.work / "first", args.work / "second"
    minutes = [60.0 * each for each in args.minutes]
    if args.start is None:
        texts = [chat.ids[chat.start :] for chat in learned]
        tokens = frequent_tokens(texts, args.vocabulary, target.vocab_size)
        generator = torch.Generator().manual_seed(0)
        head = fresh_head(target, generator, form="eagle3", tokens=tokens, learns_rows=False)
        settings = HeadTraining(ENDLESS, minutes[0], batch_size=4, length=LONGEST, noise=0.0)
        stage(target, *stored, first, settings, head)
    head = open_head(args.start or first, target).to(target.device)
    settings = HeadTraining(
        ENDLESS, minutes[1], batch_size=4, length=LONGEST, noise=0.0, depth=args.depth
    )
    stage(target, *stored, second, settings, head)
    save_head(open_head(second, target), args.out, "int8")


if __name__ == "__main__":
    main()
