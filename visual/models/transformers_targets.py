"""Image models of transformers as targets: Janus, Janus-Pro, Emu3, Chameleon, Anole, ImageGPT.

The models are used as they are: each class here says what stands for a code, which part of the
model runs, which head speaks of codes and which codes may stand where. Prompts are token ids of the
model's own tokenizer, given when the target is made, of any lengths: shorter ones are padded on the
left, and the padding is not seen and has no positions. `prompt(row)` gives their ids here. With
guidance `unconditional` is the prompt of the second row, one for all or one for each.
Tokens that come out are codes 0 .. V - 1, the numbers that the model's own VQ decoder takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.device import input_device
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best
from ragspec.verification.causal import TreeSession
from ragspec.verification.kv_cache import SlotCache
from ragspec.visual.checks import whole
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ConditionTable, ImageTarget

Ids = Sequence[int]
Unconditional = Ids | Sequence[Ids] | None


class _MultimodalTarget(ImageTarget):
    """What the models here have in common: an inner model and a head over (more than) the codes.

    inner: gives the last hidden states. codes: V. raster, fixed: see `ImageTarget`.
    """

    def __init__(
        self,
        model: Any,
        inner: Any,
        prompts: Sequence[Ids],
        unconditional: Unconditional,
        guidance_scale: float,
        guidance_interval: tuple[int, int] | None,
        *,
        codes: int,
        raster: Raster,
        fixed: Tensor | None = None,
    ) -> None:
        if guidance_scale != 1.0 and unconditional is None:
            raise InputError(
                f"got guidance_scale {guidance_scale} without an unconditional prompt; expected "
                "the token ids of one. Pass unconditional=[...]."
            )
        table = prompt_table(model, prompts, unconditional)
        super().__init__(
            model, table, guidance_scale, guidance_interval, codes=codes, fixed=fixed, raster=raster
        )
        self.inner = inner
        self.keeps_logits = True  # here, whatever the model's own forward does
        longest = table.length + raster.tokens
        self.max_length = min(longest, self.max_length or longest)

    def placed(self, positions: Tensor, hidden: Sequence[int]) -> Tensor:
        """Return positions i64 [R, n] counted from the first token that is no padding."""
        if not any(hidden):
            return positions
        padding = torch.tensor(hidden, device=positions.device)[:, None]
        return (positions - padding).clamp(min=0)

    def run(
        self, embedded: Tensor, positions: Tensor, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Return the kept queries' logits over the codes; see `ImageTarget.run`."""
        states = self.inner(
            inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self.head(states[:, -keep:] if isinstance(keep, int) else states[:, keep])


class JanusTarget(_MultimodalTarget):
    """Janus or Janus-Pro (`JanusForConditionalGeneration`) drawing an image.

    Args:
        prompts: Token ids that end with the begin-of-image token.
        unconditional: Those ids with every one padded but the first and the last (see
            `janus_unconditional`).
        raster: None for the square that the model was trained on.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Ids],
        unconditional: Unconditional = None,
        guidance_scale: float = 5.0,
        guidance_interval: tuple[int, int] | None = None,
        *,
        raster: Raster | None = None,
        fixed: Tensor | None = None,
    ) -> None:
        _expect(model, "janus")
        parts = model.model
        super().__init__(
            model,
            parts.language_model,
            prompts,
            unconditional,
            guidance_scale,
            guidance_interval,
            codes=parts.generation_embeddings.num_embeddings,
            raster=raster or janus_raster(model),
            fixed=fixed,
        )

    @property
    def output_head(self) -> torch.nn.Module:
        """The head for codes, which is not the one for text."""
        head: torch.nn.Module = self.model.model.generation_head
        return head

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return codes i64 [B, n] embedded and brought into the text's space: [B, n, hidden]."""
        embedded: Tensor = self.model.prepare_embeddings_for_image_generation(codes)
        return embedded


def janus_raster(model: Any) -> Raster:
    """Return how the codes of a Janus model's own images lie."""
    return _square(int(model.config.vision_config.num_image_tokens))


def _square(count: int) -> Raster:
    """Return the square of so many codes, or one row of them where they are none."""
    side = isqrt(count)
    return Raster(side, side) if side * side == count else Raster(1, count)


def janus_unconditional(prompt: Ids, bos: int, boi: int, pad: int) -> list[int]:
    """Return the unconditional prompt of Janus: all padded but begin of text and of image."""
    return [token if token in (bos, boi) else pad for token in prompt]


class _TextCodesTarget(_MultimodalTarget):
    """Codes that are tokens of the text's vocabulary. outputs: the text id of each code, [V]."""

    def __init__(self, *inputs: Any, outputs: Ids, **settings: Any) -> None:
        super().__init__(*inputs, codes=len(outputs), **settings)
        self.outputs = torch.tensor(list(outputs), device=self.device)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return the embeddings [B, n, hidden] of the text tokens that codes i64 [B, n] are."""
        embedded: Tensor = self.model.get_input_embeddings()(self.outputs[codes])
        return embedded

    def head(self, states: Tensor) -> Tensor:
        """Return logits over the codes alone, [..., V]."""
        return super().head(states)[..., self.outputs]


class Emu3Target(_TextCodesTarget):
    """Emu3 (`Emu3ForConditionalGeneration`) drawing the rows of a raster.

    Every row of codes is followed by the line end, the last code of the vocabulary here (V - 1), as
    the model has it; nothing else may stand there and it nowhere else.

    Args:
        prompts: Token ids that end with the image wrapper token.
        raster: Rows and codes of a row; `ends` is set to 1.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Ids],
        unconditional: Unconditional = None,
        guidance_scale: float = 3.0,
        guidance_interval: tuple[int, int] | None = None,
        *,
        raster: Raster,
        fixed: Tensor | None = None,
    ) -> None:
        _expect(model, "emu3")
        known = model.vocabulary_mapping
        super().__init__(
            model,
            model.model.text_model,
            prompts,
            unconditional,
            guidance_scale,
            guidance_interval,
            outputs=[*_in_order(known.img2bpe), known.eol_token_id],
            raster=replace(raster, ends=1),
            fixed=fixed,
        )
        self.width = raster.width
        self._is_end = torch.arange(self.vocab_size, device=self.device) == self.vocab_size - 1

    def allowed(self, index: Tensor) -> Tensor:
        """Return which codes may stand at indices i64 [B, k]: bool [B, k, V]."""
        fitting = (index % (self.width + 1) == self.width)[..., None] == self._is_end
        free = super().allowed(index)
        return fitting if free is None else fitting & free

    def picture(self, tokens: Ids) -> list[list[int]]:
        """Return the rows of codes, without their ends, of the tokens of a whole image."""
        step = self.width + 1
        return [list(tokens[i : i + self.width]) for i in range(0, len(tokens), step)]


