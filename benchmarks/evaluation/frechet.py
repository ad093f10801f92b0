"""How far one way of drawing is from another: the Frechet distance between features of images.

Features are the 64 numbers before the last layer of a small convolutional network that was trained
to tell the classes of the same data apart. They are projected on the 32 main axes of plain
decoding's images and scaled by one number (features one by one would blow up those that hardly
vary). The figure falls with the number of images and has heavy tails, so it only means something
beside the same figure of plain decoding against itself: `PlainReference` holds several batches of
plain images and gives both.
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

from ragspec.errors import InputError, ModelError, ModelNotFoundError

FEATURES = 64
AXES = 32
SHRINKAGE = 0.02
FEWEST_BATCHES = 5
_FEWEST_OF_A_SUBJECT = 5  # resampling fewer would miss more than a tenth of their spread
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
        """Return the features f64 [N, 64] of images u8 [N, H, W, 3]; raises InputError for none."""
        if not len(images):
            raise InputError("got 0 images; expected at least one to take features of.")
        with torch.inference_mode():
            parts = [
                self.hidden(scaled(images[start : start + _BATCH])).double()
                for start in range(0, len(images), _BATCH)
            ]
        result: Floats = torch.cat(parts).cpu().numpy()
        return result

    def save(self, path: Path) -> None:
        """Write the weights to a safetensors file, in float16."""
        from safetensors.torch import save_file

        save_file({name: value.half() for name, value in self.state_dict().items()}, path)

    @classmethod
    def load(cls, path: Path) -> FeatureNet:
        """Return the network that `save` wrote; raises ModelNotFoundError, ModelError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not path.is_file():
            raise ModelNotFoundError(f"no feature network at {path}; expected what save wrote.")
        try:
            state = {name: value.float() for name, value in load_file(path).items()}
            net = cls(len(state["head.bias"]))
            net.load_state_dict(state)
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{path} holds no feature network ({error}); write it anew."
            ) from error
        return net.eval()


