"""Train a masked model of continuous latents (MAR) of an image set on a CPU; resumable.

    python training/masked_train.py --set tiles --minutes 30 --out runs/masked

Rows, optimiser and running mean are those of `latent_train.py`. The loss is MAR's (Li et al., arXiv
2406.11838): the square error of the predicted noise at several times of every masked latent, and
the divergence of the predicted step from the true one, which teaches the variance alone (Nichol and
Dhariwal, 2102.09672). Where we deviate: the share of masked places is the cosine of a uniform
angle, as in the generation of an image, and the latents that the model reads have some noise.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from image_data import read_pictures, split
from image_export import halve
from image_model import CONDITIONS, GRID
from image_train import DROPPED
from latent_train import EMBEDDER, ROUGH, TOKENIZER, LatentRows, Trainer, train
from masters import FAST, HALVES, readable
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from ragspec.visual.masked.schedule import TRAINED, LearnedSchedule
from ragspec.visual.models.vq import VQTokenizer

SIZES = {
    **{"hidden_size": 64, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 192, "buffer_size": 4, "head_width": 80, "head_layers": 2},
}
TIMES = 2  # of each latent in a step
CLIP = 4.0  # deviations: a small model's first steps would else leave the latents' range


def loss_of(
    model: MaskedModel,
    schedule: LearnedSchedule,
    latents: Tensor,
    labels: Tensor,
    rng: torch.Generator,
    rough: float = ROUGH,
) -> Tensor:
    """Return the loss over the masked places of rows of latents [B, N, D]."""
    rows, places, width = latents.shape
    clean = model.standardised(latents)
    dropped = torch.rand(rows, generator=rng) < (DROPPED if rough else 0.0)
    condition, none = model.condition(labels, 2).chunk(2)
    inputs = torch.where(dropped[:, None], none, condition)
    share = rough * torch.rand(rows, 1, 1, generator=rng)
    read = clean + share * torch.randn(clean.shape, generator=rng)
    angle = float(torch.rand((), generator=rng)) * math.pi / 2.0
    masked = max(1, math.ceil(places * math.cos(angle)))
    order = torch.rand(rows, places, generator=rng).argsort(-1)
    states = model.states(read, order[:, masked:], inputs)
    hidden = order[:, :masked, None]
    message = model.head.cond_embed(states.gather(1, hidden.expand(-1, -1, states.shape[-1])))
    selection = clean.gather(1, hidden.expand(-1, -1, width))
    message, selection = (each.flatten(0, 1).repeat(TIMES, 1) for each in (message, selection))
    return noise_loss(model, schedule, message, selection, rng)


def noise_loss(
    model: MaskedModel,
    schedule: LearnedSchedule,
    message: Tensor,
    clean: Tensor,
    rng: torch.Generator,
) -> Tensor:
    """Return the head's loss at a random time of each latent [n, D]; told [n, width]."""
    times = torch.randint(TRAINED, (len(clean),), generator=rng)
    noise = torch.randn(clean.shape, generator=rng)
    tables = (schedule.alphas_cumprod, schedule.to_clean, schedule.least, schedule.most)
    selected, to_clean, least, most = (each[times, None].to(clean) for each in tables)
    noisy = selected.sqrt() * clean + (1.0 - selected).sqrt() * noise
    result, message_variance = model.head(noisy, times, message)
    result, message_variance = result.float(), message_variance.float()
    error = (result - noise).square()
    # The means differ by the error of the noise; the variance learns without moving the mean.
    difference = (to_clean.square() * (1.0 - selected) / selected) * error.detach()
    variance = least + (message_variance + 1.0) / 2.0 * (most - least)
    divergence = variance - least - 1.0 + (least - variance).exp() + difference * (-variance).exp()
    return error.mean() + divergence.mean() / (2.0 * math.log(2.0))


class MaskedTrainer(Trainer):
    """The masked model of one set with its rows, its optimiser and its running mean."""

    def __init__(self, pictures: Any, tokenizer: VQTokenizer, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.rows, self.held = (LatentRows(tokenizer, part, EMBEDDER) for part in split(pictures))
        self.rng = torch.Generator().manual_seed(seed)
        self.schedule = LearnedSchedule(TRAINED)
        sample = self.rows.draw(512, self.rng)[0].flatten(0, 1)
        config = MaskedConfig(
            latent_dim=sample.shape[-1],
            grid_size=GRID,
            num_classes=CONDITIONS[pictures.kind]["num_classes"],
            mean=sample.mean(0).tolist(),
            deviation=sample.std(0).tolist(),
            clip=CLIP,
            id2label=dict(enumerate(pictures.classes)),
            **SIZES,
        )
        self.model = MaskedModel(config).train()
        self.prepare()

    def loss(
        self, rows: tuple[Tensor, Tensor], rng: torch.Generator, rough: float = ROUGH
    ) -> Tensor:
        """Return the loss of rows of latents and labels."""
        # Over so few places the stock kernel's backward pass takes longer than all else.
        with torch.autocast("cpu", FAST, enabled=HALVES), sdpa_kernel(SDPBackend.MATH):
            return loss_of(self.model, self.schedule, *rows, rng, rough)

    def export(self, out: Path) -> None:
        """Write the running mean in 8 and 16 bits: a folder that `ImagePipeline` reads."""
        with torch.no_grad():
            for key, value in self.model.named_parameters():
                value.copy_(self.mean[key])
        self.model.to(torch.bfloat16).eval().save_pretrained(out / "target")
        halve(out / "target")
        readable(out / "target")


def main() -> None:
    """Train for some minutes, from the checkpoint if there is one, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="tiles", choices=["tiles"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/masked"))
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = read_pictures(args.shared, args.set)
    trainer = MaskedTrainer(pictures, VQTokenizer.from_pretrained(TOKENIZER))
    path = args.out / f"{args.set}.pt"
    train(trainer, path, 60.0 * args.minutes)
    trainer.export(args.out / f"masked-{args.set}")


if __name__ == "__main__":
    main()
