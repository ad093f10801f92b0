"""Train the causal model of continuous latents of an image set on a CPU; resumable.

    python training/latent_train.py --set tiles --minutes 30 --out runs/latents
    python training/latent_train.py --minutes 10 --draft runs/latents/latent-tiles/target
    python training/latent_train.py --set emoji --trunk ragspec/starter/images/emoji/target

Latents are those of the starter tokenizer without its look-up, of pictures that are changed anew
whenever they are drawn. The loss is the square error of the clean latent at several times of each,
weighted so that early and late steps have one size. A draft model learns the target's prediction
for the same noisy latent in place of the clean latent. `--trunk` takes the layers of a model of
codes, which already reads names, and freezes them: a small network learns to map a latent to the
embedding of its code, and then the head alone is trained.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from image_data import SETS, read_pictures, split
from image_model import CONDITIONS, GRID, SHAPES, use_plain_attention
from image_train import DROPPED, Rows, misread
from masters import FAST, HALVES, readable, save_whole, timed_steps
from safetensors.torch import load_file
from torch import Tensor

from ragspec.visual.families.latents import Latents
from ragspec.visual.latents.model import LatentConfig, LatentModel
from ragspec.visual.latents.sampler import OFFSET
from ragspec.visual.models.vq import VQTokenizer

BATCH, TIMES = 32, 4  # pictures of a step, and times of each latent
TRUNK = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3}
DRAFT_TRUNK = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
HEAD, DRAFT_HEAD = (128, 3), (96, 2)  # width and layers
UNGUIDED = 1 / 3  # dropped conditions of a draft model: its error at guidance 2 has that part
RATE, WARM_UP, DECAY, KEEP = 2e-3, 100, 0.3, 0.999
TAKEN = ("layers.", "norm.", "caption.", "class_embedding.", "embed_tokens.")  # of a model of codes
READ_WIDTH, READ_STEPS, READ_RATE = 384, 2000, 3e-3  # of the network that reads latents as codes
READ_BATCH, READ_PICTURES = 1024, 4096
TOKENIZER = Path("ragspec/starter/images/tokenizer")
EMBEDDER = Path("ragspec/starter/embedder")
ROUGH = 0.3  # most noise, in deviations, of latents that are read: what is drawn is never perfect
MISREAD = {
    "emoji": 0.25,
    "tiles": 0.0,
}  # most of a row that is read as another's, see `image_train`


class LatentRows(Rows):
    """Pictures of a set as rows of latents f32 [count, 64, D]."""

    def encode(self, images: Tensor) -> Tensor:
        """Return the latents of pictures, which no book rounds."""
        return self.tokenizer.latents(images)


def loss_of(
    model: LatentModel,
    rows: tuple[Tensor, Tensor],
    rng: torch.Generator,
    rough: float = ROUGH,
    teacher: LatentModel | None = None,
    most: float = 0.0,
) -> Tensor:
    """Return the weighted square error from clean latents, or from the teacher's predictions.

    rows: latents f32 [n, 64, D] and their conditions. rough: 0 measures, without dropping any.
    most: the largest share of a row that is read as another's, see `misread`.
    """
    latents, inputs = rows
    count, width = latents.shape[:2]
    clean = model.standardised(latents)
    share = UNGUIDED if teacher is not None else DROPPED
    dropped = torch.rand(count, generator=rng) < (share if rough else 0.0)
    noise = torch.randn(clean.shape, generator=rng)
    read = misread(clean, most, rng) if most else clean
    read = read + rough * torch.rand(count, 1, 1, generator=rng) * noise
    times = torch.rand(TIMES, count * width, generator=rng).flatten()
    selection = clean.flatten(0, 1).repeat(TIMES, 1)
    noisy = noised(selection, torch.randn(selection.shape, generator=rng), times)
    if teacher is not None:
        with torch.no_grad():
            selection = denoised(teacher, read, inputs, dropped, noisy, times)
    error = (denoised(model, read, inputs, dropped, noisy, times) - selection).square().mean(-1)
    return (error * (1.0 + 1.0 / (0.1 + times))).mean()


def take(model: LatentModel, source: Path, rows: LatentRows, rng: torch.Generator) -> None:
    """Give a model the trunk of a model of codes, teach it to read latents, and hold both."""
    weights = load_file(source / "model.safetensors")
    record = {key: value.float() for key, value in weights.items() if key.startswith(TAKEN)}
    book = record.pop("embed_tokens.weight")
    try:
        lacking = model.trunk.load_state_dict(record, strict=False).missing_keys
    except RuntimeError as error:  # of other sizes
        raise ValueError(f"{source} does not fit a trunk of {SHAPES['target']}") from error
    if lacking != ["embed_tokens.weight", "lm_head.weight"]:
        raise ValueError(f"{source} does not fit a trunk of {SHAPES['target']}: {lacking}")
    latents = torch.cat([rows.draw(64, rng)[0] for _ in range(READ_PICTURES // 64)]).flatten(0, 1)
    nearest = torch.cat([part @ rows.tokenizer.codebook().T for part in latents.split(8192)])
    learn_to_read(model, model.standardised(latents), book[nearest.argmax(-1)], rng)
    for part in (model.trunk, model.read):
        part.requires_grad_(False)


def learn_to_read(
    model: LatentModel, latents: Tensor, selection: Tensor, rng: torch.Generator
) -> None:
    """Fit the input network for noisy latents [N, D] to the embeddings of their codes [N, H]."""
    optimiser = torch.optim.AdamW(model.read.parameters(), lr=READ_RATE)
    for step in range(READ_STEPS):
        picked = torch.randint(len(latents), (READ_BATCH,), generator=rng)
        rough = ROUGH / 2 * torch.rand(READ_BATCH, 1, generator=rng)
        noisy = latents[picked]
        noisy = noisy + rough * torch.randn(noisy.shape, generator=rng)
        optimiser.param_groups[0]["lr"] = READ_RATE * min(1.0, 2.0 * (1 - step / READ_STEPS))
        (model.read(noisy) - selection[picked]).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()


def noised(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return latents [N, D] with noise added, each at its own time of [N]."""
    start = math.cos(OFFSET / (1.0 + OFFSET) * math.pi / 2.0)
    angle = (times + OFFSET) / (1.0 + OFFSET) * (math.pi / 2.0)
    share = (angle.cos() / start).square().clamp(1e-5, 1.0)[:, None]
    return share.sqrt() * clean + (1.0 - share).sqrt() * noise


