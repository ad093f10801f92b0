"""Images as sequences of codes behind their conditions, for the training of a draft head."""

import torch

from ragspec.errors import InputError
from ragspec.types import PreTrainedModel
from ragspec.visual.models.target import ConditionTable, ImageTarget

DROPPED = 0.1  # share of images without their condition


def code_texts(
    model: PreTrainedModel,
    codes: torch.Tensor,
    conditions: torch.Tensor,
    generator: torch.Generator,
    dropped: float = DROPPED,
) -> tuple[ImageTarget, list[list[int]]]:
    """Return a target without guidance that has all conditions, and the images as its texts.

    Args:
        codes: Codes i64 [n, C] of n images, in raster order.
        conditions: Class labels i64 [n], or caption features [n, L, d]; rows of
            zeros before the first other one are masked, see `padded_features`.
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
            f"got {len(codes)} pictures with {len(conditions)} conditions; expected one for each."
        )
    if int(codes.min()) < 0 or int(codes.max()) >= book:
        raise InputError(
            f"got codes from {int(codes.min())} to {int(codes.max())}; expected 0 to {book - 1}. "
            "Encode the pictures with this model's own tokenizer."
        )
    captions, names = config.condition != "class", ("labels", "features")
    if conditions.is_floating_point() != captions:
        sizes = f", {config.condition_length}, {config.caption_dim}" if captions else ""
        raise InputError(
            f"got {names[not captions]}; expected {names[captions]} [n{sizes}], as the model "
            f"reads {'captions' if captions else 'classes'}. Store them in the file."
        )
    distinct, which = torch.unique(conditions, dim=0, return_inverse=True)
    padding = (distinct == 0).all(-1).cumprod(-1).sum(-1).tolist() if captions else []
    with torch.no_grad():
        none = model.unconditional(1)
        embedded = torch.cat([model.condition(distinct), none])
        table = ConditionTable(embedded, none[0], (*padding, 0) if captions else ())
    target = ImageTarget(model, table)
    which[torch.rand(len(codes), generator=generator) < dropped] = len(distinct)
    pairs = zip(which.tolist(), codes.tolist(), strict=True)
    return target, [[*target.prompt(row), *picture] for row, picture in pairs]
