"""Tiny real models and tokenizers with random weights, built once per test run.

They are for tests of equality and distributions, never of speed: random models loop.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.architectures import ARCHITECTURES, make

VOCAB = 97
EOS = "<eos>"

# Types that cannot do with the common sizes; the whole zoo is in `support.architectures`.
OWN = {name: ARCHITECTURES[name].settings for name in ("mistral", "qwen3_next")}


def model(
    architecture: str = "llama",
    *,
    vocab_size: int = VOCAB,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """Return a causal model of 2 layers, 64 wide, in eval mode; the same object for equal calls.

    Tests share the object; a test that changes it works on `copy.deepcopy`.
    """
    return _model(architecture, vocab_size, seed, dtype, tuple(sorted(overrides.items())))


@cache
def _model(
    architecture: str,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
    overrides: tuple[tuple[str, Any], ...],
) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1),
    }
    settings |= OWN.get(architecture, {}) | dict(overrides)
    return make(architecture, dtype, seed, **settings)


@cache
def tokenizer(*, chat: bool = False) -> Any:
    """Return a tokenizer of 97 ids: 95 printable ASCII characters, the line break, and EOS.

    One character is one token, so `decode(encode(text)) == text` and offsets are plain; other
    characters are dropped. `chat` adds a chat template.
    """
    from tokenizers import Tokenizer, decoders, models

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {character: i for i, character in enumerate(characters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    instance = _wrapped(backend)
    if chat:
        instance.chat_template = (
            "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
        )
    return instance


def save(folder: Path, *, chat: bool = False, **settings: Any) -> str:
    """Write a model of these settings and its tokenizer to a folder; return the folder."""
    model(**settings).save_pretrained(folder)
    tokenizer(chat=chat).save_pretrained(folder)
    return str(folder)


TEXT = (
    "A draft model proposes several tokens and the target model checks them all at once. "
    "The tokens that the target would have chosen itself are kept; the first that it would not "
    "have chosen is replaced, and the rest of the draft is thrown away.\n\n"
    "Where does a draft come from? From the prompt, from a document that was retrieved for the "
    "question, from an earlier answer, or from a smaller model. A tree of drafts holds several "
    "continuations of one text, and one forward pass reads the whole tree.\n\n"
    "Evidence: [1] the verified tokens are the same, whatever the draft was.\nAnswer: the same\n"
)


@cache
def bpe_tokenizer(vocab_size: int = 320) -> Any:
    """Return a byte-level BPE tokenizer trained on `TEXT`: tokens of several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return _wrapped(backend)


def _wrapped(backend: Any) -> Any:
    """Return a tokenizer of the tokenizers package as one of transformers."""
    from transformers import PreTrainedTokenizerFast

    cleans, longest = {"clean_up_tokenization_spaces": False}, {"model_max_length": 512}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=EOS, **cleans, **longest
    )


def prompt(length: int = 24, *, vocab_size: int = VOCAB, seed: int = 0) -> list[int]:
    """Return random token ids [length] without EOS (the last id)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size - 1, (length,), generator=generator).tolist()


@torch.no_grad()
def logits(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Return what a model's plain forward gives at every token of a text: [n, V]."""
    result: torch.Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return result


def greedy(model: Any, text: list[int], new: int) -> list[int]:
    """Return what plain decoding of transformers writes after a text."""
    ids = torch.tensor([text])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    tokens: list[int] = out[0, len(text) :].tolist()
    return tokens
