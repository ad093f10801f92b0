"""A picture of which a part is kept: the codes that it gives, and its own pixels there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ragspec.visual.pipeline.pipeline import ImagePipeline

_WHITE = 128  # from here on a pixel of a mask asks for something new


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """codes i64 [h, w]: those that the picture gives, -1 where one is to be drawn."""

    picture: Image
    codes: torch.Tensor

    @property
    def places(self) -> NDArray[np.bool_]:
        """Which codes are kept, bool [h, w]."""
        found: NDArray[np.bool_] = (self.codes >= 0).numpy()
        return found

    def pasted(self, drawn: Image) -> Image:
        """Return a drawn image with the picture's own pixels where its codes were kept."""
        from PIL import Image

        places = Image.fromarray((self.places * 255).astype(np.uint8))
        where = places.resize(drawn.size, Image.Resampling.NEAREST)
        return Image.composite(self.picture, drawn.convert("RGB"), where)

    def shown(self) -> Image:
        """Return the picture with what is to be drawn hatched out."""
        from PIL import Image

        y, x = np.mgrid[: self.picture.height, : self.picture.width]
        stripes = np.where(((x + y) // 2 % 2 == 0)[..., None], 235, 205).repeat(3, 2)
        return self.pasted(Image.fromarray(stripes.astype(np.uint8)))


def kept_codes(image: Path, mask: Path, pipe: ImagePipeline) -> Kept:
    """Return what a picture gives where a mask is black; white asks for something new.

    The picture is as large as those that are drawn; the mask is too, or has one pixel a code. A
    code is drawn anew if any pixel of it is white. Raises InputError for other sizes, for files
    that hold no picture, see-through pictures, masks without white, and models of latents.
    """
    import torch

    from ragspec.visual.pipeline.latents import LatentPipeline
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    if not isinstance(pipe, ImagePipeline) or isinstance(pipe, LatentPipeline):
        raise InputError(
            "got --image with a model of continuous latents; expected one of codes, such as --set "
            "tiles: only codes can be given."
        )
    codes, pixels = pipe.side, pipe.side * pipe.tokenizer.reduction
    picture = _opaque(_opened(image), image)
    if picture.size != (pixels, pixels):
        raise InputError(
            f"{image} is {_told(picture.size)} pixels; expected {pixels} x {pixels}, as this model "
            "draws them. Crop or resize it first."
        )
    marks = _opened(mask).convert("L")
    if marks.size not in ((pixels, pixels), (codes, codes)):
        raise InputError(
            f"{mask} is {_told(marks.size)} pixels; expected {pixels} x {pixels} as the picture, "
            f"or {codes} x {codes}, one for each code. White is drawn, black is kept."
        )
    white = np.asarray(marks) >= _WHITE
    across = white.shape[0] // codes
    new = white.reshape(codes, across, codes, across).any((1, 3))
    if not new.any():
        raise InputError(f"{mask} has no white pixel, so nothing is to be drawn; expected some.")
    values = np.asarray(picture, dtype=np.float32) / 127.5 - 1.0
    batch = torch.from_numpy(values).permute(2, 0, 1)[None]
    with torch.no_grad():
        own: Any = pipe.tokenizer.encode(batch.to(pipe.model.device)).cpu().reshape(codes, codes)
    return Kept(picture, torch.where(torch.from_numpy(new), -1, own))


def _opened(path: Path) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as found:
            found.load()
            return found.copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} cannot be read as a picture ({error}); expected a PNG or a JPEG."
        ) from error


def _opaque(picture: Image, path: Path) -> Image:
    if picture.has_transparency_data:
        alpha = np.asarray(picture.convert("RGBA"))[..., 3]
        if alpha.min() < 255:
            raise InputError(
                f"{path} has see-through pixels; expected an opaque picture. Lay it on the ground "
                "that the model draws on first."
            )
    return picture.convert("RGB")


def _told(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
