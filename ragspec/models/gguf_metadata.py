"""What a GGUF file says of its tokenizer and ends of texts and transformers does not read."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ragspec.errors import UnsupportedModelError
from ragspec.models.gguf import VERSION, part_folder
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

GENERATION = "generation_config.json"
# What cuts a text into words, by its name in llama.cpp.
GPT2 = frozenset(
    {"", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"}
)
DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
ENDS |= {"<|endoftext|>", "<|end_of_text|>"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
PATTERNS = MappingProxyType({"stablelm2": (_QWEN2,), "bloom": (_BLOOM,), "deepseek-coder": _CODER})


def read_values(file: Path) -> dict[str, Any]:
    """Return the values of a GGUF file, by name without the first part; lengths for texts."""
    from transformers.integrations.gguf import read_gguf_metadata

    values, _ = read_gguf_metadata(str(file))
    return {name.partition(".")[2]: value for name, value in values.items()}


def ends_of(known: object, backend: Any, values: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: known ones, those that a GGUF file says or names so."""
    stated = {values.get(f"ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    special = {each.content for each in backend.get_added_tokens_decoder().values() if each.special}
    parts = {"<|end|>"} if "<|return|>" in special else set()  # it ends a part of an answer there
    named = {backend.model.token_to_id(name) for name in ENDS & special - parts}  # None if not here
    return sorted({*stated, *named, *(known if isinstance(known, list) else [known])} - {None})


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


def splitter(kind: str) -> "PreTokenizer | None":
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
    """Correct tokenizer and end tokens of SmolLM2 in a folder that an earlier version fetched."""
    from tokenizers import Tokenizer as Backend

    mark = folder / f"version-{VERSION}"
    if folder.is_dir() and not mark.exists():
        with contextlib.suppress(Exception), part_folder(folder.parent) as part:  # loading reports
            new, config = (Path(part) / name for name in ("tokenizer.json", GENERATION))
            backend = Backend.from_file(str(folder / new.name))
            backend.pre_tokenizer = splitter("smollm")
            backend.save(str(new))
            settings = json.loads((folder / config.name).read_text(encoding="utf-8"))
            ends = ends_of(settings["eos_token_id"], backend, {})
            config.write_text(json.dumps({**settings, "eos_token_id": ends}), encoding="utf-8")
            for path in (new, config):
                os.replace(path, folder / path.name)
            mark.touch()