class ChameleonTarget(_TextCodesTarget):
    """Chameleon or Anole (`ChameleonForConditionalGeneration`) drawing 1,024 codes, or a raster.

    The model's own forward forbids codes, so its decoder and head are asked.

    Args:
        prompts: Token ids that end with the begin-of-image token.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Ids],
        unconditional: Unconditional = None,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[int, int] | None = None,
        *,
        raster: Raster | None = None,
        fixed: Tensor | None = None,
    ) -> None:
        _expect(model, "chameleon")
        super().__init__(
            model,
            model.model,
            prompts,
            unconditional,
            guidance_scale,
            guidance_interval,
            outputs=_in_order(model.model.vocabulary_mapping.img2bpe),
            raster=raster or Raster(32, 32),
            fixed=fixed,
        )


class ImageGPTTarget(_MultimodalTarget):
    """ImageGPT (`ImageGPTForCausalImageModeling`), which draws clusters of colours.

    It has no conditions: its one prompt, `prompt(0)`, is the start token. Its attention knows no
    slot beyond the image: drafts are cut to what fits, and a draft model of this class stops
    drafting a few codes before the end.
    """

    def __init__(self, model: Any) -> None:
        _expect(model, "imagegpt")
        start = model.config.vocab_size - 1
        super().__init__(
            model,
            model.transformer,
            [[start]],
            None,
            1.0,
            None,
            codes=start,
            raster=_square(int(model.config.n_positions)),
        )
        self.max_length = model.config.n_positions + 1  # the last code is drawn and never read

    def open(self, rows: int, capacity: int) -> TreeSession:
        """Return an empty session whose drafts fit the model's own causal mask."""
        return _Bounded(self, rows, capacity)


