"""The files that `ragspec draw` writes: names that tell pictures apart, and what drew them.

Every PNG holds, as text under the key "ragspec", what it is a function of. A file that is there
already and was drawn otherwise is never overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.cli.drawn import Asked

if TYPE_CHECKING:
    from PIL.Image import Image

KEY = "ragspec"
LETTERS = 40  # of what is drawn, in a name; as many of the rule


def slug(text: str) -> str:
    """Return a text as a part of a file's name: letters and digits of any script, and hyphens."""
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:LETTERS].strip("-") or "image"


def stem_of(asked: Asked, seed: int) -> str:
    """Return how the names of all pictures of a call begin: what is drawn, seed and rule."""
    rule = asked.rule_told().replace("++", "-plus")
    kept = "-kept" if asked.image is not None else ""
    return f"{slug(asked.subject)}-{seed}-{slug(rule)}{kept}"


def records(asked: Asked, seed: int, dtype: str) -> list[dict[str, Any]]:
    """Return for each image what it is a function of, as JSON types."""
    common: dict[str, Any] = {
        "model": asked.source(),
        "seed": seed,
        "rule": asked.rule,
        "settings": asked.given(),
        "guidance": asked.guidance,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "dtype": dtype,
    }
    if denoising := {name: value for name, value in asked.denoising.items() if value is not None}:
        common["denoising"] = denoising
    if asked.rule != "exact":  # drafts show in the picture
        common |= {"drafter": "+".join(asked.drafter), "budget": asked.budget}
    if asked.kept is not None:
        common |= {"image": str(asked.image), "codes": asked.kept.codes.tolist()}
    count = len(asked.subjects) * asked.count
    return [
        {"subject": asked.subjects[number // asked.count], "number": number, **common}
        for number in range(count)
    ]


def check_free(paths: Sequence[Path], told: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError where a file is there that was not drawn in the same way."""
    for path, record in zip(paths, told, strict=True):
        if path.exists() and (differs := _difference(_record_of(path), record)):
            raise InputError(
                f"{path} is there already, {differs}; expected a free name. Name another folder "
                "with --out, or move the file."
            )


def save(image: Image, path: Path, record: Mapping[str, Any]) -> None:
    """Write a PNG with what it is a function of."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text(KEY, json.dumps(record, sort_keys=True))
    image.save(path, pnginfo=info)


def _record_of(path: Path) -> dict[str, Any] | None:
    from PIL import Image

    try:
        with Image.open(path) as found:
            record = json.loads(str(found.info.get(KEY, "")))
    except (OSError, ValueError, SyntaxError):
        return None
    return record if isinstance(record, dict) else None


def _difference(found: dict[str, Any] | None, wanted: Mapping[str, Any]) -> str:
    """Say in which point two pictures were drawn otherwise; nothing where in none."""
    if found is None:
        return "and is no picture of this command"
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if not names:
        return ""
    name = names[0]
    if name in ("codes", "settings"):
        return f"drawn with other {name}"
    return f"drawn with {name} {found.get(name)}, not {wanted.get(name)}"
