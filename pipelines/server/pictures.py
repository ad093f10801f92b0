"""Images for `/v1/images/generations`."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ragspec.pipelines.server.errors import ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

    from ragspec.pipelines.server.schema import ImageRequest
    from ragspec.pipelines.server.serving import Serving
    from ragspec.visual.output import ImageOutput
    from ragspec.visual.pipeline import ImagePipeline


def draw(body: ImageRequest, serving: Serving, gone: Callable[[], bool]) -> dict[str, object]:
    """Draw images and return them in OpenAI's form, as PNG.

    Args:
        body: For a model of classes the prompt is the name of a class.
        gone: Returns whether the client has disconnected; checked after every pass.

    Raises:
        ApiError: There is no such image model; also the errors of the pipeline.
    """
    pipe = _pipeline(body.model, serving.images)
    options: dict[str, Any] = {"callback_on_step_end": lambda *_: gone()}
    if body.size not in (None, "auto"):
        options["width"], options["height"] = map(int, str(body.size).split("x"))
    if body.guidance_scale is not None:
        options["guidance_scale"] = body.guidance_scale
    if body.seed is not None:
        options["seed"] = body.seed
    subject = pipe.family.condition
    if subject is not None:
        options[subject] = body.prompt
    out = pipe(num_images_per_prompt=body.n or 1, **options)
    data = [{"b64_json": _png(image)} for image in out.images]
    return {"created": int(time.time()), "data": data, "metrics": _metrics(out)}


def _pipeline(model: str | None, images: Mapping[str, ImagePipeline]) -> ImagePipeline:
    """Return the pipeline of a name, or the first one."""
    if not images:
        raise ApiError(404, "no image model is served here; expected one (--images NAME).")
    name = next(iter(images)) if model is None else model
    if name not in images:
        message = f"got the model {name!r}; expected one of {', '.join(images)}."
        raise ApiError(404, message, "model_not_found", "model")
    return images[name]


def _png(image: Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _metrics(out: ImageOutput) -> dict[str, object]:
    stats = out.stats
    tokens = sum(report.tokens for report in stats.reports) or stats.excess.size
    record = {"num_forwards": stats.forwards, "num_tokens": tokens, "label": out.label}
    return {"speculative_decoding": {**record, "seeds": list(stats.seeds)}}
