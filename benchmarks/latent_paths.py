"""A test of lossless rules over continuous latents: the sizes of their paths' steps.

    OMP_NUM_THREADS=1 nice -n 15 python benchmarks/latent_paths.py [--model latent-tiles]
        [--variants plain,aligned,horizon@4,path,near@0.1] [--images 2000] [--json FILE]

For a lossless rule the steps (x - mu) / sigma of every committed latent's denoising path under the
target have mean square 1; `harness.latent_moments` defines the path by rule. Pictures are drawn in
batches with guidance 2. The line of a variant has the mean square over all steps and of the last
step with standard errors, and the largest deviation from 1 in errors (of 17 figures 3 is usual, 4
is not). The variants are those of `bench.py image`. The file is written after every batch, so that
a run can be interrupted. The first line has the mean squares of the seeds' noise, the expected
figures of plain drawing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from harness.image_timing import ImageSeries
from harness.image_variants import PLAIN
from harness.latent_paths import format_moments, path_moments
from harness.latent_variants import parse_latent_variants

from ragspec.sampling.noise import NoiseStream
from ragspec.visual import ImagePipeline

VARIANTS = "aligned,horizon@4,path,near@0.1"


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="latent-tiles", help="image set or folder")
    parser.add_argument("--variants", default=VARIANTS, help="comma-separated")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="pictures to draw at once")
    parser.add_argument("--budget", type=int, default=12, help="draft nodes")
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    base = ImagePipeline.from_pretrained(inputs.model, None)
    classes = list(range(int(base.family.trunk.config.num_classes)))
    image = ImageSeries(classes, True, inputs.guidance, 1.0, 0, inputs.seed)
    print("noise       ", *(f"{each:.4f}" for each in noise_squares(base, image, inputs.images)))
    rows: dict[str, dict[str, Any]] = {}
    names = inputs.variants.split(",")
    for variant in parse_latent_variants(names):
        if variant.name == PLAIN and PLAIN not in names:
            continue
        began = time.perf_counter()
        for images, moments in path_moments(
            variant, base, image, inputs.images, inputs.budget, inputs.batch
        ):
            rows[variant.name] = {
                "images": images,
                "latents": moments.latents,
                "total": moments.total,
                "total_error": moments.total_error,
                "by_step": moments.by_step,
                "error": moments.error,
                "worst": moments.worst,
                "seconds": time.perf_counter() - began,
            }
            if inputs.json is not None:
                inputs.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        total, last, worst = format_moments(moments)
        print(
            f"{variant.name:12} {images} images: all steps {total}, the last {last}, worst {worst}",
            flush=True,
        )


def noise_squares(base: ImagePipeline, image: ImageSeries, images: int) -> list[float]:
    """Return the mean squares of the noise by denoising step, the last one first."""
    steps, width = base.family.schedule.steps, int(base.model.config.latent_dim)
    places = int(base.family.trunk.config.grid_size) ** 2
    lanes = torch.arange((steps + 1) * width).expand(places, -1)
    squares = torch.zeros(steps + 1, dtype=torch.float64)
    for number in range(images):
        seed = image.seed + number
        noise = NoiseStream(seed).normal(range(places), lanes)
        squares += noise.reshape(places, -1, width).square().mean((0, 2))
    return [float(each) for each in squares[:steps] / images]


if __name__ == "__main__":
    main()
