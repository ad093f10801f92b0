"""Images as sequences of codes behind their conditions, for the training of a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from ragspec.errors import InputError
from ragspec.visual.models.target import ConditionTable, ImageTarget

DROPPED = 0.1  # share of images without their condition


def code_texts(
    model: Any,
    codes: torch.Tensor,
    conditions: torch.Tensor,
    generator: torch.Generator,
    dropped: float = DROPPED,
) -> tuple[ImageTarget, list[list[int]]]:
    """Return a target without guidance that has all conditions, and the images as its texts.

    Args:
        codes: Codes i64 [n, C] of n images, in raster order.
        conditions: Class labels i64 [n], or caption features [n, L, d].
        dropped: Share of images that lose their condition: with guidance a head also runs on the
            unconditional row (LANTERN, arXiv 2410.03355).

    Raises:
        InputError: The codes or conditions do not fit the model.
    """
    config = model.config
    most, book = config.grid_size**2, config.vocab_size
    if codes.ndim != 2 or codes.dtype.is_floating_point or not 0 < codes.shape[1] <= most:
        raise InputError(
            f"got codes of {codes.dtype} with shape {list(codes.shape)}; expected whole numbers "
            f"[n, C] with C from 1 to {most}."
        )
    if not len(codes) or len(conditions) != len(codes):
        raise InputError(
            f"got {len(codes)} pictures with {len(conditions)} conditions; expected at least one "
            "picture and one condition for each."
        )
    if int(codes.min()) < 0 or int(codes.max()) >= book:
        raise InputError(
            f"got codes from {int(codes.min())} to {int(codes.max())}; expected 0 to {book - 1}. "
            "Encode the pictures with this model's own tokenizer."
        )
    distinct, which = torch.unique(conditions, dim=0, return_inverse=True)
    with torch.no_grad():
        table = ConditionTable.of(model.condition(distinct), model.unconditional(1)[0])
    target = ImageTarget(model, table)
    which[torch.rand(len(codes), generator=generator) < dropped] = len(distinct)
    pairs = zip(which.tolist(), codes.tolist(), strict=True)
    return target, [[*target.prompt(row), *picture] for row, picture in pairs]


def read_codes(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and conditions of a .npz file; see `code_texts` above.

    Raises:
        InputError: The file does not hold `codes` and either `labels` or `features`.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            conditions = [name for name in ("labels", "features") if name in data]
            if "codes" not in data or len(conditions) != 1:
                raise InputError(
                    f"{path} holds {', '.join(sorted(data)) or 'nothing'}; expected the arrays "
                    "'codes' and either 'labels' or 'features'."
                )
            codes, inputs = data["codes"], data[conditions[0]]
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        # NumPy's own text advises to allow pickles, which can run code.
        reason = str(error) if isinstance(error, OSError) else type(error).__name__
        raise InputError(
            f"{path} cannot be read ({reason}); expected what numpy.savez writes, with the arrays "
            "'codes' and either 'labels' or 'features'."
        ) from None
    kind = np.int64 if conditions == ["labels"] else np.float32
    return torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(inputs.astype(kind))
