"""Train target and draft of the starter image sets on a CPU, resumable, ending at a given time.

Target and draft of a set share their rows: the target learns the codes of the pictures, the draft
the distribution that the target gives to the same row in the same step, so that one pass of the
target pays for both. With several sets the steps alternate. Weights are bfloat16, where that is
fast, and follow float32 masters; Muon moves the hidden matrices, AdamW embeddings, heads and norms.
A running mean of the masters is what gets exported: it is usable at any time.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from image_data import (
    BACKGROUND,
    SETS,
    Pictures,
    augment,
    captions,
    conditions,
    read_pictures,
    split,
)
from image_model import build_model, use_plain_attention
from masters import FAST, HALVES, move_masters, save_whole, timed_steps
from text_train import rate_factor, seconds_until
from torch import Tensor
from torch.nn import functional

from ragspec.visual.models.vq import VQTokenizer

BATCH = 32
CHANGES = {  # strength and share of mirror images, see `augment`
    "emoji": (0.4, 0.0),
    "tiles": (0.5, 0.5),
}
# Up to this share of a row's codes is read as those of another row, at the same places. Without it
# the emoji target recognised an image by its first codes and hardly read the name.
MISREAD = {"emoji": 0.25, "tiles": 0.2}
GROUPED = 0.15  # names replaced by that of the subgroup
DROPPED = 0.1  # conditions replaced by none
KEEP = 0.99  # of the running mean, per step
CODE_SHARE = 0.1  # of the draft's loss: the codes themselves, beside the target's distribution


class Rows:
    """The pictures of a set as rows of codes, encoded anew, with other changes, whenever drawn.

    Pictures of rare classes are drawn more often: with the inverse root of the class's size.
    """

    def __init__(self, tokenizer: VQTokenizer, pictures: Pictures, embedder: Path) -> None:
        """Prepare the conditions: labels i64 [n] or features f32 [n, L, 224]."""
        self.tokenizer = tokenizer
        self.pictures = pictures
        self.inputs = conditions(pictures, embedder)
        self.groups = captions(pictures.groups, embedder) if pictures.groups else None
        self.odds = torch.ones(len(pictures))
        if pictures.kind == "tiles":
            self.odds = torch.bincount(pictures.labels).float().rsqrt()[pictures.labels]

    def draw(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw codes i64 [count, 64] of changed pictures, and their conditions."""
        picked = torch.multinomial(self.odds, count, replacement=True, generator=rng)
        kind = self.pictures.kind
        images = augment(self.pictures.images[picked], BACKGROUND[kind], rng, *CHANGES[kind])
        inputs = self.inputs[picked]
        if self.groups is not None:
            grouped = torch.rand(count, generator=rng) < GROUPED
            inputs = torch.where(grouped[:, None, None], self.groups[picked], inputs)
        return self.encode(images), inputs

    def whole(self) -> tuple[Tensor, Tensor]:
        """Give codes and conditions of all pictures, unchanged."""
        return self.encode(self.pictures.images), self.inputs

    def encode(self, images: Tensor) -> Tensor:
        """Encode pictures; bfloat16, where it is fast, changes few codes."""
        with torch.autocast("cpu", FAST, enabled=HALVES):
            return self.tokenizer.encode(images)


def misread(codes: Tensor, most: float, rng: torch.Generator) -> Tensor:
    """Replace codes [B, n], or latents [B, n, D], by those of the next row.

    The share, up to `most`, differs by row.
    """
    share = most * torch.rand(len(codes), 1, generator=rng)
    wrong = torch.rand(codes.shape[:2], generator=rng) < share
    return torch.where(wrong if codes.ndim == 2 else wrong[..., None], codes.roll(1, 0), codes)


class Student:
    """A model in the fast type, its float32 masters with their running mean, and its optimisers."""

    def __init__(self, kind: str, name: str, muon_rate: float, adam_rate: float) -> None:
        """Build the model with torch's own generator and part its parameters."""
        self.model: Any = build_model(kind, name)
        self.masters = {key: p.detach().clone() for key, p in self.model.named_parameters()}
        self.mean = {key: p.clone() for key, p in self.masters.items()}
        self.model.to(FAST).train()
        use_plain_attention(self.model)
        hidden = [m for k, m in self.masters.items() if m.ndim == 2 and k.startswith("layers")]
        others = [m for k, m in self.masters.items() if m.ndim != 2 or not k.startswith("layers")]
        self.rates = (muon_rate, adam_rate)
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                hidden, lr=muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.01),
        ]

    def logits(self, codes: Tensor, inputs: Tensor, dropped: Tensor) -> Tensor:
        """Give the logits f32 [B * 64, V] behind codes [B, 64]; rows `dropped` have no condition.

        The last code of a row is not read.
        """
        condition = self.model.condition(inputs)
        none = self.model.unconditional(len(codes))
        condition = torch.where(dropped[:, None, None], none, condition)
        out = self.model(
            codes[:, :-1],
            condition_embeds=condition,
            use_cache=False,
            logits_to_keep=codes.shape[1],
        )
        logits: Tensor = out.logits.float().flatten(0, 1)
        return logits

    def apply_gradients(self, factor: float, step: int) -> None:
        """Move the masters by the clipped gradients, then the model and the running mean."""
        move_masters(self.model, self.masters, self.optimisers, self.rates, factor)
        keep = min(KEEP, 1 - 1 / (step + 1))
        with torch.no_grad():
            for key, mean in self.mean.items():
                mean.lerp_(self.masters[key], 1 - keep)

    def state(self) -> dict[str, Any]:
        """Give everything needed to go on."""
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        return {"masters": self.masters, "mean": self.mean, "optimisers": optimisers}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                self.masters[key].copy_(state["masters"][key])
                self.mean[key].copy_(state["mean"][key])
                parameter.copy_(self.masters[key])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


