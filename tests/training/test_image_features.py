"""The script that trains the benchmark's feature networks, on pictures made on the spot."""

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]


def test_a_network_is_written_for_each_set(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "images"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for kind, name, classes in (("tiles", "label", 3), ("emoji", "subgroup", 5)):
        labels = rng.integers(0, classes, 300).astype(np.uint8)
        images = (rng.integers(0, 40, (300, 32, 32, 3)) + 40 * labels[:, None, None, None]) % 256
        arrays = {"images": images.astype(np.uint8), name: labels}
        np.savez(folder / f"{kind}32.npz", allow_pickle=False, **arrays)
    script, out = ROOT / "training" / "image_features.py", tmp_path / "out"
    written = run_script(script, "--steps", "3", "--shared", tmp_path, "--out", out, cwd=ROOT)
    assert "on held-out pictures" in written
    for kind, classes in (("tiles", 3), ("emoji", 5)):
        weights = load_file(tmp_path / "out" / kind / "features.safetensors")
        assert len(weights["head.weight"]) == classes
