"""Train the causal model of continuous latents of an image set on a CPU; resumable.

    python training/latent_train.py --set tiles --minutes 30 --out runs/latents

Latents are those of the starter tokenizer without its look-up, of pictures that are changed anew
whenever they are drawn. The loss is the square error of the clean latent at several times of each,
weighted by what is left of it, which keeps early and late steps of one size.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from image_data import BACKGROUND, augment, read_pictures, split
from image_export import readable
from image_model import CONDITIONS, GRID, use_plain_attention
from image_train import CHANGES, DROPPED
from masters import save_whole
from torch import Tensor

from ragspec.visual.latents.model import LatentConfig, LatentModel
from ragspec.visual.latents.schedule import noised
from ragspec.visual.models.vq import VQTokenizer

BATCH, TIMES = 32, 4  # pictures of a step, and times of each latent
TRUNK = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3}
RATE, WARM_UP, DECAY, KEEP = 2e-3, 100, 0.3, 0.999
TOKENIZER = Path("ragspec/starter/images/tokenizer")
ROUGH = 0.3  # most noise, in deviations, of latents that are read: what is drawn is never perfect


class Rows:
    """Pictures of a set as rows of standardised latents."""

    def __init__(self, tokenizer: VQTokenizer, pictures: Any) -> None:
        self.tokenizer, self.pictures = tokenizer, pictures
        counts = torch.bincount(pictures.labels)
        self.odds = counts.float().rsqrt()[pictures.labels]

    def draw(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw latents f32 [count, 64, D] of changed pictures, and their labels."""
        picked = torch.multinomial(self.odds, count, replacement=True, generator=rng)
        kind = self.pictures.kind
        images = augment(self.pictures.images[picked], BACKGROUND[kind], rng, *CHANGES[kind])
        return self.tokenizer.latents(images), self.pictures.labels[picked]


def loss_of(
    model: LatentModel, latents: Tensor, labels: Tensor, rng: torch.Generator, rough: float = ROUGH
) -> Tensor:
    """Return the weighted square error of clean latents."""
    rows, count, width = latents.shape
    clean = model.standardised(latents)
    given = model.trunk.condition(labels)
    none = model.trunk.unconditional(rows)
    dropped = torch.rand(rows, generator=rng) < (DROPPED if rough else 0.0)
    given = torch.where(dropped[:, None, None], none, given)
    share = rough * torch.rand(rows, 1, 1, generator=rng)
    read = clean + share * torch.randn(clean.shape, generator=rng)
    states = model.states(read, given).reshape(rows * count, -1)
    times = torch.rand(TIMES, rows * count, generator=rng).flatten()
    wanted = clean.reshape(-1, width).repeat(TIMES, 1)
    noisy = noised(wanted, torch.randn(wanted.shape, generator=rng), times)
    told = model.head.state(states).repeat(TIMES, 1)
    error = (model.head.denoise(noisy, times, told) - wanted).square().mean(-1)
    return (error * (1.0 + 1.0 / (0.1 + times))).mean()


class Trainer:
    """The model of one set with its rows, its optimiser and the running mean of its weights."""

    def __init__(self, pictures: Any, tokenizer: VQTokenizer, steps: int, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.rows, self.held = (Rows(tokenizer, part) for part in split(pictures))
        trunk = {"grid_size": GRID, **TRUNK, **CONDITIONS[pictures.kind]}
        self.model = LatentModel(LatentConfig(steps=steps, trunk=trunk)).train()
        self.model.trunk.config.id2label = dict(enumerate(pictures.classes))
        self.model.config.trunk["id2label"] = dict(enumerate(pictures.classes))
        use_plain_attention(self.model.trunk)
        self.rng = torch.Generator().manual_seed(seed)
        sample = self.rows.draw(512, self.rng)[0].flatten(0, 1)
        self.model.mean.copy_(sample.mean(0))
        self.model.deviation.copy_(sample.std(0))
        self.mean = {key: value.detach().clone() for key, value in self.model.named_parameters()}
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step = 0

    def update(self, factor: float) -> float:
        """Do one step at `factor` of the rate; returns the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (self.step + 1) / WARM_UP) * factor
        loss = loss_of(self.model, *self.rows.draw(BATCH, self.rng), self.rng)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        keep = min(KEEP, 1 - 1 / (self.step + 1))
        with torch.no_grad():
            for key, value in self.model.named_parameters():
                self.mean[key].lerp_(value, 1 - keep)
        return float(loss.detach())

    @torch.no_grad()
    def measure(self) -> float:
        """Return the loss on held-out pictures, always under the same noise."""
        fixed = self.held.draw(256, torch.Generator().manual_seed(5))
        return float(loss_of(self.model, *fixed, torch.Generator().manual_seed(7), rough=0.0))

    def save(self, path: Path) -> None:
        """Write everything needed to go on."""
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"mean": self.mean, "step": self.step, "rng": self.rng.get_state()}
        save_whole(state, path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.mean, self.step = state["mean"], state["step"]
        self.rng.set_state(state["rng"])

    def export(self, out: Path) -> None:
        """Write the running mean in bfloat16, as a folder that `LatentPipeline` reads."""
        with torch.no_grad():
            for key, value in self.model.named_parameters():
                value.copy_(self.mean[key])
        self.model.trunk.set_attn_implementation("sdpa")
        self.model.to(torch.bfloat16).eval().save_pretrained(out / "target")
        readable(out / "target")


def main() -> None:
    """Train for the minutes given, from the checkpoint where there is one, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="tiles", choices=["tiles"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/latents"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=16, help="of the denoising")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = read_pictures(args.shared, args.set)
    trainer = Trainer(pictures, VQTokenizer.from_pretrained(TOKENIZER), args.steps)
    path = args.out / f"{args.set}.pt"
    if path.exists():
        trainer.load(path)
    train(trainer, path, 60.0 * args.minutes)
    trainer.export(args.out / f"latent-{args.set}")


def train(trainer: Trainer, path: Path, seconds: float) -> None:
    """Train for `seconds`, the last third of them with a falling rate."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    began = saved = time.monotonic()
    while (spent := time.monotonic() - began) < seconds and not stop.is_set():
        loss = trainer.update(min(1.0, (seconds - spent) / (DECAY * seconds)))
        if trainer.step % 100 == 0:
            line = {"step": trainer.step, "loss": round(loss, 4)}
            line |= {"held": round(trainer.measure(), 4), "seconds": round(spent)}
            print(json.dumps(line), flush=True)
        if time.monotonic() - saved > 120:
            saved = time.monotonic()
            trainer.save(path)
    trainer.save(path)


if __name__ == "__main__":
    main()
