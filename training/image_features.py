"""Train the networks whose features the image benchmark measures Frechet distances with.

One for each starter set, on the pictures that the set's models were trained on: classes of tiles,
subgroups of emoji. Half a minute each on one core. The file goes beside the target of its set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmark_path  # noqa: F401
import numpy as np
import torch
from evaluation.frechet import FeatureNet, scaled, train_features
from numpy.typing import NDArray

SETS = {"tiles": "label", "emoji": "subgroup"}
HELD_OUT = 256


def read(shared: Path, kind: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the pictures u8 [N, H, W, 3] of a set and their labels i64 [N]."""
    with np.load(shared / "data" / "images" / f"{kind}32.npz", allow_pickle=False) as data:
        return data["images"], data[SETS[kind]].astype(np.int64)


def accuracy(net: FeatureNet, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the share of pictures whose label the network finds."""
    with torch.inference_mode():
        return float((net(scaled(images)).argmax(1).numpy() == labels).mean())


def main() -> None:
    """Train and write both networks, and say how well they tell pictures apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("ragspec/starter/images"))
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    for kind in SETS:
        images, labels = read(args.shared, kind)
        order = np.random.default_rng(0).permutation(len(images))
        held, used = order[:HELD_OUT], order[HELD_OUT:]
        net = train_features(images[used], labels[used], steps=args.steps)
        (args.out / kind).mkdir(parents=True, exist_ok=True)
        net.save(args.out / kind / "features.safetensors")
        print(f"{kind}: {accuracy(net, images[held], labels[held]):.2f} on held-out pictures")


if __name__ == "__main__":
    main()
