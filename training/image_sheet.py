"""Draw sheets of samples or reconstructions as PNG files, for a person to judge."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmark_path  # noqa: F401
import torch
from evaluation.pictures import sheet
from image_data import CAPTION_LENGTH, SETS, read_pictures
from PIL import Image
from torch import Tensor

from ragspec.visual.models.captions import CaptionEncoder
from ragspec.visual.models.vq import VQTokenizer

PROMPTS = (
    "grinning face",
    "crying face",
    "tiger face",
    "penguin",
    "red heart",
    "green heart",
    "red apple",
    "pizza",
    "rocket",
    "ship",
    "tulip",
    "evergreen tree",
    "full moon",
    "snowman",
    "basketball",
    "candle",
    "house",
    "key",
    "umbrella",
    "fish",
    "fire",
    "train",
    "ribbon",
    "snail",
)


@torch.no_grad()
def draw(
    model: Any,
    inputs: Tensor,
    guidance: float,
    temperature: float,
    top_k: int,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw codes i64 [B, n] for conditions `inputs`, all rows together, code by code.

    Also gives the entropy of every distribution that was drawn from, f32 [B, n] in nats.
    """
    from transformers import DynamicCache

    rows = len(inputs)
    state = torch.cat([model.condition(inputs), model.unconditional(rows)])
    cache, chosen, entropies = DynamicCache(config=model.config), [], []
    for _ in range(model.config.grid_size**2):
        logits = model(
            inputs_embeds=state, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        with_it, without = logits.float().chunk(2)
        logits = (without + guidance * (with_it - without)) / temperature
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
        distribution = logits.softmax(-1)
        entropies.append(torch.special.entr(distribution).sum(-1))
        codes = torch.multinomial(distribution, 1, generator=rng)
        chosen.append(codes)
        state = model.embed_tokens(codes).repeat(2, 1, 1)
    return torch.cat(chosen, 1), torch.stack(entropies, 1)


@torch.no_grad()
def agreement(target: Any, draft: Any, inputs: Tensor, codes: Tensor) -> dict[str, float]:
    """Compare both models on codes [B, n] that the target drew: nats, overlap, equal first choice.

    `overlap`: mean of sum min(p, q), the rate at which rejection accepts a drafted code.
    """
    distributions = []
    for model in (target, draft):
        out = model(codes[:, :-1], condition_embeds=model.condition(inputs), use_cache=False)
        distributions.append(out.logits[:, -codes.shape[1] :].float().softmax(-1))
    p, q = distributions
    overlap = torch.minimum(p, q).sum(-1)
    equal = (p.argmax(-1) == q.argmax(-1)).float()
    return {"overlap": float(overlap.mean()), "first_choice": float(equal.mean())}


def to_images(pictures: Tensor) -> list[Image.Image]:
    """Make PIL images of pictures f32 [B, 3, H, W] in [-1, 1]."""
    bytes_ = ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in bytes_]


def selection(kind: str, model: Any, embedder: Path) -> tuple[Tensor, list[str]]:
    """Give the conditions of a sheet with their names: prompts, or every class."""
    if kind == "tiles":
        names = [model.config.id2label[number] for number in range(model.config.num_classes)]
        return torch.arange(len(names)), names
    return CaptionEncoder.from_pretrained(embedder, CAPTION_LENGTH)(PROMPTS), list(PROMPTS)


def reconstructions(tokenizer: VQTokenizer, shared: Path, kind: str, count: int) -> Image.Image:
    """Lay pictures of a set beside what the tokenizer makes of them."""
    pictures = read_pictures(shared, kind)
    rows = torch.linspace(0, len(pictures) - 1, count).long()
    images = pictures.images[rows]
    instance = tokenizer.decode(tokenizer.encode(images))
    pairs = torch.stack([images, instance], 1).flatten(0, 1)
    return sheet(to_images(pairs), columns=16, side=64, title=f"{kind}: originals, decoded")


def samples(folder: Path, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Draw a sheet with the target and the draft of a set; returns what was measured."""
    from ragspec.visual.models.llamagen import LlamaGenModel

    tokenizer = VQTokenizer.from_pretrained(folder / "tokenizer")
    models = [
        LlamaGenModel.from_pretrained(folder / kind / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    ]
    inputs, names = selection(kind, models[0], args.embedder)
    inputs = inputs.repeat_interleave(args.each, 0)
    names = [name for name in names for _ in range(args.each)]
    figures: dict[str, Any] = {"set": kind, "guidance": args.guidance, "top_k": args.top_k}
    figures["temperature"] = args.temperature
    for label, model in zip(("target", "draft"), models, strict=True):
        rng = torch.Generator().manual_seed(args.seed)
        codes, entropy = draw(model, inputs, args.guidance, args.temperature, args.top_k, rng)
        figures[f"{label}_entropy"] = round(float(entropy.mean()), 3)
        if label == "target":
            result = agreement(models[0], models[1], inputs, codes)
            figures |= {key: round(value, 3) for key, value in result.items()}
        title = f"{kind} {label}, guidance {args.guidance:g}, temperature {args.temperature:g}"
        picture = sheet(
            to_images(tokenizer.decode(codes)), names, columns=args.columns, side=96, title=title
        )
        picture.save(args.out / f"{kind}-{label}-g{args.guidance:g}-t{args.temperature:g}.png")
    return figures


def main() -> None:
    """Write the sheets and print the figures as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--folder", type=Path, default=Path("ragspec/starter/images"))
    parser.add_argument("--embedder", type=Path, default=Path("ragspec/starter/embedder"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/images/sheets"))
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=1024)
    parser.add_argument("--each", type=int, default=2, help="pictures for each condition")
    parser.add_argument("--columns", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reconstructions", action="store_true", help="of the tokenizer instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in args.sets:
        if args.reconstructions:
            tokenizer = VQTokenizer.from_pretrained(args.folder / "tokenizer")
            picture = reconstructions(tokenizer, args.shared, kind, 64)
            picture.save(args.out / f"{kind}-reconstructions.png")
        else:
            print(json.dumps(samples(args.folder, kind, args)))


if __name__ == "__main__":
    main()
