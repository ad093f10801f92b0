"""What a GGUF file says about its tokenizer and transformers does not read."""

import contextlib
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragspec.errors import UnsupportedModelError
from ragspec.models.gguf import VERSION, part_folder
from ragspec.types import Tokenizer

# What cuts a text into words, by its name in llama.cpp.
GPT2 = frozenset(
    {"", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"}
)
DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
PATTERNS = MappingProxyType({"stablelm2": (_QWEN2,), "bloom": (_BLOOM,), "deepseek-coder": _CODER})


def read_values(file: Path) -> dict[str, Any]:
    """Return the single values of a GGUF file, by name without the first part."""
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(file).fields.items()
    single = {name: each for name, each in fields if each.types[0] is not GGUFValueType.ARRAY}
    return {name.partition(".")[2]: each.contents() for name, each in single.items()}


def complete_tokenizer(tokenizer: Tokenizer, file: Path) -> None:
    """Let a tokenizer cut text into words as its GGUF file says.

    Raises:
        UnsupportedModelError: The file names an unknown kind.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    values, backend = read_values(file), tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, ByteLevel):  # transformers does not know the kind
        kind = values.get("ggml.pre", "")
        if (cut := splitter(kind)) is None:
            raise UnsupportedModelError(
                f"{file} has a tokenizer of the kind {kind!r}, which is not read from GGUF; its "
                "tokens would be wrong. Name the folder of the model in place of the file."
            )
        backend.pre_tokenizer = cut


def splitter(kind: str) -> object:
    """Return what cuts a text into words for a kind of tokenizer; None if it is unknown."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

    words = ByteLevel(add_prefix_space=False)
    if kind == "falcon":
        threes = Split(Regex("[0-9][0-9][0-9]"), "isolated")
        return Sequence([Punctuation("contiguous"), words, Digits(), threes])
    if kind in PATTERNS:
        cuts = [Split(Regex(each), "isolated") for each in PATTERNS[kind]]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind in DIGITS:
        return Sequence([Digits(individual_digits=True), words])
    return words if kind in GPT2 else None


def renew(folder: Path) -> None:
    """Correct the tokenizer of SmolLM2 in a folder that an earlier version fetched."""
    from tokenizers import Tokenizer as Backend

    mark = folder / f"version-{VERSION}"
    if folder.is_dir() and not mark.exists():
        with contextlib.suppress(Exception), part_folder(folder.parent) as part:  # loading reports
            backend = Backend.from_file(str(folder / "tokenizer.json"))
            backend.pre_tokenizer = splitter("smollm")
            backend.save(str(new := Path(part) / "tokenizer.json"))
            os.replace(new, folder / new.name)
            mark.touch()
