"""Families over image models of transformers: their targets, prompts and files.

The models are used unchanged. A target determines the embeddings of codes, the part of the model
that runs, the head for codes and which codes are allowed at each index. It takes its prompts, of
any length, as token ids of the model's own tokenizer; `prompt(row)` returns their condition ids.
Shorter prompts are padded on the left; padding is masked and has no positions. With guidance
`unconditional` has the prompt of the second row for each. Generated tokens
are codes 0 .. V - 1, numbered as in the model's own VQ decoder.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.device import input_device
from ragspec.models.load import LOCAL
from ragspec.types import PreTrainedModel, Tokenizer
from ragspec.verification.batch import Batch
from ragspec.visual.call import ImageCall, ImageConfig, checked_texts, negatives_of, some
from ragspec.visual.families.base import Family
from ragspec.visual.loading import ImageFolder, expect_kind, expect_readable
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ConditionTable, ImageTarget, run_model
from ragspec.visual.models.vq import ModelVQ, VQTokenizer

Ids = Sequence[int]
_TEMPLATE = "chat_template.json"  # the file of older processors


class MultimodalTarget(ImageTarget):
    """A base of the targets here: an inner model, and a head over the codes and possibly more.

    Args:
        prompts: Token ids of each prompt.
        unconditional: Token ids that guidance leads away from, see the module.
        guidance_scale, guidance_interval, raster, fixed: See `ImageTarget`.
    """

    kind: ClassVar[str]  # the model_type of its models
    # Returns the module of a model's last hidden states, and the head's id of each code.
    parts_of: ClassVar[Callable[..., tuple[PreTrainedModel, Ids]]]

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Ids],
        unconditional: Sequence[Ids] | None = None,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[int, int] | None = None,
        *,
        raster: Raster,
        fixed: Tensor | None = None,
    ) -> None:
        expect_kind(model, self.kind)
        if guidance_scale != 1.0 and unconditional is None:
            raise InputError(
                f"got guidance_scale {guidance_scale} without an unconditional prompt; expected "
                "the token ids of one for each. Pass unconditional=[[...]]."
            )
        self.inner, outputs = self.parts_of(model)
        table, size = prompt_table(model, prompts, unconditional), len(outputs)
        guidance = guidance_scale, guidance_interval
        super().__init__(model, table, *guidance, codes=size, fixed=fixed, raster=raster)
        self.outputs = torch.tensor(list(outputs), device=self.device)
        self.keeps_logits = True  # `run` does, whatever the model's own forward does
        longest = self.condition_length + raster.tokens
        self.max_length = min(longest, self.max_length or longest)

    def placed(self, positions: Tensor, hidden: Sequence[int]) -> Tensor:
        """Return positions i64 [R, n] counted from the first token that is no padding."""
        if not any(hidden):
            return positions
        return (positions - torch.tensor(hidden, device=positions.device)[:, None]).clamp(min=0)

    def run(self, embedded: Tensor, positions: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Return the kept queries' logits over the codes; see `ImageTarget.run`."""
        states = run_model(self.inner, embedded, positions, batch).last_hidden_state
        return self.head(states[:, -keep:] if isinstance(keep, int) else states[:, keep])


