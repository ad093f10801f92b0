"""The Frechet distance: known values, plain against itself, and shifts that it must see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ragspec.errors import InputError, ModelError, ModelNotFoundError
from ragspec.visual.evaluation.frechet import (
    FeatureNet,
    Interval,
    PlainReference,
    frechet_distance,
    moments,
    scaled,
    train_features,
)
from ragspec.visual.evaluation.frechet import between as between_moments


def normal(rng: np.random.Generator, n: int, shift: float = 0.0) -> np.ndarray:
    return rng.normal(size=(n, 64)) * np.linspace(0.2, 3.0, 64) + shift


def test_the_distance_of_two_known_laws() -> None:
    zero, one = np.zeros(3), np.array([1.0, 2.0, 2.0])
    same = between_moments((zero, np.eye(3)), (one, np.eye(3)))
    assert same == pytest.approx(9.0)
    wider = between_moments((zero, np.eye(3)), (zero, 4.0 * np.eye(3)))
    assert wider == pytest.approx(3.0)  # (2 - 1)^2 an axis
    turned = np.array([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
    assert between_moments((zero, turned), (zero, turned)) == pytest.approx(0.0, abs=1e-9)


def test_shrinkage_keeps_the_trace() -> None:
    features = normal(np.random.default_rng(0), 200)[:, :8]
    for amount in (0.0, 0.02, 1.0):
        assert np.trace(moments(features, amount)[1]) == pytest.approx(
            np.trace(np.cov(features, rowvar=False))
        )
    assert frechet_distance(features, features) == pytest.approx(0.0, abs=1e-8)


def test_plain_lies_inside_its_own_interval_and_a_shift_outside() -> None:
    rng = np.random.default_rng(3)
    reference = PlainReference([normal(rng, 300) for _ in range(5)])
    assert reference.null.low < reference.null.value < reference.null.high
    assert len(reference.batches) == 5
    assert sum(b <= reference.null.high for b in reference.batches) >= 4
    again = [reference.distance(normal(rng, 300)) for _ in range(5)]
    assert sum(reference.inside(found) for found in again) >= 4
    far = reference.distance(normal(rng, 300, shift=0.5))
    assert not reference.inside(far) and far.low > reference.null.high
    assert far.low < far.value < far.high


KINDS = np.arange(200) % 2


def in_turn(rng: np.random.Generator, shift: float = 0.0) -> np.ndarray:
    """Return 200 images of two kinds in turn, which lie far apart."""
    found: np.ndarray = normal(rng, len(KINDS), shift) + 8.0 * KINDS[:, None]
    return found


def test_batches_that_share_their_subjects_are_judged_without_the_chance_of_a_mixture() -> None:
    rng = np.random.default_rng(7)
    reference = PlainReference([in_turn(rng) for _ in range(5)], KINDS)
    fresh = [reference.distance(in_turn(rng)) for _ in range(20)]
    null = reference.null
    assert sum(reference.inside(found) for found in fresh) >= 18
    assert sum(null.low <= found.value <= null.high for found in fresh) >= 16
    shifted = [reference.distance(in_turn(rng, 0.4)) for _ in range(4)]
    assert not any(reference.inside(found) for found in shifted)


def test_the_interval_of_a_distance_is_that_of_images_with_the_same_subjects() -> None:
    rng = np.random.default_rng(8)
    batches = [in_turn(rng) for _ in range(5)]
    known, unknown = PlainReference(batches, KINDS), PlainReference(batches)
    tried = [known.distance(in_turn(rng, 0.4)) for _ in range(10)]
    spread = np.std([found.value for found in tried])
    told = np.mean([found.high - found.value for found in tried]) / 1.96
    blind = unknown.distance(in_turn(rng, 0.4))
    assert 0.7 * spread < told < 3.0 * spread < (blind.high - blind.value) / 1.96


def test_subjects_of_few_images_are_resampled_together() -> None:
    from ragspec.visual.evaluation.frechet import _groups

    subjects = np.array([5, 3, 3, 3, 3, 3, 9, 9])
    assert [group.tolist() for group in _groups(subjects, 8)] == [[1, 2, 3, 4, 5], [0, 6, 7]]
    assert [group.tolist() for group in _groups(None, 3)] == [[0, 1, 2]]
    with pytest.raises(InputError, match=r"subjects of shape \(8,\) for batches of 9"):
        _groups(subjects, 9)


def test_a_reference_refuses_too_little() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="at least 5"):
        PlainReference([normal(rng, 100) for _ in range(4)])
    with pytest.raises(InputError, match="one shape"):
        PlainReference([normal(rng, 100 + n) for n in range(5)])
    with pytest.raises(InputError, match="more than 32"):
        PlainReference([normal(rng, 20) for _ in range(5)])
    reference = PlainReference([normal(rng, 60) for _ in range(5)])
    with pytest.raises(InputError, match="expected 60"):
        reference.distance(normal(rng, 50))
    assert not reference.inside(Interval(1e9, 0.0, 1e9))
    with pytest.raises(InputError, match="width 63 to compare with 64"):
        reference.distance(normal(rng, 60)[:, :63])


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_features_that_are_no_numbers_are_refused(lost: float) -> None:
    rng = np.random.default_rng(0)
    batches, bad = [normal(rng, 40) for _ in range(5)], normal(rng, 40)
    bad[3, 5] = lost
    with pytest.raises(InputError, match="1 of them not finite"):
        PlainReference([*batches, bad])
    with pytest.raises(InputError, match="1 of them not finite"):
        PlainReference(batches).distance(bad)
    for one, other in ((bad, batches[0]), (batches[0], bad)):
        with pytest.raises(InputError, match="1 of them not finite"):
            frechet_distance(one, other)


def test_features_of_no_images_or_another_network_are_refused() -> None:
    features = normal(np.random.default_rng(0), 40)
    for few in (features[:0], features[:1], features[0]):
        with pytest.raises(InputError, match="at least two images"):
            frechet_distance(features, few)
    with pytest.raises(InputError, match="width 64 to compare with 63"):
        frechet_distance(features, features[:, 1:])
    with pytest.raises(InputError, match="got 0 images"):
        FeatureNet(2).features(np.zeros((0, 16, 16, 3), np.uint8))


def halves(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures that are bright on the left or on the right, and which."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    images = rng.integers(0, 90, (n, 16, 16, 3))
    for image, label in zip(images, labels, strict=True):
        image[:, 8 * label : 8 * label + 8] += 120
    return images.astype(np.uint8), labels.astype(np.int64)


def test_a_network_learns_and_comes_back_from_its_file(tmp_path: Path) -> None:
    images, labels = halves(300)
    net = train_features(images, labels, steps=60, batch=32)
    again = train_features(images, labels, steps=60, batch=32)
    held, wanted = halves(100, seed=1)
    with torch.inference_mode():
        right = (net(scaled(held)).argmax(1).numpy() == wanted).mean()
    assert right > 0.9
    features = net.features(held)
    assert features.shape == (100, 64) and features.dtype == np.float64
    assert np.array_equal(features, again.features(held))  # seeded, no global generator
    net.save(tmp_path / "net.safetensors")
    loaded = FeatureNet.load(tmp_path / "net.safetensors").features(held)
    assert np.allclose(loaded, features, atol=0.02)  # float16 on disk


def test_bad_images_labels_and_files_are_refused(tmp_path: Path) -> None:
    images, labels = halves(10)
    with pytest.raises(InputError, match="uint8"):
        scaled(images.astype(np.float32))
    with pytest.raises(InputError, match="at least two classes"):
        train_features(images, np.zeros_like(labels))
    with pytest.raises(InputError, match="one label an image"):
        train_features(images, labels[:5])
    with pytest.raises(ModelNotFoundError, match="no feature network"):
        FeatureNet.load(tmp_path / "absent.safetensors")
    (tmp_path / "net.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="write it anew"):
        FeatureNet.load(tmp_path / "net.safetensors")
