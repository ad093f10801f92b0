"""Tiny image models of transformers with random weights, and tokenizers with their tokens."""

import copy
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from tests.support import tiny_images
from tests.support.architectures import COMMON

SIDE = 3  # of the square of codes
BOOK = 24
WORDS = ("a", "red", "blue", "cat", "bicycle", "tree", "User", "*", "8x4", *map(str, range(6)))
MARKS = {"pad_token": "<pad>", "bos_token": "<s>", "sep_token": "<sep>", "unk_token": "<unk>"}
IMAGE_MARKS = {
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "image_token": "<image>",
    "image_wrapper_token": "<first>",
    "eof_token": "<eof>",
}
CHAT = (
    "{% for message in messages %}User {% for part in message['content'] %}{{ part['text'] }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %} *{% endif %}"
)
_LINE = "<|extra_200|>"
_ALL = [*MARKS.values(), *IMAGE_MARKS.values(), _LINE, *WORDS]
FIRST = len(_ALL)  # the token of code 0, where codes are tokens
LINE = _ALL.index(_LINE)
TEXT = COMMON | {
    "vocab_size": FIRST + BOOK,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "initializer_range": 0.4,
}
VQ: dict[str, Any] = {"base_channels": 32, "num_res_blocks": 1, "embed_dim": 4}


class Seeded(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Makes transformers sample with the project's noise: it leaves the token of the seed alone.

    codes: the tokens to sample from, in order; scores that exclude all of them stay unchanged.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], codes: Sequence[int]) -> None:
        self.distributions = [
            TokenDistribution(sampling, NoiseStream(seed, 0), 0) for seed in seeds
        ]
        self.codes = torch.tensor(list(codes))
        self.index = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [R, V] with all but one of each row at minus infinity."""
        logits = scores[:, self.codes]
        if bool(logits.isinf().all()):
            return scores
        selected = torch.full_like(scores, float("-inf"))
        for row, distribution in enumerate(self.distributions):
            message = distribution.process(logits[row : row + 1], [0] * self.index, [[]])
            selected[row, self.codes[int(distribution.select(message, [self.index]))]] = 0.0
        self.index += 1
        return selected


def tokenizer(kind: str) -> Any:
    """Return a tokenizer of words; all but Emu3's put begin of text before them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    instance = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(_ALL)}, unk_token="<unk>")
    )
    instance.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "emu3":
        instance.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    message = PreTrainedTokenizerFast(
        tokenizer_object=instance, padding_side="left", extra_special_tokens=IMAGE_MARKS, **MARKS
    )
    if kind == "janus":
        message.chat_template = CHAT
    return message


@cache
def model(kind: str, seed: int = 0) -> Any:
    """Return a float64 model with random weights; the same object for equal calls."""
    makers = {"janus": _janus, "emu3": _emu3, "chameleon": _chameleon, "imagegpt": _imagegpt}
    makers["lumina"] = partial(_chameleon, z_loss_weight=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return makers[kind]().double().eval()


def save(folder: Path, kind: str) -> Path:
    """Save a model of float32 with its tokenizer and a draft model, and return the folder."""
    copy.deepcopy(model(kind)).float().save_pretrained(folder)
    copy.deepcopy(model(kind, 1)).float().save_pretrained(folder / "draft")
    tokenizer(kind).save_pretrained(folder)
    return folder


def save_lumina(folder: Path) -> Path:
    """Save a Lumina-mGPT with a draft model and a decoder, as its training code does."""
    for seed, place in enumerate((folder, folder / "draft")):
        every = model("lumina", seed).state_dict().items()
        weights = {name: each for name, each in every if ".vqmodel." not in name}
        rows = {name: each[:1] for name, each in weights.items() if "_norm." in name}
        norms = {name: torch.rand_like(each) for name, each in rows.items()}
        model("lumina", seed).save_pretrained(place, state_dict=weights | norms)
    tokenizer("lumina").save_pretrained(folder)
    chameleon_vq().save_pretrained(folder / "vq")
    return folder


def save_imagegpt(folder: Path) -> Path:
    """Save an ImageGPT with its clusters of colours."""
    from transformers import ImageGPTImageProcessor

    model("imagegpt", 1).save_pretrained(folder)
    colours = np.random.default_rng(0).uniform(-1, 1, (BOOK, 3)).tolist()
    ImageGPTImageProcessor(clusters=colours).save_pretrained(folder)
    return folder


def chameleon_vq() -> Any:
    """Return a decoder of the tiny Chameleon's codes."""
    instance = tiny_images.tokenizer(BOOK).model
    book = model("chameleon").model.vqmodel.quantize.embedding.weight
    instance.quantize.embedding.load_state_dict({"weight": book.float()})
    return instance


def _janus() -> Any:
    from transformers import JanusConfig, JanusForConditionalGeneration

    book = {"num_embeddings": BOOK, "projection_dim": 32, "latent_channels": 32}
    grid = {"num_patches": SIDE, "channel_multiplier": [1, 1], "image_token_embed_dim": 32}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 6, "patch_size": 2, "projection_dim": 32, "num_image_tokens": SIDE**2}
    instance = JanusForConditionalGeneration(
        JanusConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config=vision | sizes,
            vq_config=VQ | book | grid,
            image_token_id=_ALL.index("<image>"),
        )
    )
    for part in (instance.model.generation_embeddings, instance.model.generation_head):
        for weight in part.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    for weight in instance.model.generation_aligner.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    request = instance.generation_config
    request.generation_kwargs = {"boi_token_id": _ALL.index("<boi>")}
    request.bos_token_id, request.pad_token_id = 1, 0
    return instance


def _emu3() -> Any:
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    names = {f"<|visual token {i:06d}|>": FIRST + i for i in range(BOOK)}
    book = {"codebook_size": BOOK, "channel_multiplier": [1, 1], "hidden_size": 32}
    return Emu3ForConditionalGeneration(
        Emu3Config(
            text_config=TEXT,
            vq_config=VQ | book,
            vocabulary_map=names | {"<image>": _ALL.index("<image>"), _LINE: LINE},
        )
    )


def _chameleon(**more: object) -> Any:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    letters = ("".join(chr(65 + int(digit)) for digit in str(i)) for i in range(BOOK))
    reserved = {"<reserved08799>": LINE, "<reserved08801>": 1, "<reserved08802>": 2}
    names = {f"IMGIMG{word}Z": FIRST + (7 * i) % BOOK for i, word in enumerate(letters)}
    book = {"num_embeddings": BOOK, "latent_channels": 32, "channel_multiplier": [1, 1]}
    return ChameleonForConditionalGeneration(
        ChameleonConfig(
            **TEXT,
            vq_config=VQ | book | {"resolution": 2 * SIDE},
            vocabulary_map=names | reserved | {"<image>": _ALL.index("<image>")},
            **more,
        )
    )


def _imagegpt() -> Any:
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    sizes = {"n_positions": SIDE**2, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return ImageGPTForCausalImageModeling(
        ImageGPTConfig(vocab_size=BOOK + 1, initializer_range=0.4, **sizes)
    )
