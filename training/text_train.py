"""Train a starter text model on a CPU, resumable, ending at a given time of the day.

The model's weights are bfloat16, where that is fast, and follow float32 masters; the hidden
matrices are moved by Muon, embeddings and norms by AdamW. The learning rate warms up, stays, and
falls linearly to zero over the last minutes before `--stop-at`, so that a run ends well whenever it
has to end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from masters import FAST, move_masters, save_whole, timed_steps
from team import average_gradients, run_team, team_size
from text_data import read_documents, read_questions
from text_mix import Mix, Shares
from text_model import (
    HOP_LAYERS,
    SHAPES,
    Hints,
    PreviousToken,
    build_model,
    repeat_accuracy,
    use_block_attention,
    weighted_loss,
)
from torch import Tensor

STEP_TOKENS = 4096
MICRO_TOKENS = 4096
HINT_WEIGHT = 0.2


@dataclass(frozen=True)
class Phase:
    """From `tokens` seen on: shares of the mix and row lengths with their odds."""

    tokens: int
    shares: Shares
    lengths: dict[int, float]


TARGET_PHASES = (
    Phase(0, Shares(0.6, 0.3, 0.0), {256: 1.0}),
    Phase(2_500_000, Shares(0.4, 0.45, 0.3), {256: 0.5, 512: 0.5}),
    Phase(5_000_000, Shares(0.12, 0.78, 0.0), {256: 0.3, 512: 0.7}),
    Phase(12_500_000, Shares(0.08, 0.87, 0.0, 0.5), {256: 0.5, 512: 0.5}),
    Phase(17_500_000, Shares(0.12, 0.82, 0.3, 0.4), {256: 0.2, 512: 0.8}),
    Phase(18_900_000, Shares(0.3, 0.65, 0.8, 0.1), {512: 0.3, 1024: 0.67, 2048: 0.03}),
    # Prompts of use are about 1,000 tokens long, where copying still breaks off.
    Phase(22_720_000, Shares(0.2, 0.75, 1.0, 0.1), {1024: 0.4, 1536: 0.5, 2048: 0.1}),
    Phase(29_900_000, Shares(0.33, 0.63, 0.8, 0.1), {512: 0.15, 1024: 0.5, 1536: 0.3, 2048: 0.05}),
    # From here on passages come in the order of their rank, as in use: searching is what lags.
    Phase(60_340_000, Shares(0.2, 0.77, 0.9, 0.35), {512: 0.2, 1024: 0.6, 1536: 0.2}),
)
# Two layers can copy but not search: the draft learns what it can.
DRAFT_PHASES = (
    Phase(0, Shares(0.6, 0.3, 0.0), {256: 1.0}),
    Phase(2_500_000, Shares(0.4, 0.45, 0.3), {256: 0.7, 512: 0.3}),
    Phase(10_000_000, Shares(0.2, 0.65, 0.5), {512: 0.7, 1024: 0.3}),
)
PHASES = {"target": TARGET_PHASES, "draft": DRAFT_PHASES}


def phase_at(phases: tuple[Phase, ...], tokens: int) -> Phase:
    """Give the phase of the mix after `tokens` training tokens."""
    return [phase for phase in phases if phase.tokens <= tokens][-1]


class Trainer:
    """A model, its float32 masters, its two optimisers and its counters."""

    def __init__(self, name: str, seed: int, muon_rate: float, adam_rate: float) -> None:
        """Build the model with `seed` and split its parameters between the optimisers."""
        torch.manual_seed(seed)
        self.model: Any = build_model(name)
        # Token 0 ends texts here: its embedding must learn, so it is no padding to torch.
        self.model.model.embed_tokens.padding_idx = None
        self.masters = {key: p.detach().clone() for key, p in self.model.named_parameters()}
        self.model.to(FAST)
        use_block_attention(self.model)
        matrices = [m for k, m in self.masters.items() if m.ndim == 2 and "embed" not in k]
        others = [m for k, m in self.masters.items() if m.ndim != 2 or "embed" in k]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.phases = PHASES[name]
        kind = Hints if self.model.config.num_hidden_layers >= HOP_LAYERS[-1] else PreviousToken
        self.heads: Any = kind(self.model.config.hidden_size).to(FAST)
        self.optimisers.append(torch.optim.AdamW(self.heads.parameters()))
        self.rates = (muon_rate, adam_rate, 2e-3)
        self.step = 0
        self.tokens = 0

    def update(
        self, tokens: Tensor, weights: Tensor, factor: float, hints: Tensor | None = None
    ) -> tuple[float, float]:
        """Do one optimiser step on rows [B, T + 1] at `factor` of the rates.

        Returns the loss and the loss of the hints (0 without them).
        """
        total = float(weights[:, 1:].sum())
        micro = max(1, MICRO_TOKENS // (tokens.shape[1] - 1))
        loss = extra = 0.0
        for start in range(0, tokens.shape[0], micro):
            rows = slice(start, start + micro)
            hinted = None if hints is None else hints[rows]
            part, aside = weighted_loss(self.model, tokens[rows], weights[rows], hinted, self.heads)
            (part / total + HINT_WEIGHT * aside).backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach()) / total
            extra += float(aside.detach()) * (rows.stop - rows.start) / tokens.shape[0]
        self.apply_gradients(factor)
        self.step += 1
        self.tokens += team_size() * tokens.shape[0] * (tokens.shape[1] - 1)
        return loss, extra

    def apply_gradients(self, factor: float) -> None:
        """Move the masters by the clipped gradients and copy them into the model."""
        average_gradients([*self.model.parameters(), *self.heads.parameters()])
        move_masters(self.model, self.masters, self.optimisers, self.rates, factor)

    def save(self, path: Path) -> None:
        """Write everything needed to go on, beside first and then in place."""
        state = {
            "masters": self.masters,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "heads": self.heads.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
        }
        save_whole(state, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint written by `save`."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                self.masters[key].copy_(state["masters"][key])
                parameter.copy_(self.masters[key])
        if state.get("heads"):
            self.heads.load_state_dict(state["heads"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=False):
            optimiser.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]


def rate_factor(step: int, left: float, decay: float, warm_up: int = 100) -> float:
    """Give the share of the full rate: warm-up by steps, decay by the seconds that are left."""
    return min(1.0, (step + 1) / warm_up, max(0.0, left / decay))


def seconds_until(clock: str) -> float:
    """Count the seconds until the next `HH:MM`."""
    now = datetime.datetime.now()
    hour, minute = map(int, clock.split(":"))
    end = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if end <= now:
        end += datetime.timedelta(days=1)
    return (end - now).total_seconds()


def train(
    trainer: Trainer, mix: Mix, folder: Path, seconds: float, decay: float, rank: int = 0
) -> None:
    """Train for `seconds`, the last `decay` of them with a falling rate; log and save as it goes.

    SIGTERM ends the run after the current step, with a checkpoint. Of a team (see `team`) the
    first, of rank 0, keeps the time, logs and saves.
    """

    def save() -> None:
        if not rank:
            trainer.save(folder / "last.pt")

    with (folder / "log.jsonl").open("a") as log:
        for left in timed_steps(seconds, save, every=240):
            phase = phase_at(trainer.phases, trainer.tokens)
            rng = random.Random(f"length/{trainer.step}")
            length = rng.choices(list(phase.lengths), list(phase.lengths.values()))[0]
            rows = mix.batch(trainer.step, STEP_TOKENS // length, length, phase.shares)
            tokens = torch.tensor([row.tokens for row in rows])
            weights = torch.tensor([row.weights for row in rows])
            hints = torch.tensor([row.hints for row in rows])
            began = time.monotonic()
            factor = rate_factor(trainer.step, left, decay)
            loss, extra = trainer.update(tokens, weights, factor, hints)
            if rank:
                continue
            line: dict[str, float] = {"step": trainer.step, "tokens": trainer.tokens}
            line |= {"length": length, "loss": round(loss, 4), "factor": round(factor, 4)}
            line["hints"] = round(extra, 4)
            line["seconds"] = round(time.monotonic() - began, 2)
            if trainer.step % 50 == 0:
                line["repeat"] = round(repeat_accuracy(trainer.model, 8, 128, 1), 4)
            print(json.dumps(line), file=log, flush=True)


def work(rank: int, args: argparse.Namespace) -> None:
    """Train in one process of the team."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    folder = args.out or Path("runs/text") / args.model
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    seed = args.seed + 1000 * rank  # of the rows; the model's is the same for all
    mix = Mix(read_documents(args.shared), read_questions(args.shared), tokenizer, seed)
    trainer = Trainer(args.model, args.seed, args.muon_rate, args.adam_rate)
    if (folder / "last.pt").exists():
        trainer.load(folder / "last.pt")
    seconds = seconds_until(args.stop_at)
    train(trainer, mix, folder, seconds, args.decay_minutes * 60, rank)


def main() -> None:
    """Read the arguments, resume where there is a checkpoint, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="target")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/text/tokenizer"))
    parser.add_argument("--out", type=Path, default=None, help="default: runs/text/MODEL")
    parser.add_argument("--stop-at", default="18:00", help="time of the day, HH:MM")
    parser.add_argument("--decay-minutes", type=float, default=25.0)
    parser.add_argument("--muon-rate", type=float, default=5e-3)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    args = parser.parse_args()
    run_team(partial(work, args=args), args.workers)


if __name__ == "__main__":
    main()
