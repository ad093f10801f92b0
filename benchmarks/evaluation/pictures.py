"""Pictures for people: sample sheets, heat-maps of accepted codes, plain against speculative.

Everything is drawn with Pillow onto a light ground. Small images are enlarged without smoothing,
so that every pixel and every code stays visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from evaluation.lettering import INK, SOFT, Colour, font, width_of, write
from ragspec.errors import InputError

BACKDROP: Colour = (250, 250, 248)
LINE: Colour = (214, 216, 220)
RELAXED: Colour = (214, 39, 76)
# From one code a forward (slate) to eight or more (yellow): lightness rises all along the way.
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
NARROWEST = 560  # pixels of a canvas that a title or a key fits on
_FAINT = 0.5  # what is left of a picture's contrast, about middle grey, below a heat-map
_STRONG = 0.75  # the part of a colour of the key in what lies over it
SMALLEST_SIDE = 144  # pixels of an image on a sheet


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a comparison: a heading, a line below it, and one image a row."""

    heading: str
    note: str
    images: Sequence[Image.Image]


def sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] = (),
    *,
    columns: int | None = None,
    title: str = "",
    side: int = SMALLEST_SIDE,
) -> Image.Image:
    """Return a sheet of all images, row by row, each enlarged to about `side` pixels.

    captions: one for each image, or none. Raises InputError for no image or a wrong count.
    """
    _check_images(images)
    if captions and len(captions) != len(images):
        raise InputError(
            f"got {len(captions)} captions for {len(images)} images; expected one each"
        )
    across = columns or _columns(len(images))
    text = [enlarged(image, side) for image in images]
    width, height = text[0].size
    below = 20 if captions else 0
    head = 34 if title else 0
    down = -(-len(images) // across)
    needed = 2 * MARGIN + across * (width + GAP) - GAP
    canvas = _canvas(
        max(needed, NARROWEST) if title else needed,
        2 * MARGIN + head + down * (height + below + GAP) - GAP,
    )
    draw = ImageDraw.Draw(canvas)
    if title:
        write(draw, (MARGIN, MARGIN - 6), title, 18, most=canvas.width - 2 * MARGIN)
    for number, image in enumerate(text):
        row, column = divmod(number, across)
        x = MARGIN + column * (width + GAP)
        y = MARGIN + head + row * (height + below + GAP)
        canvas.paste(image, (x, y))
        if captions:
            write(draw, (x, y + height + 3), captions[number], 12, SOFT, most=width)
    return canvas


def heat_map(
    image: Image.Image,
    together: NDArray[np.int64],
    relaxed: NDArray[np.bool_] | None = None,
    *,
    parted: tuple[int, int] | None = None,
    side: int = 256,
) -> Image.Image:
    """Return the image under its acceptance map, enlarged to about `side` pixels.

    together i64 [h, w]: how many codes came with the forward that gave this code; a white line
    parts one forward from the next. relaxed bool [h, w]: marks, with a dot, the codes that the
    rule took in place of the target's own. parted: row and column of a code that gets a frame.
    Raises InputError where the shapes differ.
    """
    if together.ndim != 2 or (relaxed is not None and relaxed.shape != together.shape):
        got = (together.shape, None if relaxed is None else relaxed.shape)
        raise InputError(f"got maps of shapes {got}; expected [h, w] each")
    text = enlarged(image, side)
    down, across = together.shape
    colours = np.asarray(RAMP, dtype=np.uint8)[np.clip(together, 1, len(RAMP)) - 1]
    cells = Image.fromarray(colours).resize(text.size, Image.Resampling.NEAREST)
    # On white as on black the colours must look like those of the key.
    middle = Image.new("RGB", text.size, (128, 128, 128))
    faint = Image.blend(middle, text.convert("L").convert("RGB"), _FAINT)
    mixed = Image.blend(faint, cells, _STRONG)
    draw = ImageDraw.Draw(mixed)
    wide, high = text.width / across, text.height / down
    for place in _starts(together.reshape(-1)):
        y, x = divmod(place, across)
        if x:  # between rows there is nothing to part
            ends = [(x * wide, y * high), (x * wide, (y + 1) * high - 1)]
            draw.line(ends, (255, 255, 255), 2)
    for y, x in () if relaxed is None else np.argwhere(relaxed).tolist():
        _dot(draw, ((x + 0.5) * wide, (y + 0.5) * high), max(2.5, wide / 9))
    if parted is not None:
        y, x = parted
        _frame(draw, (x * wide, y * high, (x + 1) * wide - 1, (y + 1) * high - 1))
    return mixed


def comparison(
    columns: Sequence[Column],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    rows: Sequence[str] = (),
    dots: bool = True,
    frames: bool = False,
    side: int = 256,
) -> Image.Image:
    """Return the columns side by side with their headings, and the key of the heat-map below.

    rows: what stands above each row, or none. dots, frames: whether the key tells what they mean.
    All columns need as many images as the first, and as `rows`. Raises InputError where they do
    not.
    """
    if not columns or any(len(c.images) != len(columns[0].images) for c in columns):
        counts = [len(column.images) for column in columns]
        raise InputError(f"got columns of {counts} images; expected at least one, equally many")
    count = len(columns[0].images)
    if rows and len(rows) != count:
        raise InputError(f"got {len(rows)} names for {count} rows of images; expected one each")
    _check_images(columns[0].images)
    head = (36 if title else 0) + 20 * len(notes) + (6 if notes else 0)
    named = 20 if rows else 0
    width = 2 * MARGIN + len(columns) * (side + 2 * GAP) - 2 * GAP
    top = MARGIN + head + 46
    canvas = _canvas(max(width, NARROWEST), top + count * (side + GAP + named) + 44)
    draw = ImageDraw.Draw(canvas)
    if title:
        write(draw, (MARGIN, MARGIN - 6), title, 20, most=canvas.width - 2 * MARGIN)
    for number, note in enumerate(notes):
        at = (MARGIN, MARGIN + (28 if title else 0) + 20 * number)
        write(draw, at, note, 14, SOFT, most=canvas.width - 2 * MARGIN)
    for number, column in enumerate(columns):
        x = MARGIN + number * (side + 2 * GAP)
        write(draw, (x, top - 46), column.heading, 15, most=side)
        write(draw, (x, top - 24), column.note, 13, SOFT, most=side)
        for row, image in enumerate(column.images):
            y = top + row * (side + GAP + named) + named
            canvas.paste(enlarged(image, side).resize((side, side)), (x, y))
    for row, said in enumerate(rows):
        at = (MARGIN, top + row * (side + GAP + named))
        write(draw, at, said, 13, SOFT, most=canvas.width - 2 * MARGIN)
    _key(draw, MARGIN, canvas.height - 32, dots, frames)
    return canvas


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """Return the image in RGB, its pixels repeated until its shorter side is about `side`.

    An image that is larger than that is made smaller, smoothly.
    """
    flat = _flattened(image)
    shorter = min(flat.size)
    if shorter > side:
        size = (round(flat.width * side / shorter), round(flat.height * side / shorter))
        return flat.resize(size, Image.Resampling.LANCZOS)
    times = max(1, round(side / shorter))
    return flat.resize((flat.width * times, flat.height * times), Image.Resampling.NEAREST)


def _flattened(image: Image.Image) -> Image.Image:
    """Return the image in RGB; what is see-through shows the ground of the sheet."""
    if image.mode not in ("RGBA", "LA", "PA"):
        return image.convert("RGB")
    draft_state = Image.new("RGBA", image.size, (*BACKDROP, 255))
    return Image.alpha_composite(draft_state, image.convert("RGBA")).convert("RGB")


def _canvas(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), BACKDROP)


