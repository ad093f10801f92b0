"""Whether rules over continuous latents keep the target's law: how large their paths' steps are.

    OMP_NUM_THREADS=1 nice -n 15 python benchmarks/latent_paths.py [--set latent-tiles]
        [--ways plain,aligned,horizon@4,path,near@0.1] [--images 2000] [--json FILE]

Of every committed latent the steps (x - mu) / sigma of its denoising path under the target have
mean square 1 where the rule is lossless, see `harness.latent_moments` for what the path of a
latent is under which rule. Pictures are drawn side by side, guidance 2; of each way the mean square
over all steps and of the last one, with their standard errors, and the largest deviation from 1 of
any step or all, in errors (of 17 figures 3 is no surprise, 4 is). `Ways@N` are those of `ragspec
bench image`. The file holds every finished batch, so that a run can be cut short. What plain
drawing would have is told first: the mean squares of the seeds' own noise, which every rule keeps
where it does not redraw.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from harness.image_timing import Drawing
from harness.image_ways import PLAIN
from harness.latent_paths import path_moments, told
from harness.latent_ways import parse_latent_ways

from ragspec.sampling.noise import NoiseStream
from ragspec.visual import LatentPipeline
from ragspec.visual.pipeline.request import seeds_of

WAYS = "aligned,horizon@4,path,near@0.1"


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="latent-tiles")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="pictures side by side")
    parser.add_argument("--budget", type=int, default=12, help="draft nodes")
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    base = LatentPipeline.from_pretrained(given.set, None)
    classes = list(range(int(base.trunk.config.num_classes)))
    drawing = Drawing(classes, True, given.guidance, 1.0, 0, given.seed)
    print("noise       ", *(f"{each:.4f}" for each in noise_squares(base, drawing, given.images)))
    rows: dict[str, dict[str, Any]] = {}
    asked = given.ways.split(",")
    for way in parse_latent_ways(asked):
        if way.name == PLAIN and PLAIN not in asked:
            continue
        began = time.perf_counter()
        for images, found in path_moments(
            way, base, drawing, given.images, given.budget, given.batch
        ):
            rows[way.name] = {
                "images": images,
                "latents": found.latents,
                "total": found.total,
                "total_error": found.total_error,
                "by_step": found.by_step,
                "error": found.error,
                "worst": found.worst,
                "seconds": time.perf_counter() - began,
            }
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        total, last, worst = told(found)
        print(
            f"{way.name:12} {images} images: all steps {total}, the last {last}, worst {worst}",
            flush=True,
        )


def noise_squares(base: LatentPipeline, drawing: Drawing, images: int) -> list[float]:
    """Return the mean squares of the noise by denoising step, the last one first."""
    steps, width = base.schedule.steps, int(base.model.config.latent_dim)
    places = int(base.trunk.config.grid_size) ** 2
    lanes = torch.arange((steps + 1) * width).expand(places, -1)
    found = torch.zeros(steps + 1, dtype=torch.float64)
    for number in range(images):
        seed = seeds_of(drawing.arguments([number])["generator"], 1)[0]
        noise = NoiseStream(seed).normal_rows(range(places), lanes)
        found += noise.reshape(places, -1, width).square().mean((0, 2))
    return [float(each) for each in found[:steps] / images]


if __name__ == "__main__":
    main()
