"""Train the VQ tokenizer of the starter image models on a CPU, resumable, ending at a given time.

One book for both sets. The codes follow the running mean of what is nearest to them; codes that
nothing is near to are moved to latents that have no near code, so that the whole book is used.
After `--freeze` book and encoder stay and the decoder alone goes on: codes keep their meaning.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from image_data import BACKGROUND, SETS, Pictures, augment, read_pictures, split
from masters import FAST, HALVES, save_whole, timed_steps
from text_train import rate_factor, seconds_until
from torch import Tensor
from torch.nn import functional

from ragspec.visual.models.vq import VQTokenizer

CODES = 1024
CODE_SIZE = 8
WIDTHS = (16, 32, 48)
BATCH = 32
WARM_UP = 300
SHARES = {"emoji": 0.4, "tones": 0.1, "tiles": 0.5}


def build_model(codes: int = CODES, widths: tuple[int, ...] = WIDTHS) -> Any:
    """Build a `VQModel` that halves the side once for every width but the last."""
    from diffusers import VQModel

    return VQModel(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        latent_channels=widths[-1],
        vq_embed_dim=CODE_SIZE,
        num_vq_embeddings=codes,
        norm_num_groups=8,
        layers_per_block=1,
        mid_block_add_attention=False,
        sample_size=32,
    )


def picture_loss(instance: Tensor, selection: Tensor) -> Tensor:
    """Compare pictures [B, 3, H, W] by pixels, by edges at two scales, and by hue.

    Squares alone blur; the differences between neighbouring pixels ask for the edges as well. Few
    pictures differ along the axis of red and green, and without the last term it is left out.
    """
    error = instance - selection
    loss = error.abs().mean() + error.square().mean()
    red, green, blue = functional.avg_pool2d(error, 2).unbind(1)
    loss = loss + (red - green).abs().mean() + 0.5 * (blue - (red + green) / 2).abs().mean()
    for scale in range(2):
        error = functional.avg_pool2d(error, 2) if scale else error
        loss = loss + 0.5 * error.diff(dim=2).abs().mean() + 0.5 * error.diff(dim=3).abs().mean()
    return loss


def spread_loss(latents: Tensor) -> Tensor:
    """Compare the second moments of unit latents [M, d] with those of an even spread."""
    size = latents.shape[1]
    moments = latents.T @ latents / len(latents)
    return (size * moments - torch.eye(size)).square().mean()


class Trainer:
    """The model, the running means of its codes, the optimiser and the step."""

    def __init__(self, model: Any, seed: int, rate: float) -> None:
        """Begin with a book of random directions."""
        self.model = model
        self.rng = torch.Generator().manual_seed(seed)
        self.rate = rate
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01
        )
        codes, size = model.quantize.embedding.weight.shape
        book = functional.normalize(torch.randn(codes, size, generator=self.rng), dim=-1)
        self.counts = torch.ones(codes)
        self.sums = book.clone()
        self.book = book
        model.quantize.embedding.weight.requires_grad_(False)
        self.step = 0
        self.frozen = False

    def freeze(self) -> None:
        """From here on train the decoder alone."""
        self.frozen = True
        for part in (self.model.encoder, self.model.quant_conv):
            part.requires_grad_(False)

    def look_up(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Give the unit latents f32 [M, d] and their codes i64 [M] of pictures [B, 3, H, W]."""
        with torch.autocast("cpu", FAST, enabled=not self.frozen and HALVES):
            latents = self.model.quant_conv(self.model.encoder(images))
        latents = functional.normalize(latents.float().permute(0, 2, 3, 1), dim=-1)
        flat = latents.flatten(0, 2)
        return flat, (flat.detach() @ self.book.T).argmax(-1)

    def update(self, images: Tensor, factor: float) -> dict[str, float]:
        """Do one step at `factor` of the rate; returns the figures for the log."""
        latents, codes = self.look_up(images)
        if self.step == WARM_UP:
            self.start_book(latents.detach())
        chosen = self.book[codes]
        commitment = (latents - chosen).square().sum(-1).mean()
        passed = latents + (chosen - latents).detach() if self.step >= WARM_UP else latents
        side = images.shape[2] // 2 ** (len(self.model.config.block_out_channels) - 1)
        passed = passed.unflatten(0, (-1, side, side)).permute(0, 3, 1, 2)
        with torch.autocast("cpu", FAST, enabled=HALVES):
            instance = self.model.decoder(self.model.post_quant_conv(passed))
        loss = picture_loss(instance.float(), images)
        total = loss if self.frozen else loss + 0.05 * spread_loss(latents)
        if self.step >= WARM_UP and not self.frozen:
            total = total + 0.1 * commitment
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * factor
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.step >= WARM_UP and not self.frozen:
            self.move_codes(latents.detach(), codes, restart=self.step % 50 == 49 and factor > 0.3)
        self.step += 1
        mse = float((instance.detach().float() - images).square().mean())
        figures = {"loss": loss, "commitment": commitment, "spread": spread_loss(latents)}
        return {"mse": mse} | {key: float(value.detach()) for key, value in figures.items()}

    def start_book(self, latents: Tensor) -> None:
        """Put every code on one of the latents f32 [M, d] of a step."""
        taken = torch.randperm(len(latents), generator=self.rng)[: len(self.book)]
        self.book[: len(taken)] = latents[taken]
        self.sums, self.counts = self.book.clone(), torch.ones(len(self.book))

    def move_codes(self, latents: Tensor, codes: Tensor, restart: bool, keep: float = 0.98) -> None:
        """Let the codes follow their latents; on `restart` move the unused ones elsewhere."""
        counts = torch.bincount(codes, minlength=len(self.counts)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, codes, latents)
        self.counts.lerp_(counts, 1 - keep)
        self.sums.lerp_(sums, 1 - keep)
        # Codes that nothing was near to keep their place until they are moved.
        known = self.sums.norm(dim=-1) > 1e-6
        self.book[known] = functional.normalize(self.sums[known], dim=-1)
        if restart:
            dead = (self.counts < 0.05).nonzero()[:, 0]
            # Far from its code, or in a crowd that shares one: either could do with a new code.
            error = (latents - self.book[codes]).square().sum(-1) + 1e-4
            taken = torch.multinomial(error, len(dead), generator=self.rng) if len(dead) else dead
            self.book[dead] = latents[taken]
            self.sums[dead], self.counts[dead] = latents[taken], 1.0

    def tokenizer(self) -> VQTokenizer:
        """Give a copy as a tokenizer."""
        from copy import deepcopy

        model = deepcopy(self.model)
        model.quantize.embedding.weight.data.copy_(self.book)
        return VQTokenizer(model)

    def save(self, path: Path) -> None:
        """Write everything needed to go on, beside first and then in place."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "book": self.book,
            "counts": self.counts,
            "sums": self.sums,
            "rng": self.rng.get_state(),
            "step": self.step,
            "frozen": self.frozen,
        }
        save_whole(state, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint written by `save`."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.book, self.counts, self.sums = state["book"], state["counts"], state["sums"]
        self.rng.set_state(state["rng"])
        self.step = state["step"]
        if state["frozen"]:
            self.freeze()


def psnr(tokenizer: VQTokenizer, pictures: Pictures) -> float:
    """Measure the mean peak signal-to-noise ratio of reconstructions, in dB."""
    instance = tokenizer.decode(tokenizer.encode(pictures.images))
    mse = (instance - pictures.images).square().mean((1, 2, 3)).clamp_min(1e-8)
    return float((10 * torch.log10(4 / mse)).mean())


def codes_in_use(tokenizer: VQTokenizer, sets: list[Pictures]) -> int:
    """Count the codes that the pictures of `sets` use."""
    used = [tokenizer.encode(pictures.images).unique() for pictures in sets]
    return len(torch.cat(used).unique())


def batch(parts: dict[str, Pictures], size: int, rng: torch.Generator) -> Tensor:
    """Draw augmented pictures from every part by its share: f32 [about size, 3, 32, 32]."""
    sample = []
    for name, pictures in parts.items():
        rows = torch.randint(len(pictures), (round(size * SHARES[name]),), generator=rng)
        sample.append(augment(pictures.images[rows], BACKGROUND[pictures.kind], rng))
    return torch.cat(sample)


def train(
    trainer: Trainer,
    parts: dict[str, Pictures],
    held: list[Pictures],
    folder: Path,
    seconds: float,
    decay: float,
) -> None:
    """Train for `seconds`, the last `decay` of them with a falling rate; log and save as it goes.

    SIGTERM ends the run after the current step, with a checkpoint.
    """
    with (folder / "log.jsonl").open("a") as log:
        for left in timed_steps(seconds, partial(trainer.save, folder / "last.pt")):
            began = time.monotonic()
            factor = rate_factor(trainer.step, left, decay)
            line: dict[str, float] = {"step": trainer.step, "factor": round(factor, 3)}
            figures = trainer.update(batch(parts, BATCH, trainer.rng), factor)
            line |= {key: round(value, 4) for key, value in figures.items()}
            line["seconds"] = round(time.monotonic() - began, 3)
            if trainer.step % 100 == 0:
                tokenizer = trainer.tokenizer()
                line |= {f"psnr_{one.kind}": round(psnr(tokenizer, one), 2) for one in held}
                line["used"] = int((trainer.counts > 0.02).sum())
            print(json.dumps(line), file=log, flush=True)


def main() -> None:
    """Read the arguments, resume where there is a checkpoint, train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/images/tokenizer"))
    parser.add_argument("--stop-at", default="22:35", help="time of the day, HH:MM")
    parser.add_argument("--decay-minutes", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--freeze", action="store_true", help="train the decoder alone")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    parts, held = {}, []
    for kind in SETS:
        parts[kind], other = split(read_pictures(args.shared, kind))
        held.append(other)
    tones, known = read_pictures(args.shared, "emoji", tones=True), set(held[0].names)
    rows = [row for row, name in enumerate(tones.names) if name not in known]
    parts["tones"] = tones.part(torch.tensor(rows))
    trainer = Trainer(build_model(), args.seed, args.rate)
    if (args.out / "last.pt").exists():
        trainer.load(args.out / "last.pt")
    if args.freeze:
        trainer.freeze()
    train(trainer, parts, held, args.out, seconds_until(args.stop_at), args.decay_minutes * 60)
    tokenizer = trainer.tokenizer()
    tokenizer.save_pretrained(args.out / "model")
    whole = [read_pictures(args.shared, kind) for kind in SETS]
    print({one.kind: round(psnr(tokenizer, one), 2) for one in held})
    print("codes in use", codes_in_use(tokenizer, whole), "of", tokenizer.vocab_size)


if __name__ == "__main__":
    main()
