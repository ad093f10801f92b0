"""Rules over continuous latents along their settings: steps, floor, window, r and s.

    OMP_NUM_THREADS=1 python benchmarks/latent_curves.py [--set latent-tiles] [--images 6]
        [--json FILE]

One setting is moved at a time from 16 denoising steps, a floor of 0.1 and a window of 12 drafts:
T 8 to 64, floors 0.05 to 0.2, windows 4 to 16; then r of near and s of horizon. In every cell the
ways are drawn in turns with the target alone of the same steps and floor, pictures one at a time,
guidance 2: latents a forward, and the median of plain seconds by the way's own. A model that was
trained with one schedule is sampled with others here; what its pictures are worth then is not told.
Few pictures a cell: a median of six is rough.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.image_timing import ImageConfig, time_ways
from harness.latent_table import make_latent_rows
from harness.latent_ways import build_latent_variant, parse_latent_ways

from ragspec.visual import LatentPipeline

USUAL: dict[str, Any] = {"steps": 16, "floor": 0.1, "window": 12}
MOVED: dict[str, tuple[Any, ...]] = {
    "steps": (8, 16, 32, 64),
    "floor": (0.05, 0.1, 0.2),
    "window": (4, 8, 12, 16),
}
RULES = ("near@0.02", "aligned", "horizon@4", "path")
RADII = tuple(f"near@{r:g}" for r in (0.01, 0.02, 0.05, 0.1, 0.2))
STEPS = tuple(f"horizon@{s}" for s in (1, 2, 4, 8, 16))


def cells(only: list[str]) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Yield what is moved, the settings, and the rules that are drawn with."""
    for name, values in MOVED.items():
        for value in values:
            if name in only:
                yield name, {**USUAL, name: value}, RULES
    for name, rules in (("r", RADII), ("s", STEPS)):
        if name in only:
            yield name, USUAL, rules


def measure(
    pipe: LatentPipeline, settings: dict[str, Any], rules: tuple[str, ...], images: int
) -> list[dict[str, Any]]:
    """Return the figures of the rules with these settings."""
    base = LatentPipeline(
        pipe.model,
        pipe.tokenizer,
        None,
        steps=settings["steps"],
        floor=settings["floor"],
        folder=pipe.folder,
    )
    ways = {
        direction: build_latent_variant(direction, base, settings["window"], 1)
        for direction in parse_latent_ways(rules)
    }
    classes = list(range(int(base.trunk.config.num_classes)))
    timed = time_ways(ways, ImageConfig(classes, True, 2.0, 1.0, 0, 0), images, lambda line: None)
    selection = (
        "variant",
        "codes_per_forward",
        "ratio",
        "accepted",
        "psnr",
        "distance_mean",
        "seconds",
    )
    rows = [row.to_dict() for row in make_latent_rows(timed, None)]
    return [settings | {name: row[name] for name in selection} for row in rows]


def main() -> None:
    """Print a line for each cell and rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="latent-tiles")
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--only", default="steps,floor,window,r,s", help="what is moved")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    pipe = LatentPipeline.from_pretrained(inputs.set, None)
    results: list[dict[str, Any]] = []
    for moved, settings, rules in cells(inputs.only.split(",")):
        for row in measure(pipe, settings, rules, inputs.images):
            results.append({"moved": moved, "images": inputs.images} | row)
            print(
                f"{moved:7} T {row['steps']:<3} floor {row['floor']:<5} window {row['window']:<3} "
                f"{row['variant']:10} {row['codes_per_forward']:.2f} a forward, "
                f"{row['ratio']:.2f}x",
                flush=True,
            )
        if inputs.json is not None:
            inputs.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
