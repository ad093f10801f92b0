"""The pages of the benchmarks: templates of this folder that extend the library's base page."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ragspec.pipelines.page.page import TEMPLATES


def render_template(name: str, **values: Any) -> str:
    """Render a template; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)


def embedded(image: Any) -> str:
    """Return a picture as a data URL."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode("ascii")
