"""Write checkpoints as plain folders: tokenizer (float16), targets and drafts (bfloat16)."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from image_data import SETS, read_pictures
from image_model import SHAPES, build_model
from masters import checksums, readable
from safetensors.torch import load_file, save_file

from ragspec.visual.models.vq import VQTokenizer


def load_checkpoint(kind: str, name: str, checkpoint: Path, classes: list[str]) -> Any:
    """Build the `name` of the set `kind` with the running mean of its weights, in bfloat16.

    Raises ValueError for a checkpoint of another shape.
    """
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    model = build_model(kind, name)
    fits = model.load_state_dict(state[name]["mean"], strict=False)
    if fits.missing_keys or fits.unexpected_keys:
        raise ValueError(f"{checkpoint} does not fit the {name} of {kind}: {fits}")
    if classes:
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {label: number for number, label in enumerate(classes)}
    return model.to(torch.bfloat16).eval()


def halve(folder: Path, least: int = 1000) -> None:
    """Write a folder's matrices of `least` numbers or more in float8 (e4m3), half of bfloat16.

    They are read as any weights, in the type that is asked for.
    """
    path = folder / "model.safetensors"
    weights = {
        name: value.to(torch.float8_e4m3fn) if value.ndim == 2 and value.numel() >= least else value
        for name, value in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def export(kind: str, checkpoint: Path, out: Path, classes: list[str]) -> None:
    """Write target and draft of a set to `out`/target and `out`/draft."""
    for name in SHAPES:
        model = load_checkpoint(kind, name, checkpoint, classes)
        model.save_pretrained(out / name)
        readable(out / name)


def export_tokenizer(trained: Path, out: Path) -> None:
    """Write a tokenizer folder in float16."""
    if out.exists():
        shutil.rmtree(out)
    VQTokenizer.from_pretrained(trained).save_pretrained(out, dtype=torch.float16)
    config = json.loads((out / "config.json").read_text())
    config.pop("_name_or_path", None)  # the folder it was trained in
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    readable(out)


def main() -> None:
    """Export the tokenizer and the sets that have checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/images/tokenizer/model"))
    parser.add_argument("--models", type=Path, default=Path("runs/images/models"))
    parser.add_argument("--out", type=Path, default=Path("ragspec/starter/images"))
    args = parser.parse_args()
    export_tokenizer(args.tokenizer, args.out / "tokenizer")
    for kind in SETS:
        checkpoint = args.models / f"{kind}.pt"
        if not checkpoint.exists():
            print(f"no {checkpoint}: {kind} is left as it is")
            continue
        export(kind, checkpoint, args.out / kind, read_pictures(args.shared, kind).classes)
    for name, digest in checksums(args.out).items():
        print(digest, name)


if __name__ == "__main__":
    main()
