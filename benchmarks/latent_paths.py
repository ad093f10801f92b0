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
from harness.image_timing import ImageConfig
from harness.image_ways import PLAIN
from harness.latent_paths import conditioning, path_moments
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
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    base = LatentPipeline.from_pretrained(inputs.set, None)
    classes = list(range(int(base.trunk.config.num_classes)))
    image = ImageConfig(classes, True, inputs.guidance, 1.0, 0, inputs.seed)
    print("noise       ", *(f"{each:.4f}" for each in noise_squares(base, image, inputs.images)))
    rows: dict[str, dict[str, Any]] = {}
    request = inputs.ways.split(",")
    for direction in parse_latent_ways(request):
        if direction.name == PLAIN and PLAIN not in request:
            continue
        began = time.perf_counter()
        for images, result in path_moments(
            direction, base, image, inputs.images, inputs.budget, inputs.batch
        ):
            rows[direction.name] = {
                "images": images,
                "latents": result.latents,
                "total": result.total,
                "total_error": result.total_error,
                "by_step": result.by_step,
                "error": result.error,
                "worst": result.worst,
                "seconds": time.perf_counter() - began,
            }
            if inputs.json is not None:
                inputs.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        total, last, worst = conditioning(result)
        print(
            f"{direction.name:12} {images} images: all steps {total}, the last {last}, worst "
            f"{worst}",
            flush=True,
        )


def noise_squares(base: LatentPipeline, image: ImageConfig, images: int) -> list[float]:
    """Return the mean squares of the noise by denoising step, the last one first."""
    steps, width = base.schedule.steps, int(base.model.config.latent_dim)
    places = int(base.trunk.config.grid_size) ** 2
    lanes = torch.arange((steps + 1) * width).expand(places, -1)
    result = torch.zeros(steps + 1, dtype=torch.float64)
    for number in range(images):
        seed = seeds_of(image.arguments([number])["generator"], 1)[0]
        noise = NoiseStream(seed).normal_rows(range(places), lanes)
        result += noise.reshape(places, -1, width).square().mean((0, 2))
    return [float(each) for each in result[:steps] / images]


if __name__ == "__main__":
    main()
