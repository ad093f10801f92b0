"""The Frechet distance between features of images, a distance between two variants of drawing.

Features are the 64 numbers before the last layer of a small convolutional network that classifies
the same data. They are projected on the 32 main axes of plain images and scaled by one number,
since separate factors would amplify features that hardly vary. The distance falls with the number
of images and has heavy tails. Compare it only with the distance of plain decoding from itself:
`PlainReference` has several batches of plain images and gives both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from ragspec.errors import InputError, MissingModelError, ModelError

FEATURES = 64
AXES = 32
SHRINKAGE = 0.02
MIN_BATCHES = 5
_MIN_OF_A_SUBJECT = 5  # fewer images would lose more than a tenth of their spread in resampling
_ROUNDS = 200
_BATCH = 256

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


class FeatureNet(nn.Module):
    """A convolutional classifier of small images, whose last hidden layer gives 64 features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = (3, 24, 48, FEATURES)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(widths)
        )
        self.dense = nn.Linear(2 * FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, classes)

    def hidden(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [B, 64] of images f32 [B, 3, H, W] in -1 .. 1."""
        for convolution in self.convolutions:
            images = functional.gelu(convolution(images))
        pooled = torch.cat([images.mean((2, 3)), images.amax((2, 3))], dim=1)
        features: torch.Tensor = self.dense(pooled)
        return features

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of the classes [B, C]."""
        logits: torch.Tensor = self.head(functional.gelu(self.hidden(images)))
        return logits

    def features(self, images: Pixels) -> Floats:
        """Return the features f64 [N, 64] of images u8 [N, H, W, 3].

        Raises:
            InputError: There is no image.
        """
        if not len(images):
            raise InputError("Expected at least one image, got none. Pass images.")
        with torch.inference_mode():
            parts = [
                self.hidden(scaled(images[start : start + _BATCH])).double()
                for start in range(0, len(images), _BATCH)
            ]
        features: Floats = torch.cat(parts).cpu().numpy()
        return features

    def save(self, path: Path) -> None:
        """Write the weights to a safetensors file, in float16."""
        from safetensors.torch import save_file

        save_file({name: value.half() for name, value in self.state_dict().items()}, path)

    @classmethod
    def load(cls, path: Path) -> FeatureNet:
        """Return the network of a file of `save`.

        Raises:
            MissingModelError: There is no file.
            ModelError: The file holds no such network.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not path.is_file():
            raise MissingModelError(
                f"Expected a feature network at {path}, got no file. Check the path."
            )
        try:
            state = {name: value.float() for name, value in load_file(path).items()}
            net = cls(len(state["head.bias"]))
            net.load_state_dict(state)
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"Expected a feature network in {path}, got {error}. Train it again."
            ) from error
        return net.eval()


def scaled(images: Pixels) -> torch.Tensor:
    """Return images u8 [N, H, W, 3] as f32 [N, 3, H, W] in -1 .. 1."""
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(
            f"Expected images uint8 [N, H, W, 3], got {images.dtype} {images.shape}. Convert them."
        )
    return torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2) / 127.5 - 1.0


def train_features(
    images: Pixels,
    labels: NDArray[np.int64],
    *,
    steps: int = 800,
    batch: int = 64,
    rate: float = 2e-3,
    seed: int = 0,
) -> FeatureNet:
    """Train a network to classify images u8 [N, H, W, 3] by their labels i64 [N].

    Raises:
        InputError: There are fewer than two classes, or the numbers differ.
    """
    if len(images) != len(labels) or len(np.unique(labels)) < 2:
        raise InputError(
            "Expected one label an image and at least two classes, got "
            f"{len(images)} images, {len(labels)} labels, {len(np.unique(labels))} classes. "
            "Pass more classes."
        )
    generator = torch.Generator().manual_seed(seed)
    net = FeatureNet(int(labels.max()) + 1)
    _initialise(net, generator)
    optimiser = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    pixels, classes = scaled(images), torch.from_numpy(labels.astype(np.int64))
    for _ in range(steps):
        picks = torch.randint(len(pixels), (batch,), generator=generator)
        loss = functional.cross_entropy(net(pixels[picks]), classes[picks], label_smoothing=0.05)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return net.eval()


class PlainReference:
    """Features of several independent batches of plain images, the reference of distances.

    A set of n images is compared with the pool of all batches but one, in turn. For plain decoding
    itself the images of each index are exchanged between batches at random, so that a batch keeps
    its mixture of subjects.

    Args:
        batches: At least five arrays f64 [n, 64]; image i has the same subject in each.
        subjects: i64 [n], subjects of the images; None if unknown.
        seed: Seed of exchanges and resampling.

    Raises:
        InputError: There are too few batches, their shapes differ, or a number is not finite.
    """

    def __init__(
        self, batches: Sequence[Floats], subjects: NDArray[np.int64] | None = None, *, seed: int = 0
    ) -> None:
        batches = [_check_finite(batch) for batch in batches]
        sizes = {batch.shape for batch in batches}
        if len(batches) < MIN_BATCHES or len(sizes) > 1 or len(batches[0]) <= AXES:
            raise InputError(
                f"Expected at least {MIN_BATCHES} plain batches of one shape with more than {AXES} "
                f"images, got {len(batches)} of shapes {sorted(sizes)}. Draw more images."
            )
        self._groups = _groups(subjects, len(batches[0]))
        pool = np.concatenate(batches)
        self._centre = pool.mean(0)
        values, vectors = np.linalg.eigh(np.cov(pool, rowvar=False))
        best = np.argsort(values)[::-1][: min(AXES, pool.shape[1])]
        self._axes = vectors[:, best] / max(float(np.sqrt(values[best].mean())), 1e-12)
        self._batches = [self._project(batch) for batch in batches]
        self._rng = np.random.default_rng(seed)
        self.null = self._plain_distance()

    def distance(self, features: Floats) -> Interval:
        """Return the distance of images from plain ones, with its interval.

        The interval is that of the bootstrap over the images of each subject. Subjects of fewer
        than five images are resampled together, and so are unknown subjects. That interval is too
        wide, since the mixture varies more than in a real batch.

        Args:
            features: f64 [n, 64], as many images and in the same order of subjects as a batch.

        Raises:
            InputError: The features have another shape or are not finite.
        """
        if len(features) != len(self._batches[0]):
            raise InputError(
                f"Expected {len(self._batches[0])} images, the size of a plain batch, got "
                f"{len(features)}. The distance depends on their number."
            )
        _same_width(_check_finite(features), self._centre[None])
        projected = self._project(features)
        pools = self._pools()
        value = float(np.mean([between(moments(projected), pool) for pool in pools]))
        resampled = [
            between(moments(projected[self._resample()]), pools[0]) for _ in range(_ROUNDS)
        ]
        spread = float(np.std(resampled))
        return Interval(value, max(0.0, value - 1.96 * spread), value + 1.96 * spread)

    @property
    def batches(self) -> list[float]:
        """The distance of each plain batch from the pool of the others."""
        pairs = zip(self._batches, self._pools(), strict=True)
        return [between(moments(batch), pool) for batch, pool in pairs]

    def _pools(self) -> list[tuple[Floats, Floats]]:
        """Return the moments of all batches but one, for each."""
        count = range(len(self._batches))
        return [moments(np.concatenate([self._batches[j] for j in count if j != i])) for i in count]

    def _plain_distance(self) -> Interval:
        """Return the distance of plain images: median and 95 % of random exchanges of batches."""
        stack = np.stack(self._batches)  # [batches, n, d]
        turns, places = np.indices(stack.shape[:2])
        distances = []
        for _ in range(_ROUNDS):
            one, *rest = stack[self._rng.permuted(turns, axis=0), places]
            distances.append(between(moments(one), moments(np.concatenate(rest))))
        low, middle, high = np.quantile(distances, (0.025, 0.5, 0.975))
        return Interval(float(middle), float(low), float(high))

    def _resample(self) -> NDArray[np.int64]:
        """Return n image numbers sampled with replacement, the size of each group preserved."""
        return np.concatenate([self._rng.choice(group, len(group)) for group in self._groups])

    def _project(self, features: Floats) -> Floats:
        projected: Floats = (features - self._centre) @ self._axes
        return projected


def moments(features: Floats, shrinkage: float = SHRINKAGE) -> tuple[Floats, Floats]:
    """Return mean [d] and covariance [d, d], the latter shrunk towards a multiple of identity."""
    covariance = np.atleast_2d(np.cov(features, rowvar=False))
    ball = np.eye(len(covariance)) * (np.trace(covariance) / len(covariance))
    return features.mean(0), (1.0 - shrinkage) * covariance + shrinkage * ball


def between(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float:
    """Return the squared Frechet distance of two normal distributions (mean, covariance)."""
    root = _root(one[1])
    cross = np.linalg.eigvalsh(root @ other[1] @ root).clip(0.0)
    difference = float(((one[0] - other[0]) ** 2).sum())
    overlap = 2.0 * float(np.sqrt(cross).sum())
    return max(0.0, difference + float(np.trace(one[1]) + np.trace(other[1])) - overlap)


def _groups(subjects: NDArray[np.int64] | None, size: int) -> list[NDArray[np.int64]]:
    """Return groups of images to resample together: one subject, or all rare subjects."""
    if subjects is None:
        return [np.arange(size)]
    if np.shape(subjects) != (size,):
        raise InputError(
            f"Expected one subject for each of {size} images, got shape {np.shape(subjects)}. Pass "
            "one an image."
        )
    groups = [np.flatnonzero(subjects == subject) for subject in np.unique(subjects)]
    large = [group for group in groups if len(group) >= _MIN_OF_A_SUBJECT]
    small = [group for group in groups if len(group) < _MIN_OF_A_SUBJECT]
    return large + ([np.concatenate(small)] if small else [])


def _check_finite(features: Floats) -> Floats:
    if features.ndim != 2 or len(features) < 2 or not np.isfinite(features).all():
        raise InputError(
            "Expected finite features [n, d] of at least two images, got shape "
            f"{features.shape} with {int((~np.isfinite(features)).sum())} numbers that are not "
            "finite. Check the images."
        )
    return features


def _same_width(one: Floats, other: Floats) -> None:
    if one.shape[1] != other.shape[1]:
        raise InputError(
            f"Expected features of one width, got {one.shape[1]} and {other.shape[1]}. Use one "
            "network for both."
        )


def _root(covariance: Floats) -> Floats:
    values, vectors = np.linalg.eigh(covariance)
    root: Floats = (vectors * np.sqrt(values.clip(0.0))) @ vectors.T
    return root


def _initialise(net: FeatureNet, generator: torch.Generator) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