def scaled(images: Pixels) -> torch.Tensor:
    """Return images u8 [N, H, W, 3] as f32 [N, 3, H, W] in -1 .. 1."""
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(
            f"got images of {images.dtype} with shape {images.shape}; expected uint8 [N, H, W, 3]."
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
    """Return a network trained to tell the labels i64 [N] of images u8 [N, H, W, 3].

    Raises InputError for fewer than two classes or numbers that do not match.
    """
    if len(images) != len(labels) or len(np.unique(labels)) < 2:
        raise InputError(
            f"got {len(images)} images with {len(labels)} labels of {len(np.unique(labels))} "
            "classes; expected one label an image and at least two classes."
        )
    dice = torch.Generator().manual_seed(seed)
    net = FeatureNet(int(labels.max()) + 1)
    _initialise(net, dice)
    optimiser = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    pixels, selection = scaled(images), torch.from_numpy(labels.astype(np.int64))
    for _ in range(steps):
        picks = torch.randint(len(pixels), (batch,), generator=dice)
        loss = functional.cross_entropy(net(pixels[picks]), selection[picks], label_smoothing=0.05)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        plan.step()
    return net.eval()


class PlainReference:
    """Features of several independent batches of plain images: what others are compared with.

    batches: f64 [n, 64] each, all of one size, at least five; image i is of the same subject in
    each. subjects: i64 [n], what the images are of. A set of n images is compared with the pool of
    all batches but one, in turn; plain decoding itself is compared by dealing the images of each i
    to the batches anew, so that a batch keeps its mixture of subjects. Raises InputError for fewer
    batches, unequal ones, and numbers that are not finite.
    """

    def __init__(
        self, batches: Sequence[Floats], subjects: NDArray[np.int64] | None = None, *, seed: int = 0
    ) -> None:
        batches = [_checked(batch) for batch in batches]
        sizes = {batch.shape for batch in batches}
        if len(batches) < FEWEST_BATCHES or len(sizes) > 1 or len(batches[0]) <= AXES:
            raise InputError(
                f"got {len(batches)} plain batches of shapes {sorted(sizes)}; expected at least "
                f"{FEWEST_BATCHES} of one shape, with more than {AXES} images each: the distance "
                "has heavy tails."
            )
        self._groups = _groups(subjects, len(batches[0]))
        pool = np.concatenate(batches)
        self._centre = pool.mean(0)
        values, vectors = np.linalg.eigh(np.cov(pool, rowvar=False))
        best = np.argsort(values)[::-1][: min(AXES, pool.shape[1])]
        self._axes = vectors[:, best] / max(float(np.sqrt(values[best].mean())), 1e-12)
        self._batches = [self._project(batch) for batch in batches]
        self._dice = np.random.default_rng(seed)
        self.null = self._local()

    def distance(self, features: Floats) -> Interval:
        """Return the distance of images' features f64 [n, 64] from plain, with its interval.

        n: the size of a plain batch, with its subjects in its order. The interval is that of the
        bootstrap over the images of each subject. Subjects of fewer than five images are resampled
        together, and so are all where the subjects are not known: that is too wide, since the
        mixture then varies as in no real batch.
        Raises InputError for features of another shape, or that are not finite.
        """
        if len(features) != len(self._batches[0]):
            raise InputError(
                f"got {len(features)} images; expected {len(self._batches[0])}, the size of a "
                "plain batch: the distance depends on it."
            )
        _same_width(_checked(features), self._centre[None])
        mine = self._project(features)
        pools = self._pools()
        value = float(np.mean([between(moments(mine), pool) for pool in pools]))
        results = [between(moments(mine[self._draw()]), pools[0]) for _ in range(_ROUNDS)]
        spread = float(np.std(results))
        return Interval(value, max(0.0, value - 1.96 * spread), value + 1.96 * spread)

    @property
    def batches(self) -> list[float]:
        """The distance of each plain batch from the pool of the others."""
        pairs = zip(self._batches, self._pools(), strict=True)
        return [between(moments(batch), pool) for batch, pool in pairs]

    def inside(self, result: Interval) -> bool:
        """Tell whether a distance is one that plain decoding has from itself."""
        return result.value <= self.null.high

    def _pools(self) -> list[tuple[Floats, Floats]]:
        """Return the moments of all batches but one, for each."""
        count = range(len(self._batches))
        return [moments(np.concatenate([self._batches[j] for j in count if j != i])) for i in count]

    def _local(self) -> Interval:
        """Return what plain images score: median and 95 % of random exchanges between batches."""
        stack = np.stack(self._batches)  # [batches, n, d]
        turns, places = np.indices(stack.shape[:2])
        results = []
        for _ in range(_ROUNDS):
            one, *rest = stack[self._dice.permuted(turns, axis=0), places]
            results.append(between(moments(one), moments(np.concatenate(rest))))
        low, middle, high = np.quantile(results, (0.025, 0.5, 0.975))
        return Interval(float(middle), float(low), float(high))

    def _draw(self) -> NDArray[np.int64]:
        """Return n images drawn with replacement, as many of each group as it has."""
        return np.concatenate([self._dice.choice(group, len(group)) for group in self._groups])

    def _project(self, features: Floats) -> Floats:
        projected: Floats = (features - self._centre) @ self._axes
        return projected


def frechet_distance(one: Floats, other: Floats, shrinkage: float = SHRINKAGE) -> float:
    """Return the squared Frechet distance of two normal laws fitted to f64 [n, d] and [m, d].

    Raises InputError for fewer than two rows, numbers that are not finite, or two widths.
    """
    _same_width(_checked(one), _checked(other))
    return between(moments(one, shrinkage), moments(other, shrinkage))


def moments(features: Floats, shrinkage: float = SHRINKAGE) -> tuple[Floats, Floats]:
    """Return mean [d] and covariance [d, d], the latter shrunk towards a multiple of identity."""
    covariance = np.atleast_2d(np.cov(features, rowvar=False))
    ball = np.eye(len(covariance)) * (np.trace(covariance) / len(covariance))
    return features.mean(0), (1.0 - shrinkage) * covariance + shrinkage * ball


def between(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float:
    """Return the squared Frechet distance of two normal laws given by mean and covariance."""
    root = _root(one[1])
    cross = np.linalg.eigvalsh(root @ other[1] @ root).clip(0.0)
    difference = float(((one[0] - other[0]) ** 2).sum())
    overlap = 2.0 * float(np.sqrt(cross).sum())
    return max(0.0, difference + float(np.trace(one[1]) + np.trace(other[1])) - overlap)


def _groups(subjects: NDArray[np.int64] | None, size: int) -> list[NDArray[np.int64]]:
    """Return which of `size` images are resampled among each other: of one subject, or of few."""
    if subjects is None:
        return [np.arange(size)]
    if np.shape(subjects) != (size,):
        raise InputError(
            f"got subjects of shape {np.shape(subjects)} for batches of {size} images; expected "
            "one an image."
        )
    current = [np.flatnonzero(subjects == subject) for subject in np.unique(subjects)]
    large = [group for group in current if len(group) >= _FEWEST_OF_A_SUBJECT]
    small = [group for group in current if len(group) < _FEWEST_OF_A_SUBJECT]
    return large + ([np.concatenate(small)] if small else [])


def _checked(features: Floats) -> Floats:
    if features.ndim != 2 or len(features) < 2 or not np.isfinite(features).all():
        raise InputError(
            f"got features of shape {features.shape}, "
            f"{int((~np.isfinite(features)).sum())} of them not finite; expected finite numbers "
            "[n, d] of at least two images."
        )
    return features


def _same_width(one: Floats, other: Floats) -> None:
    if one.shape[1] != other.shape[1]:
        raise InputError(
            f"got features of width {one.shape[1]} to compare with {other.shape[1]}; expected one "
            "width. Take both from the same network."
        )


def _root(covariance: Floats) -> Floats:
    values, vectors = np.linalg.eigh(covariance)
    root: Floats = (vectors * np.sqrt(values.clip(0.0))) @ vectors.T
    return root


def _initialise(net: FeatureNet, dice: torch.Generator) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, generator=dice)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
