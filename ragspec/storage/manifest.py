"""The manifest of a store: its kind, its parameters, and a hash of every file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ragspec.errors import StoreError
from ragspec.storage.filesystem import unreadable

FORMAT = 1
MANIFEST = "manifest.json"

Verify = Literal["full", "size"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file of a store."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record that a store keeps of its contents.

    Attributes:
        kind: The kind of the contents, for example "passages".
        parameters: The settings of the build.
        fingerprints: Hashes of the tokenizer, embedder or model that the contents depend on.
        files: The records of all data files by relative name.
    """

    kind: str
    parameters: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the JSON text for the disk. Equal manifests give equal bytes."""
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Self:
        """Parse the manifest that was read from `path`.

        Raises:
            StoreError: The manifest is damaged or has another format.
        """
        try:
            raw = json.loads(data)
            files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
            manifest = cls(files=files, **raw)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise StoreError(f"{path} is no manifest ({error}); make its folder again.") from error
        if manifest.format != FORMAT:
            raise StoreError(
                f"{path} has format {manifest.format}, expected {FORMAT}; make its folder again."
            )
        return manifest


@dataclass(frozen=True, slots=True)
class Contents:
    """The metadata of a new generation, returned by writers that only know it after writing.

    Attributes:
        parameters, fingerprints: See `Manifest`.
        carried: Records of files from an older generation. Their hashes are not computed again,
            so that later checks still detect damage to them.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    carried: Mapping[str, FileRecord] = field(default_factory=dict)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_file(folder: Path, name: str, record: FileRecord, verify: Verify) -> None:
    """Raise StoreError unless a file lies inside the folder and matches its record."""
    path = folder / name
    try:
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            raise FileNotFoundError(path)
        size = path.stat().st_size
        digest = sha256_file(path) if verify == "full" and size == record.size else record.sha256
    except OSError as error:  # a writer may remove an old generation at any moment
        raise unreadable(path, error) from error
    if size != record.size:
        raise StoreError(
            f"{path} has {size} bytes, expected {record.size}: it is truncated or "
            "was changed; make its folder again."
        )
    if digest != record.sha256:
        raise StoreError(
            f"{path} does not have the recorded SHA-256: it was changed or the disk is failing; "
            "make its folder again."
        )
