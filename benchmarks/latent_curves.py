"""Rules over continuous latents along their settings: steps, floor, window, r and s.

    OMP_NUM_THREADS=1 python benchmarks/latent_curves.py [--model latent-tiles] [--images 6]
        [--json FILE]

The script varies one setting at a time from 16 denoising steps, a floor of 0.1 and a window of 12
drafts: T 8 to 64, floors 0.05 to 0.2, windows 4 to 16, then r of near and s of horizon. In every
cell the variants and the target alone, with the same steps and floor, draw single pictures in
changing order with guidance 2. The figures are latents a forward, and the median of plain seconds
by those of the variant. The model was trained with one schedule, and this script does not measure
the quality of its pictures with others. A cell has few pictures, so its median is rough.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.image_timing import ImageSeries, time_variants
from harness.latent_table import make_latent_rows
from harness.latent_variants import build_latent_variant, parse_latent_variants

from ragspec.visual import ImagePipeline

USUAL: dict[str, Any] = {"steps": 16, "floor": 0.1, "window": 12}
VARIED: dict[str, tuple[Any, ...]] = {
    "steps": (8, 16, 32, 64),
    "floor": (0.05, 0.1, 0.2),
    "window": (4, 8, 12, 16),
}
RULES = ("near@0.02", "aligned", "horizon@4", "path")
RADII = tuple(f"near@{r:g}" for r in (0.01, 0.02, 0.05, 0.1, 0.2))
STEPS = tuple(f"horizon@{s}" for s in (1, 2, 4, 8, 16))


def cells(only: list[str]) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Yield the varied setting, all settings, and the rules to draw with."""
    for name, values in VARIED.items():
        for value in values:
            if name in only:
                yield name, {**USUAL, name: value}, RULES
    for name, rules in (("r", RADII), ("s", STEPS)):
        if name in only:
            yield name, USUAL, rules


def measure(
    pipe: ImagePipeline, settings: dict[str, Any], rules: tuple[str, ...], images: int
) -> list[dict[str, Any]]:
    """Return the figures of the rules with these settings."""
    base = ImagePipeline(
        pipe.model,
        pipe.tokenizer,
        None,
        steps=settings["steps"],
        floor=settings["floor"],
        folder=pipe.folder,
    )
    variants = {
        variant: build_latent_variant(variant, base, settings["window"], 1)
        for variant in parse_latent_variants(rules)
    }
    classes = list(range(int(base.family.trunk.config.num_classes)))
    timed = time_variants(
        variants, ImageSeries(classes, True, 2.0, 1.0, 0, 0), images, lambda line: None
    )
    names = (
        "variant",
        "codes_per_forward",
        "ratio",
        "accepted",
        "psnr",
        "distance_mean",
        "seconds",
    )
    rows = [row.to_dict() for row in make_latent_rows(timed, None)]
    return [settings | {name: row[name] for name in names} for row in rows]


def main() -> None:
    """Print a line for each cell and rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="latent-tiles", help="image set or folder")
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument(
        "--only", default="steps,floor,window,r,s", help="settings to vary, comma-separated"
    )
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    pipe = ImagePipeline.from_pretrained(inputs.model, None)
    records: list[dict[str, Any]] = []
    for varied, settings, rules in cells(inputs.only.split(",")):
        for row in measure(pipe, settings, rules, inputs.images):
            records.append({"varied": varied, "images": inputs.images} | row)
            print(
                f"{varied:7} T {row['steps']:<3} floor {row['floor']:<5} window {row['window']:<3} "
                f"{row['variant']:10} {row['codes_per_forward']:.2f} a forward, "
                f"{row['ratio']:.2f}x",
                flush=True,
            )
        if inputs.json is not None:
            inputs.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
