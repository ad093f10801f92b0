"""Sample sheets and heat maps of accepted codes, drawn with Pillow on a light background.

Small images are enlarged without smoothing, so that every pixel and code stays visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from evaluation.lettering import SOFT, Colour, write
from ragspec.errors import InputError

BACKDROP: Colour = (250, 250, 248)
LINE: Colour = (214, 216, 220)
# From one code a forward (slate) to eight or more (yellow), with rising lightness.
RAMP: tuple[Colour, ...] = (
    (52, 58, 82),
    (58, 82, 139),
    (38, 112, 142),
    (31, 142, 137),
    (53, 172, 112),
    (122, 200, 78),
    (186, 215, 45),
    (253, 231, 37),
)
MARGIN = 20
GAP = 10
MIN_WIDTH = 560  # pixels of a canvas with a title
_FAINT = 0.5  # contrast of a picture below a heat map
_STRONG = 0.75  # opacity of a heat map
SMALLEST_SIDE = 144  # pixels of an image on a sheet


def sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] = (),
    *,
    columns: int | None = None,
    title: str = "",
    side: int = SMALLEST_SIDE,
) -> Image.Image:
    """Return a sheet of all images, row by row, each enlarged to about `side` pixels.

    Args:
        images: Images of one size.
        captions: One for each image, or none.
        columns: Images in a row; None to choose.
        title: Title above the images.
        side: Pixels of the shorter side of an image.

    Raises:
        InputError: There is no image, or the number of captions differs.
    """
    _check_images(images)
    if captions and len(captions) != len(images):
        raise InputError(
            f"Expected {len(images)} captions, got {len(captions)}. Pass one an image."
        )
    across = columns or _columns(len(images))
    pictures = [enlarged(image, side) for image in images]
    width, height = pictures[0].size
    below = 20 if captions else 0
    head = 34 if title else 0
    down = -(-len(images) // across)
    needed = 2 * MARGIN + across * (width + GAP) - GAP
    canvas = _canvas(
        max(needed, MIN_WIDTH) if title else needed,
        2 * MARGIN + head + down * (height + below + GAP) - GAP,
    )
    draw = ImageDraw.Draw(canvas)
    if title:
        write(draw, (MARGIN, MARGIN - 6), title, 18, most=canvas.width - 2 * MARGIN)
    for number, image in enumerate(pictures):
        row, column = divmod(number, across)
        x = MARGIN + column * (width + GAP)
        y = MARGIN + head + row * (height + below + GAP)
        canvas.paste(image, (x, y))
        if captions:
            write(draw, (x, y + height + 3), captions[number], 12, SOFT, most=width)
    return canvas


def heat_map(image: Image.Image, together: NDArray[np.int64], *, side: int = 256) -> Image.Image:
    """Return the image under its acceptance map, enlarged to about `side` pixels.

    Args:
        image: Image of the codes.
        together: i64 [h, w], codes of the forward that gave each code. White lines separate
            forwards.
        side: Pixels of the shorter side.

    Raises:
        InputError: The map has another number of dimensions.
    """
    if together.ndim != 2:
        raise InputError(f"Expected a map [h, w], got {together.shape}. Pass one image's map.")
    picture = enlarged(image, side)
    down, across = together.shape
    colours = np.asarray(RAMP, dtype=np.uint8)[np.clip(together, 1, len(RAMP)) - 1]
    cells = Image.fromarray(colours).resize(picture.size, Image.Resampling.NEAREST)
    # The colours must look alike on white and on black.
    grey = Image.new("RGB", picture.size, (128, 128, 128))
    faint = Image.blend(grey, picture.convert("L").convert("RGB"), _FAINT)
    mixed = Image.blend(faint, cells, _STRONG)
    draw = ImageDraw.Draw(mixed)
    wide, high = picture.width / across, picture.height / down
    for place in _starts(together.reshape(-1)):
        y, x = divmod(place, across)
        if x:  # rows need no line between them
            ends = [(x * wide, y * high), (x * wide, (y + 1) * high - 1)]
            draw.line(ends, (255, 255, 255), 2)
    return mixed


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """Return the image in RGB with repeated pixels, its shorter side about `side` long.

    A larger image is scaled down smoothly.
    """
    flat = _flattened(image)
    shorter = min(flat.size)
    if shorter > side:
        size = (round(flat.width * side / shorter), round(flat.height * side / shorter))
        return flat.resize(size, Image.Resampling.LANCZOS)
    times = max(1, round(side / shorter))
    return flat.resize((flat.width * times, flat.height * times), Image.Resampling.NEAREST)


def _flattened(image: Image.Image) -> Image.Image:
    """Return the image in RGB; transparent pixels show the background."""
    if image.mode not in ("RGBA", "LA", "PA"):
        return image.convert("RGB")
    backdrop = Image.new("RGBA", image.size, (*BACKDROP, 255))
    return Image.alpha_composite(backdrop, image.convert("RGBA")).convert("RGB")


def _canvas(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), BACKDROP)


def _columns(count: int) -> int:
    """Return the images of a row: somewhat wider than high, with full rows if possible."""
    best = min(count, int(np.ceil(np.sqrt(1.6 * count))))
    return next((n for n in (best, best + 1, best - 1) if n > 0 and count % n == 0), best)


def _check_images(images: Sequence[Image.Image]) -> None:
    if not images:
        raise InputError("Expected at least one image, got none. Pass images.")
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise InputError(f"Expected images of one size, got {sorted(sizes)}. Resize them.")


def _starts(together: NDArray[np.int64]) -> list[int]:
    """Return the places at which a forward begins, without the first."""
    places, place = [], int(together[0]) if len(together) else 0
    while place < len(together):
        places.append(place)
        place += max(1, int(together[place]))
    return places
