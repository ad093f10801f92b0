"""A tiny static embedder in the folder format of sentence-transformers."""

import json
from pathlib import Path

import torch

WORDS = [
    *("cat", "dog", "pet", "animal", "car", "train", "rail", "engine", "wheel", "speculation"),
    *("draft", "token", "tree", "model", "the", "a", "of", "what", "is", "."),
]


def make_embedder(folder: Path, dimensions: int = 16, seed: int = 0) -> Path:
    """Write a folder whose words are random unit directions."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(len(vocabulary), dimensions, generator=generator)
    table[0] = 0
    save_file({"embedding.weight": table.half()}, folder / "model.safetensors")
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": "" if number == 0 else f"{number}_{kind}",
            "type": f"sentence_transformers.sentence_transformer.modules.{kind}",
        }
        for number, kind in enumerate(["StaticEmbedding", "Normalize"])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text("{}")
    return folder
