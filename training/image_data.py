"""Reading of the training pictures, their augmentation and their conditions.

Emoji come on white, with a name; game tiles come on black, with a class. Both are 32 x 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ragspec.visual.models.captions import CaptionEncoder

SETS = ("emoji", "tiles")
BACKGROUND = {"emoji": 1.0, "tiles": -1.0}
CAPTION_LENGTH = 12
HELD_OUT = 64


@dataclass(frozen=True)
class Pictures:
    """One set: `images` f32 [n, 3, 32, 32] in [-1, 1], their `names`, and tiles' `labels` i64 [n].

    `classes` are the names of the labels; both are empty for emoji. `groups`: of each emoji the
    name of its subgroup ("cat face"), a second caption; empty for tiles.
    """

    kind: str
    images: Tensor
    names: list[str]
    labels: Tensor
    classes: list[str]
    groups: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def part(self, rows: Tensor) -> Pictures:
        """Take the pictures `rows` i64 [m]."""
        labels = self.labels[rows] if len(self.labels) else self.labels
        names = [self.names[row] for row in rows.tolist()]
        groups = [self.groups[row] for row in rows.tolist()] if self.groups else []
        return Pictures(self.kind, self.images[rows], names, labels, self.classes, groups)


def read_pictures(shared: Path, kind: str, tones: bool = False) -> Pictures:
    """Read a set; emoji without the variants of skin tone unless `tones`."""
    folder = shared / "data" if (shared / "data").is_dir() else shared
    with np.load(folder / "images" / f"{kind}32.npz", allow_pickle=False) as data:
        selected = np.ones(len(data["names"]), dtype=bool)
        if kind == "emoji" and not tones:
            selected = ~data["is_tone_variant"]
        images = torch.from_numpy(data["images"][selected]).permute(0, 3, 1, 2).float() / 127.5 - 1
        names = [str(name) for name in data["names"][selected]]
        if kind == "emoji":
            groups = [str(n).replace("-", " ") for n in data["subgroup_names"]]
            of_each = [groups[number] for number in data["subgroup"][selected]]
            return Pictures(kind, images, names, torch.zeros(0, dtype=torch.int64), [], of_each)
        labels = torch.from_numpy(data["label"][selected].astype(np.int64))
        return Pictures(kind, images, names, labels, [str(n) for n in data["class_names"]], [])


def split(pictures: Pictures, seed: int = 0) -> tuple[Pictures, Pictures]:
    """Part a set into pictures to train on and `HELD_OUT` others (fewer of a small set)."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    held = min(HELD_OUT, len(pictures) // 4)
    return pictures.part(order[held:].sort().values), pictures.part(order[:held].sort().values)


def augment(
    images: Tensor,
    background: float,
    rng: torch.Generator,
    strength: float = 1.0,
    mirror: float = 0.5,
) -> Tensor:
    """Mirror, shift by up to two pixels and tint pictures [n, 3, H, W], each in its own way.

    strength: share of the pictures that are shifted, and of the full change of colour. mirror:
    share that is mirrored; pictures whose names say left or right should not be. The background
    keeps its colour: only what differs from it is tinted.
    """
    n, _, height, width = images.shape
    flipped = torch.rand(n, generator=rng) < mirror
    images = torch.where(flipped[:, None, None, None], images.flip(3), images)
    padded = functional.pad(images, (2, 2, 2, 2), value=background)
    # Shifts by one are more frequent than by two.
    shift = torch.randint(0, 3, (2, n, 2), generator=rng).sum(0)
    shift[torch.rand(n, generator=rng) >= strength] = 2
    rows = shift[:, :1] + torch.arange(height)
    columns = shift[:, 1:] + torch.arange(width)
    each = torch.arange(n)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]]
    contrast = 1 + 0.1 * strength * (2 * torch.rand(n, 1, 1, 1, generator=rng) - 1)
    tint = 1 + 0.08 * strength * (2 * torch.rand(n, 1, 1, 3, generator=rng) - 1)
    tinted = background + (moved - background) * contrast * tint
    return tinted.clamp(-1, 1).permute(0, 3, 1, 2).contiguous()


def conditions(pictures: Pictures, embedder: Path) -> Tensor:
    """Give what a model of this set is conditioned on: labels i64 [n] or features [n, L, 224].

    The features are the token vectors of the names, as `CaptionEncoder` makes them.
    """
    return pictures.labels if pictures.kind == "tiles" else captions(pictures.names, embedder)


def captions(texts: list[str], embedder: Path) -> Tensor:
    """Give the features f32 [n, L, 224] of texts."""
    return CaptionEncoder.from_pretrained(embedder, CAPTION_LENGTH)(texts)
