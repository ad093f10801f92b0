"""Measure how many new images of the emoji set a person can name.

    python training/image_recognition.py --seed 101             # numbered sheets, and a key
    python training/image_recognition.py --seed 101 --answers FILE
    python training/image_recognition.py --seed 101 --latents latent-emoji

The viewer has the list of names and writes a line for each number: `17 red heart`, or `17 -` if no
name fits. The key, which only the second command reads, has the names of the images. The seed
determines the images; a new seed gives images that the viewer has not rated yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import benchmark_path  # noqa: F401
import torch
from evaluation.pictures import sheet
from image_sheet import PROMPTS, draw, selection, to_images
from PIL import Image

from ragspec.errors import InputError
from ragspec.visual.models.llamagen import LlamaGenModel
from ragspec.visual.models.vq import VQTokenizer

GUIDANCE, TEMPERATURE, TOP_K = 2.0, 1.0, 1024
_ON_A_SHEET, _COLUMNS, _SIDE = 40, 8, 128
_Z = 1.959964  # of a 95 % interval
NONE = "-"


def pictures_of(
    folder: Path, embedder: Path, seed: int, each: int
) -> tuple[list[Image.Image], list[str]]:
    """Draw so many pictures of each name with a seed; return them with their names, shuffled."""
    tokenizer = VQTokenizer.from_pretrained(folder / "tokenizer")
    model = LlamaGenModel.from_pretrained(folder / "emoji" / "target", dtype=torch.float32).eval()
    inputs, names = selection("emoji", model, embedder)
    rng = torch.Generator().manual_seed(seed)
    codes, _ = draw(model, inputs.repeat_interleave(each, 0), GUIDANCE, TEMPERATURE, TOP_K, rng)
    images = to_images(tokenizer.decode(codes))
    return shuffled(images, names, each, rng)


def latent_pictures_of(name: str, seed: int, each: int) -> tuple[list[Image.Image], list[str]]:
    """Draw so many pictures of each name with a model of latents, shuffled; see `pictures_of`."""
    from ragspec.visual import ImagePipeline

    pipe = ImagePipeline.from_pretrained(name, None)
    rng = torch.Generator().manual_seed(seed)
    sample = pipe(list(PROMPTS), num_images_per_prompt=each, guidance_scale=GUIDANCE, generator=rng)
    return shuffled(sample.images, list(PROMPTS), each, rng)


def shuffled(
    images: Sequence[Image.Image], names: Sequence[str], each: int, rng: torch.Generator
) -> tuple[list[Image.Image], list[str]]:
    """Return pictures, `each` of every name in turn, and their names in another order."""
    order = torch.randperm(len(images), generator=rng).tolist()
    return [images[row] for row in order], [names[row // each] for row in order]


def read_answers(text: str, count: int) -> list[str]:
    """Return the answers of lines `NUMBER NAME`, in order; raises InputError for missing ones."""
    pairs = [line.strip().partition(" ") for line in text.splitlines() if line.strip()]
    record = {int(number): name.strip().lower() for number, _, name in pairs if number.isdigit()}
    foreign = sorted(set(record.values()) - {*PROMPTS, NONE})
    if set(record) != set(range(count)) or foreign:
        missing = sorted(set(range(count)) - set(record))[:5]
        raise InputError(
            f"got {len(record)} answers (without {missing}, other names {foreign[:5]}); expected a "
            f"line for each number from 0 to {count - 1}, with a name of the list or -."
        )
    return [record[number] for number in range(count)]


def interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    share, z = right / count, _Z**2 / count
    middle = (share + z / 2) / (1 + z)
    half = _Z * (share * (1 - share) / count + z / (4 * count)) ** 0.5 / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def score(names: Sequence[str], answers: Sequence[str]) -> dict[str, object]:
    """Return how many answers are right, with the interval, and of which names."""
    hits = [name == answer for name, answer in zip(names, answers, strict=True)]
    by_name = dict.fromkeys(sorted(set(names)), 0)
    for name, hit in zip(names, hits, strict=True):
        by_name[name] += hit
    low, high = interval(sum(hits), len(hits))
    return {
        "pictures": len(hits),
        "right": sum(hits),
        "share": round(sum(hits) / len(hits), 3),
        "interval": [round(low, 3), round(high, 3)],
        "by_name": by_name,
    }


def main() -> None:
    """Write sheets and key, or score answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="a new one gives new images")
    parser.add_argument("--each", type=int, default=5, help="pictures of each name")
    parser.add_argument("--answers", type=Path, help="score these")
    parser.add_argument("--latents", help="draw with this model of latents")
    parser.add_argument("--folder", type=Path, default=Path("ragspec/starter/images"))
    parser.add_argument("--embedder", type=Path, default=Path("ragspec/starter/embedder"))
    parser.add_argument("--out", type=Path, default=Path("runs/images/recognition"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    key = args.out / f"key-{args.seed}.json"
    if args.answers is not None:
        names = json.loads(key.read_text(encoding="utf-8"))
        print(json.dumps(score(names, read_answers(args.answers.read_text(), len(names)))))
        return
    if args.latents is None:
        images, names = pictures_of(args.folder, args.embedder, args.seed, args.each)
    else:
        images, names = latent_pictures_of(args.latents, args.seed, args.each)
    key.write_text(json.dumps(names), encoding="utf-8")
    for start in range(0, len(images), _ON_A_SHEET):
        part = images[start : start + _ON_A_SHEET]
        numbers = [str(start + number) for number in range(len(part))]
        instance = sheet(part, numbers, columns=_COLUMNS, side=_SIDE)
        instance.save(args.out / f"sheet-{args.seed}-{start:03}.png")


if __name__ == "__main__":
    main()
