"""Rules over continuous latents beside plain drawing: latents a forward, seconds, likeness.

    OMP_NUM_THREADS=1 python benchmarks/latents.py [--set latent-tiles] [--images 64] [--json FILE]

Pictures one at a time, the ways in turns, guidance 2, the same seeds. For each way: latents a
forward of decoding, the median over pictures of plain seconds by its own, and the median signal-
to-noise ratio to the plain picture of the seed.
"""

from __future__ import annotations

import argparse
import json
from math import inf, log10
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragspec.visual import LatentPipeline

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "near@0.02": {"rule": "near", "r": 0.02},
    "near@0.1": {"rule": "near", "r": 0.1},
    "aligned": {"rule": "aligned"},
    "horizon@2": {"rule": "horizon", "s": 2},
    "horizon@4": {"rule": "horizon", "s": 4},
    "path": {"rule": "path"},
}


def draw(pipe: LatentPipeline, label: int, seed: int) -> Any:
    """Draw one picture."""
    return pipe(class_labels=[label], generator=torch.Generator().manual_seed(seed))


def psnr(first: Any, second: Any) -> float:
    """Return the peak signal-to-noise ratio of two pictures of 0 to 255, in dB."""
    apart = torch.tensor(list(first.tobytes())).float() - torch.tensor(list(second.tobytes()))
    error = float(apart.square().mean())
    return 10.0 * log10(255.0**2 / error) if error else inf


def measure(name: str, images: int) -> dict[str, dict[str, Any]]:
    """Draw the pictures in every way and return its figures."""
    pipes = {}
    for way, given in WAYS.items():
        pipes[way] = LatentPipeline.from_pretrained(name, **given)
        pipes[way].set_progress_bar_config(disable=True)
        draw(pipes[way], 0, 0)  # warms up
    classes = int(pipes["plain"].trunk.config.num_classes)
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for image in range(images):
        order = list(WAYS)[image % len(WAYS) :] + list(WAYS)[: image % len(WAYS)]
        for way in order:
            found[way].append(draw(pipes[way], image % classes, 1000 + image))
    plain = found["plain"]
    return {way: figures(drawn, plain) for way, drawn in found.items()}


def figures(drawn: list[Any], plain: list[Any]) -> dict[str, Any]:
    """Return what is known of one way."""
    forwards = sum(sum(r.forwards for r in each.stats.reports) for each in drawn)
    latents = sum(sum(r.tokens - 1 for r in each.stats.reports) for each in drawn)
    pairs = list(zip(drawn, plain, strict=True))
    return {
        "latents_per_forward": latents / forwards,
        "speed": median(two.stats.seconds / one.stats.seconds for one, two in pairs),
        "psnr": median(psnr(one.images[0], two.images[0]) for one, two in pairs),
        "label": drawn[0].label,
        "images": len(drawn),
    }


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="latent-tiles")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.set, given.images)
    for way, row in found.items():
        print(
            f"{way:12} {row['latents_per_forward']:.2f} a forward, {row['speed']:.2f}x, "
            f"{row['psnr']:.1f} dB to plain, {row['label']}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