class Trainer:
    """Target and draft of one set, with their rows."""

    def __init__(self, kind: str, rows: Rows, held: Rows, seed: int, rates: Tensor) -> None:
        """Build both models with `seed`; rates [2, 2]: Muon's and AdamW's of target and draft."""
        torch.manual_seed(seed)
        self.kind, self.rows, self.held = kind, rows, held
        self.target = Student(kind, "target", *rates[0].tolist())
        self.draft = Student(kind, "draft", *rates[1].tolist())
        self.rng = torch.Generator().manual_seed(seed)
        self.step = 0

    def update(self, factor: float) -> dict[str, float]:
        """Do one step of both models at `factor` of their rates; returns losses in nats a code."""
        codes, inputs = self.rows.draw(BATCH, self.rng)
        dropped = torch.rand(BATCH, generator=self.rng) < DROPPED
        read = misread(codes, MISREAD[self.kind], self.rng)
        logits = self.target.logits(read, inputs, dropped)
        loss = functional.cross_entropy(logits, codes.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        distribution = logits.detach().softmax(-1)
        guess = self.draft.logits(read, inputs, dropped)
        hard = functional.cross_entropy(guess, codes.flatten())
        soft = functional.cross_entropy(guess, distribution)
        (CODE_SHARE * hard + (1 - CODE_SHARE) * soft).backward()
        self.target.apply_gradients(factor, self.step)
        self.draft.apply_gradients(factor, self.step)
        self.step += 1
        return {"target": float(loss.detach()), "draft": float(hard.detach())}

    def measure(self) -> dict[str, float]:
        """Measure on held-out pictures: nats a code, the target's entropy, agreement.

        `overlap`: mean of sum min(p, q), the rate at which rejection accepts a drafted code.
        """
        with torch.no_grad():
            codes, inputs = self.held.whole()
            none = torch.zeros(len(codes), dtype=torch.bool)
            target = self.target.logits(codes, inputs, none)
            draft = self.draft.logits(codes, inputs, none)
            p, q = target.softmax(-1), draft.softmax(-1)
            entropy = -(p * target.log_softmax(-1)).sum(-1).mean()
            figures = {
                "held_target": functional.cross_entropy(target, codes.flatten()),
                "held_draft": functional.cross_entropy(draft, codes.flatten()),
                "entropy": entropy,
                "overlap": torch.minimum(p, q).sum(-1).mean(),
                "agree": (target.argmax(-1) == draft.argmax(-1)).float().mean(),
            }
        return {key: float(value) for key, value in figures.items()}

    def save(self, path: Path) -> None:
        """Write everything needed to go on, beside first and then in place."""
        state = {"target": self.target.state(), "draft": self.draft.state()}
        state |= {"rng": self.rng.get_state(), "step": self.step}
        save_whole(state, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint written by `save`."""
        state = torch.load(path, weights_only=True)
        self.target.restore(state["target"])
        self.draft.restore(state["draft"])
        self.rng.set_state(state["rng"])
        self.step = state["step"]


def train(trainers: list[Trainer], folder: Path, seconds: float, decay: float) -> None:
    """Train the sets in turn for `seconds`, the last `decay` of them with a falling rate.

    A set that is named twice gets two steps a round.
    SIGTERM ends the run after the current step, with checkpoints.
    """
    with (folder / "log.jsonl").open("a") as log:
        for left in timed_steps(seconds, partial(save_all, trainers, folder)):
            for trainer in trainers:
                began = time.monotonic()
                factor = rate_factor(trainer.step, left, decay, 60)
                figures = trainer.update(factor)
                if trainer.step % 50 == 0:
                    figures |= trainer.measure()
                line: dict[str, Any] = {"set": trainer.kind, "step": trainer.step}
                line |= {key: round(value, 4) for key, value in figures.items()}
                line |= {"factor": round(factor, 3)}
                line["seconds"] = round(time.monotonic() - began, 2)
                print(json.dumps(line), file=log, flush=True)


def save_all(trainers: list[Trainer], folder: Path) -> None:
    """Write a checkpoint for every set."""
    for trainer in dict.fromkeys(trainers):
        trainer.save(folder / f"{trainer.kind}.pt")


def prepare(kind: str, args: argparse.Namespace) -> Trainer:
    """Read and split a set, build its models, and resume where there is a checkpoint."""
    tokenizer = VQTokenizer.from_pretrained(args.tokenizer)
    parts = split(read_pictures(args.shared, kind))
    rows, held = (Rows(tokenizer, part, args.embedder) for part in parts)
    rates = torch.tensor([[args.muon_rate, args.adam_rate]]) * torch.tensor([[1.0], [1.5]])
    trainer = Trainer(kind, rows, held, args.seed, rates)
    if (args.out / f"{kind}.pt").exists():
        trainer.load(args.out / f"{kind}.pt")
    return trainer


def main() -> None:
    """Read the arguments, resume where there are checkpoints, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["emoji", "emoji", "tiles"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/images/tokenizer/model"))
    parser.add_argument("--embedder", type=Path, default=Path("ragspec/starter/embedder"))
    parser.add_argument("--out", type=Path, default=Path("runs/images/models"))
    parser.add_argument("--stop-at", default="23:50", help="time of the day, HH:MM")
    parser.add_argument("--decay-minutes", type=float, default=20.0)
    parser.add_argument("--muon-rate", type=float, default=6e-3)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    trainers = {kind: prepare(kind, args) for kind in args.sets}
    train(
        [trainers[kind] for kind in args.sets],
        args.out,
        seconds_until(args.stop_at),
        args.decay_minutes * 60,
    )


if __name__ == "__main__":
    main()
