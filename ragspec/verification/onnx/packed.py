"""Weights in a file that the runtime maps, also as it packs them for its products.

ONNX Runtime copies quantized weights into the order of its kernels. From 1.28 on it can write these
copies beside a graph and map them later. Then they are no private memory, and all sessions share
them, whatever their process.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ragspec.models.onnx_session import Session

PAGE = 4096  # kernels align parts of a packed weight by its address, as in memory


def store_weights(file: Path, weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Write weights to a file; return the place of each. One that occurs twice is stored once."""
    places = dict[int, dict[str, str]]()
    with file.open("wb") as stream:
        for weight in weights.values():
            if weight.data_ptr() not in places:
                start = _append(stream, weight.reshape(-1).view(torch.uint8).numpy().tobytes())
                numbers = {"offset": str(start), "length": str(weight.nbytes)}
                places[weight.data_ptr()] = {"location": file.name, **numbers}
    return {name: dict(places[weight.data_ptr()]) for name, weight in weights.items()}


def store_packed(graph: Path, file: Path, places: Mapping[str, dict[str, str]]) -> None:
    """Append weights to their file as the runtime packs those of a graph; complete their places.

    Runtimes before 1.28 write none, and pack whenever they open a graph.
    """
    import onnx

    with tempfile.TemporaryDirectory(dir=graph.parent) as folder:
        saved = Path(folder) / "packed.onnx"
        Session(str(graph), save=saved)
        weights = onnx.load(saved, load_external_data=False).graph.initializer
        entries = [(each.name, entry) for each in weights for entry in each.external_data]
        with saved.with_suffix(".bin").open("rb") as source, file.open("ab") as stream:
            for name, entry in entries:
                if entry.key.startswith("prepacked"):
                    key, _, text = entry.value.partition("|")
                    numbers = text.split(";")  # offset, length and a flag of each part
                    for at in range(0, len(numbers), 3):
                        source.seek(int(numbers[at]))
                        numbers[at] = str(_append(stream, source.read(int(numbers[at + 1]))))
                    places[name][entry.key] = f"{key}|{';'.join(numbers)}"


def _append(stream: IO[bytes], part: bytes) -> int:
    """Write a part from the next page on; return its offset."""
    stream.write(bytes(-stream.tell() % PAGE))
    start = stream.tell()
    stream.write(part)
    return start
