"""Train the causal model of continuous latents of an image set on a CPU; resumable.

    python training/latent_train.py --set tiles --minutes 30 --out runs/latents

Latents are those of the starter tokenizer without its look-up, of pictures that are changed anew
whenever they are drawn. The loss is the square error of the clean latent at several times of each,
weighted by what is left of it, which keeps early and late steps of one size.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from image_data import BACKGROUND, augment, read_pictures, split
from image_model import CONDITIONS, GRID, use_plain_attention
from image_train import CHANGES, DROPPED
from masters import save_whole
from torch import Tensor

from ragspec.visual.latents.model import LatentConfig, LatentModel
from ragspec.visual.latents.schedule import noised
from ragspec.visual.models.vq import VQTokenizer

BATCH, TIMES = 32, 4  # pictures of a step, and times of each latent
TRUNK = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3}
RATE, KEEP = 2e-3, 0.999
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


def main() -> None:
    """Train for the minutes given, from the checkpoint where there is one, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="tiles", choices=["tiles"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/latents"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = read_pictures(args.shared, args.set)
    tokenizer = VQTokenizer.from_pretrained(TOKENIZER)
    rows, held = (Rows(tokenizer, part) for part in split(pictures))
    config = LatentConfig(
        steps=args.steps, trunk={"grid_size": GRID, **TRUNK, **CONDITIONS[args.set]}
    )
    model = LatentModel(config).train()
    use_plain_attention(model.trunk)
    rng = torch.Generator().manual_seed(1)
    sample = rows.draw(512, rng)[0].flatten(0, 1)
    model.mean.copy_(sample.mean(0))
    model.deviation.copy_(sample.std(0))
    mean = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step, path = 0, args.out / f"{args.set}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        mean, step = state["mean"], state["step"]
        rng.set_state(state["rng"])
    fixed = held.draw(256, torch.Generator().manual_seed(5))
    began = saved = time.monotonic()
    seconds = 60.0 * args.minutes
    while (spent := time.monotonic() - began) < seconds:
        left = min(1.0, (seconds - spent) / (0.3 * seconds))
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 100) * left
        loss = loss_of(model, *rows.draw(BATCH, rng), rng)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            keep = min(KEEP, 1 - 1 / (step + 1))
            for key, value in model.named_parameters():
                mean[key].lerp_(value, 1 - keep)
        if step % 100 == 0:
            with torch.no_grad():
                model.eval()
                told = loss_of(model, *fixed, torch.Generator().manual_seed(7), rough=0.0)
                model.train()
            line = {
                "step": step,
                "loss": round(float(loss.detach()), 4),
                "held": round(float(told), 4),
            }
            print(json.dumps(line | {"seconds": round(spent)}), flush=True)
        if time.monotonic() - saved > 120:
            saved = time.monotonic()
            save(model, optimiser, mean, step, rng, path)
    save(model, optimiser, mean, step, rng, path)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(mean[key])
    model.trunk.set_attn_implementation("sdpa")
    model.config.id2label = dict(enumerate(pictures.classes))
    model.eval().save_pretrained(args.out / f"latent-{args.set}" / "target")


def save(
    model: Any, optimiser: Any, mean: dict[str, Tensor], step: int, rng: torch.Generator, path: Path
) -> None:
    """Write everything needed to go on."""
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "mean": mean}
    save_whole(state | {"step": step, "rng": rng.get_state()}, path)


if __name__ == "__main__":
    main()
