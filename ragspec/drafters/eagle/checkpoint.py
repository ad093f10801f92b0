"""A training on disk: written whole now and then, so that a stop costs a minute of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import StoreError

CHECKPOINT = "training.pt"
PART = ".training.part"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Put a training's state in the place of the one before; raises StoreError for a full disk."""
    part = folder / PART
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, part)
        os.replace(part, folder / CHECKPOINT)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
        part.unlink(missing_ok=True)
        raise StoreError(
            f"the state of the training cannot be written to {folder} ({error}); expected a folder "
            "on a disk with room. What was written before is untouched."
        ) from error


def load_state(folder: Path) -> dict[str, Any]:
    """Return the state that was left in a folder; raises StoreError where none can be read."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise StoreError(
            f"{folder} holds no training that was left (no {CHECKPOINT}); expected the --out of "
            "one. Leave --resume out to begin anew."
        )
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        state["marks"], state["steps"], state["head"], state["optimizer"], state["spent"]
    except Exception as error:  # pickles raise what they like
        raise StoreError(
            f"{path} is damaged ({error}); expected what `ragspec train-head` left. Delete it, and "
            "begin anew."
        ) from error
    return state


def clear_state(folder: Path) -> None:
    """Delete the state of a training that has come to its end."""
    for name in (CHECKPOINT, PART):
        (folder / name).unlink(missing_ok=True)
