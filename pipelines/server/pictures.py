"""Images for `/v1/images/generations`."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.server.errors import ApiError

if TYPE_CHECKING:
    from ragspec.pipelines.server.schema import ImageRequest
    from ragspec.pipelines.server.serving import Serving


def draw(request: ImageRequest, serving: Serving, gone: Callable[[], bool]) -> dict[str, Any]:
    """Draw images and return them in OpenAI's form, as PNG.

    Args:
        request: For a model of classes the prompt is the name of a class.
        gone: Returns whether the client has disconnected; checked after every pass.

    Raises:
        ApiError: There is no such image model; also the errors of the pipeline.
    """
    pipe = _pipeline(request, serving)
    options: dict[str, Any] = {**_size(request.size), "callback_on_step_end": _ends(gone)}
    if request.guidance_scale is not None:
        options["guidance_scale"] = request.guidance_scale
    if request.seed is not None:
        options["seed"] = request.seed
    count = 1 if request.n is None else request.n
    subject = pipe.family.condition
    if subject is not None:
        options[subject] = request.prompt
    out = pipe(num_images_per_prompt=count, **options)
    data = [{"b64_json": _png(image)} for image in out.images]
    return {"created": int(time.time()), "data": data, "metrics": _metrics(out)}


def _pipeline(request: ImageRequest, serving: Serving) -> Any:
    """Return the pipeline that the request names, or the first one."""
    images = serving.images
    if not images:
        raise ApiError(404, "no image model is served here; expected one (--images NAME).")
    name = next(iter(images)) if request.model is None else request.model
    if name not in images:
        message = f"got the model {name!r}; expected one of {', '.join(images)}."
        raise ApiError(404, message, "model_not_found", "model")
    return images[name]


def _ends(gone: Callable[[], bool]) -> Callable[..., bool]:
    """Return a pipeline callback that stops the image once the client has disconnected."""
    return lambda *message: gone()


def _size(size: str | None) -> dict[str, int]:
    """Return height and width, {} for the model's default."""
    if size in (None, "auto"):
        return {}
    width, _, height = str(size).partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InputError(f"size is {size!r}; expected WIDTHxHEIGHT, such as 64x64, or auto.")
    return {"height": int(height), "width": int(width)}


def _png(image: Any) -> str:
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def _metrics(out: Any) -> dict[str, Any]:
    stats = out.stats
    return {
        "speculative_decoding": {
            "num_forwards": stats.forwards,
            "num_tokens": sum(report.tokens for report in stats.reports) or stats.excess.size,
            "label": out.label,
            "seeds": list(stats.seeds),
        }
    }