def _columns(count: int) -> int:
    """Return how many images stand side by side: somewhat wider than high, full rows if near."""
    best = min(count, int(np.ceil(np.sqrt(1.6 * count))))
    return next((n for n in (best, best + 1, best - 1) if n > 0 and count % n == 0), best)


def _check_images(images: Sequence[Image.Image]) -> None:
    if not images:
        raise InputError("got no image to draw; expected at least one")
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise InputError(f"got images of sizes {sorted(sizes)}; expected one size on a sheet")


def _starts(together: NDArray[np.int64]) -> list[int]:
    """Return the places, behind the first, at which a forward begins."""
    places, place = [], int(together[0]) if len(together) else 0
    while place < len(together):
        places.append(place)
        place += max(1, int(together[place]))
    return places


def _dot(draw: ImageDraw.ImageDraw, at: tuple[float, float], radius: float) -> None:
    x, y = at
    draw.ellipse([x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1], (255, 255, 255))
    draw.ellipse([x - radius, y - radius, x + radius, y + radius], RELAXED)


def _frame(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = box
    draw.rectangle([left - 2, top - 2, right + 2, bottom + 2], outline=(255, 255, 255), width=2)
    draw.rectangle([left, top, right, bottom], outline=RELAXED, width=3)


def _key(draw: ImageDraw.ImageDraw, x: float, y: float, dots: bool, frames: bool) -> None:
    """Draw what the colours of the heat-map, its dots and its frames mean."""
    text = "codes from one forward"
    write(draw, (x, y), text, 13, SOFT)
    x += width_of(text, 13) + 10
    for number, colour in enumerate(RAMP, start=1):
        draw.rectangle([x, y - 1, x + 24, y + 17], colour)
        light = INK if number > 4 else (255, 255, 255)
        said = f"{number}+" if number == len(RAMP) else str(number)
        draw.text((x + 12, y + 8), said, fill=light, font=font(12), anchor="mm")
        x += 26
    if dots:
        _dot(draw, (x + 20, y + 8), 4)
        write(draw, (x + 30, y), "another code than the target's", 13, SOFT)
    elif frames:
        _frame(draw, (x + 14, y + 1, x + 28, y + 15))
        write(draw, (x + 38, y), "the first other code", 13, SOFT)
