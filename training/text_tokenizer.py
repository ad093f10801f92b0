"""Train the byte-level BPE of the starter models: 8,192 tokens, `<|endoftext|>` = 0, lossless."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from text_data import read_documents

EOS = "<|endoftext|>"
VOCABULARY = 8192


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Any:
    """Train a byte-level BPE of `size` tokens on `texts`; `decode(encode(x)) == x` for any text.

    There is no normaliser and no added prefix space; token 0 (`<|endoftext|>`) ends, begins and
    pads a text. Returns a `transformers.PreTrainedTokenizerFast`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Train on the permissive training text and save the tokenizer's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("runs/text/tokenizer"))
    args = parser.parse_args()
    texts = [document.text for document in read_documents(args.shared)]
    train_tokenizer(texts).save_pretrained(args.out)


if __name__ == "__main__":
    main()