def denoised(
    model: LatentModel, read: Tensor, inputs: Tensor, dropped: Tensor, noisy: Tensor, times: Tensor
) -> Tensor:
    """Return a model's prediction for noisy latents [TIMES * n * 64, D] after the rows `read`."""
    condition, none = model.trunk.condition(inputs), model.trunk.unconditional(len(inputs))
    condition = torch.where(dropped[:, None, None], none, condition)
    message = model.head.state(model.states(read, condition).flatten(0, 1)).repeat(TIMES, 1)
    return model.head.denoise(noisy, times, message)


class Trainer:
    """The model of one set with its rows, its optimiser and the running mean of its weights."""

    def __init__(
        self,
        pictures: Any,
        tokenizer: VQTokenizer,
        steps: int,
        seed: int = 1,
        teacher: LatentModel | None = None,
        taken: Path | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.most = MISREAD[pictures.kind]
        self.rows, self.held = (LatentRows(tokenizer, part, EMBEDDER) for part in split(pictures))
        self.teacher = teacher
        shape, (head_width, head_layers) = (
            (TRUNK, HEAD) if teacher is None else (DRAFT_TRUNK, DRAFT_HEAD)
        )
        if taken is not None:
            shape = SHAPES["target"]
        trunk = {"grid_size": GRID, **shape, **CONDITIONS[pictures.kind]}
        if pictures.classes:
            trunk["id2label"] = dict(enumerate(pictures.classes))
        config = LatentConfig(
            steps=steps,
            trunk=trunk,
            read_width=0 if taken is None else READ_WIDTH,
            head_width=head_width,
            head_layers=head_layers,
        )
        self.model: Any = LatentModel(config).train()
        use_plain_attention(self.model.trunk)
        self.rng = torch.Generator().manual_seed(seed)
        if teacher is None:
            sample = self.rows.draw(512, self.rng)[0].flatten(0, 1)
            self.model.mean.copy_(sample.mean(0))
            self.model.deviation.copy_(sample.std(0))
        else:
            use_plain_attention(teacher.trunk)
            self.model.mean.copy_(teacher.mean)
            self.model.deviation.copy_(teacher.deviation)
        if taken is not None:
            take(self.model, taken, self.rows, self.rng)
        self.prepare()

    def prepare(self) -> None:
        """Begin with the optimiser and the running mean of the weights."""
        self.mean = {key: value.detach().clone() for key, value in self.model.named_parameters()}
        learning = [each for each in self.model.parameters() if each.requires_grad]
        self.optimiser = torch.optim.AdamW(learning, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
        self.step = 0

    def loss(
        self, rows: tuple[Tensor, Tensor], rng: torch.Generator, rough: float = ROUGH
    ) -> Tensor:
        """Return the loss of rows; 0 as `rough` measures in full precision, see `loss_of`."""
        most = self.most if rough else 0.0
        with torch.autocast("cpu", FAST, enabled=HALVES and rough > 0):
            return loss_of(self.model, rows, rng, rough, self.teacher, most)

    def update(self, factor: float) -> float:
        """Do one step at `factor` of the rate; returns the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (self.step + 1) / WARM_UP) * factor
        loss = self.loss(self.rows.draw(BATCH, self.rng), self.rng)
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
        return float(self.loss(fixed, torch.Generator().manual_seed(7), rough=0.0))

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
        """Write the running mean in bfloat16, as a folder that `ImagePipeline` reads."""
        with torch.no_grad():
            for key, value in self.model.named_parameters():
                value.copy_(self.mean[key])
        self.model.trunk.set_attn_implementation("sdpa")
        place = out / ("target" if self.teacher is None else "draft")
        self.model.to(torch.bfloat16).eval().save_pretrained(place)
        readable(place)


def main() -> None:
    """Train for some minutes, from the checkpoint if there is one, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="tiles", choices=SETS)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/latents"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=16, help="of the denoising")
    parser.add_argument("--trunk", type=Path, help="folder of a model of codes to begin with")
    parser.add_argument("--draft", type=Path, help="folder of a target: train a draft model of it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = read_pictures(args.shared, args.set)
    teacher = None if args.draft is None else Latents.load_model(args.draft, "cpu", "float32")
    steps = args.steps if teacher is None else int(teacher.config.steps)
    tokenizer = VQTokenizer.from_pretrained(TOKENIZER)
    trainer = Trainer(pictures, tokenizer, steps, teacher=teacher, taken=args.trunk)
    path = args.out / f"{args.set}{'' if teacher is None else '-draft'}.pt"
    train(trainer, path, 60.0 * args.minutes)
    trainer.export(args.out / f"latent-{args.set}")


def train(trainer: Trainer, path: Path, seconds: float) -> None:
    """Train for `seconds`, from a checkpoint if there is one; the rate falls in the last third."""
    if path.exists():
        trainer.load(path)
    for left in timed_steps(seconds, partial(trainer.save, path)):
        loss = trainer.update(min(1.0, left / (DECAY * seconds)))
        if trainer.step % 100 == 0:
            line = {"step": trainer.step, "loss": round(loss, 4)}
            line |= {"held": round(trainer.measure(), 4), "seconds": round(seconds - left)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