class _Bounded(TreeSession):
    """A session in which committed tokens and draft together never exceed the positions."""

    def admit(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the nodes for which there is room behind the root; see `tree.keep_best`."""
        room = self.target.model.config.n_positions - self.cache.book.extent - 1
        return keep_best(tree, max(room, 0))


def prompt_table(
    model: Any, prompts: Sequence[Ids], unconditional: Unconditional
) -> ConditionTable:
    """Return the table of embedded prompts; without unconditional ones each is its own partner.

    Raises InputError for what is no list of token ids, and ids that the model has not.
    """
    rows = _ids(prompts)
    beside = rows if unconditional is None else _partners(unconditional, len(rows))
    if not rows or not all([*rows, *beside]):
        raise InputError(
            f"got {len(rows)} prompts, of {[len(row) for row in [*rows, *beside]][:8]} tokens (the "
            "unconditional ones included); expected at least one, and none that is empty."
        )
    embedding = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    wrong = [token for row in [*rows, *beside] for token in row if not 0 <= token < size]
    if wrong:
        raise InputError(
            f"got a prompt with the token id {wrong[0]}; expected ids from 0 to {size - 1}, "
            "made with the model's own tokenizer."
        )
    length = max(map(len, [*rows, *beside]))
    padding = [length - len(row) for row in [*rows, *beside]]
    padded = [[row[0]] * pad + row for row, pad in zip([*rows, *beside], padding, strict=True)]
    with torch.no_grad():
        embedded = embedding(torch.tensor(padded, device=input_device(embedding)))
    prompted, none = embedded.split(len(rows))
    return ConditionTable.of_pairs(prompted, none, padding[: len(rows)], padding[len(rows) :])


def _partners(unconditional: Any, count: int) -> list[list[int]]:
    """Return the unconditional prompt of each of `count` prompts, given one for all or for each."""
    each = len(unconditional) > 0 and whole(unconditional[0]) is None
    rows = _ids(unconditional if each else [unconditional])
    if len(rows) not in (1, count):
        raise InputError(
            f"got {len(rows)} unconditional prompts for {count} prompts; expected one, or one each."
        )
    return rows * count if len(rows) == 1 else rows


def _ids(prompts: Any) -> list[list[int]]:
    try:
        rows = [[whole(token) for token in prompt] for prompt in prompts]
    except TypeError:  # a number where a list is expected
        rows = [[None]]
    results = [[token for token in row if token is not None] for row in rows]
    if results != rows:
        raise InputError(
            f"got the prompts {prompts!r}; expected a list of lists of token ids, whole numbers. "
            "Make them with the model's own tokenizer."
        )
    return results


def _in_order(text_ids: Mapping[int, int]) -> list[int]:
    """Return the text id of each code, of a mapping that must know the codes 0, 1, and so on."""
    if sorted(text_ids) != list(range(len(text_ids))) or not text_ids:
        raise UnsupportedModelError(
            f"the model's vocabulary map names {len(text_ids)} codes that are not numbered from 0 "
            "on; expected the map that its checkpoint comes with."
        )
    return [text_ids[code] for code in range(len(text_ids))]


def _expect(model: Any, kind: str) -> None:
    result = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if result != kind:
        raise UnsupportedModelError(
            f"got a model of type {result!r}; expected {kind!r}. Use the target class that is made "
            "for it."
        )