class TextCodesTarget(MultimodalTarget):
    """A base of targets whose codes are tokens of the text's vocabulary."""

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return the embeddings [B, n, hidden] of the text tokens of codes i64 [B, n]."""
        return super().code_embeddings(self.outputs[codes])

    def head(self, states: Tensor) -> Tensor:
        """Return logits over the codes alone, [..., V]."""
        return super().head(states)[..., self.outputs]


class RowEndsTarget(TextCodesTarget):
    """A base of targets with a line end, the last code (V - 1), after each row and nowhere else."""

    def __init__(self, *inputs: Any, raster: Raster, **settings: Any) -> None:
        super().__init__(*inputs, raster=replace(raster, ends=1), **settings)
        self.width = raster.width
        self._is_end = torch.arange(self.vocab_size, device=self.device) == self.vocab_size - 1

    def allowed(self, index: Tensor) -> Tensor:
        """Return which codes are allowed at indices i64 [B, k]: bool [B, k, V]."""
        fitting = (index % (self.width + 1) == self.width)[..., None] == self._is_end
        free = super().allowed(index)
        return fitting if free is None else fitting & free


class PromptFamily(Family):
    """The base of families over transformers models that draw prompts.

    Args:
        tokenizer: The model's processor, or its text tokenizer.
        vq: The decoder of the codes, for models without one.
    """

    target: type[MultimodalTarget]
    decoder_class: ClassVar[type[ModelVQ]] = ModelVQ
    batch_size = 4  # these models are large
    options = frozenset({"vq"})

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        folder: ImageFolder | None = None,
        *,
        vq: str | Path | nn.Module | VQTokenizer | None = None,
    ) -> None:
        super().__init__(model, tokenizer, folder)
        self.text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not callable(self.text_tokenizer):
            raise InputError(
                f"got the tokenizer {tokenizer!r}; expected the model's processor or tokenizer."
            )
        if vq is None and folder is not None:
            places = (folder.target / "vq", folder.target / "vqgan.ckpt")
            vq = next((place for place in places if place.exists()), None)
        self.codec = self.decoder(vq)
        self.vq = None if vq is None else self.codec
        self.raster = self.usual_raster()

    @classmethod
    def load_tokenizer(cls, folder: ImageFolder) -> Tokenizer:
        """Return a folder's text tokenizer with its chat template; raise ModelError without one."""
        from transformers import AutoTokenizer

        root = folder.target
        expected = "the files of the model's processor beside its weights. Copy them there."
        with expect_readable(f"{root} holds no tokenizer that loads", expected):
            tokenizer = AutoTokenizer.from_pretrained(root, **LOCAL)
            if tokenizer.chat_template is None and (root / _TEMPLATE).is_file():
                template = json.loads((root / _TEMPLATE).read_text(encoding="utf-8"))
                tokenizer.chat_template = template.get("chat_template")
        return tokenizer

    def save(self, root: Path, **options: object) -> None:
        """Write the model and its tokenizer, and vq/ for a decoder of its own."""
        super().save(root, **options)
        if self.vq is not None:
            self.vq.model.save_pretrained(root / "vq", safe_serialization=True)

    @property
    def components(self) -> dict[str, object]:
        """The parts that other pipelines may share."""
        return {**super().components, "vq": self.vq}

    def decoder(self, vq: str | Path | nn.Module | VQTokenizer | None) -> ModelVQ | VQTokenizer:
        """Return the code-book and decoder of the model; raise InputError for a second decoder."""
        if vq is not None:
            name = self.kind.capitalize()
            raise InputError(f"got vq for {name}, which has a decoder of its own; leave it out.")
        return self.decoder_class(self.model.model.vqmodel)

    def usual_raster(self) -> Raster:
        """Return the grid of codes of the default size."""
        raise NotImplementedError

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the ids of a text in the template, up to the token that the first code follows."""
        raise NotImplementedError

    def unconditional(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the unconditional ids for a prompt of these ids; by default an empty prompt."""
        return self.ids("", raster)

    def conditions(self, call: ImageCall, raster: Raster) -> list[tuple[Ids, Ids]]:
        """Return the token ids of each prompt, and those that guidance leads away from for it."""
        texts = checked_texts(some(call.prompt))
        prompts = [self.ids(text, raster) for text in texts]
        negatives = negatives_of(call.negative_prompt, len(texts))
        return [
            (ids, self.ids(negative, raster) if negative else self.unconditional(ids, raster))
            for negative, ids in zip(negatives, prompts, strict=True)
        ]

    def open(
        self, model: PreTrainedModel, conditions: Sequence[tuple[Ids, Ids]], config: ImageConfig
    ) -> MultimodalTarget:
        """Return a target of the family."""
        prompts, unconditional = zip(*conditions, strict=True)
        guidance = config.guidance_scale, config.guidance_interval
        inputs = model, prompts, unconditional
        return self.target(*inputs, *guidance, raster=config.raster, fixed=config.fixed)

    def shared(self, model: PreTrainedModel) -> dict[str, object]:
        """Return the sizes of vocabulary and code-book, and the text tokens that are codes."""
        mapping = getattr(model.model, "vocabulary_mapping", None)
        codes = mapping.img2bpe if mapping else model.model.vqmodel.quantize.embedding.weight
        return {
            "a text vocabulary of": model.config.get_text_config().vocab_size,
            "a code-book of": len(codes),
            "tokens of codes": None if mapping is None else dict(mapping.img2bpe),
        }


def mark(tokenizer: Tokenizer, attribute: str, name: str = "") -> str:
    """Return a special token by attribute, or by name in the vocabulary; else raise InputError."""
    token = getattr(tokenizer, attribute, None)
    if isinstance(token, str):
        return token
    if name not in tokenizer.get_vocab():
        lacking = f"{attribute} and without {name}" if name else attribute
        raise InputError(
            f"got a tokenizer without {lacking}; expected the one that the image model came with."
        )
    return name


def text_ids(tokenizer: Tokenizer, text: str, last: str) -> list[int]:
    """Return the token ids of a text; raise InputError unless they end with the token `last`."""
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    if not ids or ids[-1] != tokenizer.convert_tokens_to_ids(last):
        raise InputError(
            f"the tokenizer reads {text[-40:]!r} as ids that do not end with {last!r}; expected "
            "the tokenizer that the image model came with, to which this is one token."
        )
    return ids


def prompt_table(
    model: PreTrainedModel, prompts: Sequence[Ids], unconditional: Sequence[Ids] | None
) -> ConditionTable:
    """Return the table of embedded prompts; without unconditional ones each is its own partner."""
    beside = prompts if unconditional is None else unconditional
    rows = [list(row) for row in (*prompts, *beside)]
    if not rows or not all(rows) or len(beside) != len(prompts):
        raise InputError(
            f"got {len(prompts)} prompts, of {[len(row) for row in rows][:8]} tokens (the "
            "unconditional ones included); expected at least one, each with an unconditional one, "
            "and none that is empty."
        )
    embedding = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    if wrong := [token for row in rows for token in row if not 0 <= token < size]:
        raise InputError(f"got the token id {wrong[0]} in a prompt; expected 0 to {size - 1}.")
    count, length = len(prompts), max(map(len, rows))
    padding = [length - len(row) for row in rows]
    padded = [[row[0]] * pad + row for row, pad in zip(rows, padding, strict=True)]
    with torch.no_grad():
        embedded = embedding(torch.tensor(padded, device=input_device(embedding)))
    conditional, none = embedded.split(count)
    return ConditionTable(conditional, none, padding[:count], padding[count:])


def codes_in_order(text_ids: Mapping[int, int]) -> list[int]:
    """Return the text id of each code; raise UnsupportedModelError unless they count from 0."""
    if sorted(text_ids) != list(range(len(text_ids))) or not text_ids:
        raise UnsupportedModelError(
            f"the model's vocabulary map names {len(text_ids)} codes that are not numbered from 0 "
            "on; expected the map that its checkpoint comes with."
        )
    return [text_ids[code] for code in range(len(text_ids))]
