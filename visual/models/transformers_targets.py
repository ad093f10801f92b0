"""Image models of transformers as targets: Janus, Janus-Pro, Emu3, Chameleon, Anole, ImageGPT.

The models are used unchanged. Each class here determines the embeddings of codes, the part of the
model that runs, the head for codes and which codes are allowed at each index. A target takes its
prompts, of any length, as token ids of the model's own tokenizer; `prompt(row)` returns their
condition ids. Shorter prompts are padded on the left; padding is masked and has no positions. With
guidance `unconditional` is the prompt of the second row, one for all prompts or one each.
Generated tokens are codes 0 .. V - 1, numbered as in the model's own VQ decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.device import input_device
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best
from ragspec.verification.batch_cache import BatchCache
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.tree_session import TreeSession
from ragspec.visual.checks import side_of, whole
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ConditionTable, ImageTarget

Ids = Sequence[int]
Unconditional = Ids | Sequence[Ids] | None


class _MultimodalTarget(ImageTarget):
    """A base of the targets here: an inner model, and a head over the codes and possibly more.

    Args:
        prompts: Token ids of each prompt.
        unconditional: Token ids that guidance leads away from, see the module.
        guidance_scale: None for the `usual_scale` of the class.
        raster: None for the model's own.
        guidance_interval, fixed: See `ImageTarget`.
    """

    kind: ClassVar[str]  # the model_type of its models
    usual_scale: ClassVar[float] = 1.0

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Ids],
        unconditional: Unconditional = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[int, int] | None = None,
        *,
        raster: Raster | None = None,
        fixed: Tensor | None = None,
    ) -> None:
        _expect(model, self.kind)
        scale = self.usual_scale if guidance_scale is None else guidance_scale
        if scale != 1.0 and unconditional is None:
            raise InputError(
                f"got guidance_scale {scale} without an unconditional prompt; expected "
                "the token ids of one. Pass unconditional=[...]."
            )
        self.inner, outputs, usual = self.parts_of(model)
        raster = raster or usual
        table, codes = prompt_table(model, prompts, unconditional), len(outputs)
        super().__init__(
            model, table, scale, guidance_interval, codes=codes, fixed=fixed, raster=raster
        )
        self.outputs = torch.tensor(list(outputs), device=self.device)
        self.keeps_logits = True  # `run` does, whatever the model's own forward does
        longest = table.length + raster.tokens
        self.max_length = min(longest, self.max_length or longest)

    @staticmethod
    def parts_of(model: Any) -> tuple[Any, Ids, Raster]:
        """Return the module of the last hidden states, the head's id of each code, the raster."""
        raise NotImplementedError

    def placed(self, positions: Tensor, hidden: Sequence[int]) -> Tensor:
        """Return positions i64 [R, n] counted from the first token that is no padding."""
        if not any(hidden):
            return positions
        padding = torch.tensor(hidden, device=positions.device)[:, None]
        return (positions - padding).clamp(min=0)

    def run(
        self, embedded: Tensor, positions: Tensor, cache: BatchCache, keep: int | Tensor
    ) -> Tensor:
        """Return the kept queries' logits over the codes; see `ImageTarget.run`."""
        states = self.inner(
            inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self.head(states[:, -keep:] if isinstance(keep, int) else states[:, keep])


class JanusTarget(_MultimodalTarget):
    """Janus or Janus-Pro (`JanusForConditionalGeneration`) as a target.

    Args:
        prompts: Token ids that end with the begin-of-image token.
        unconditional: The same ids with padding in place of the text, see `janus_unconditional`.
        raster: None for the square that the model was trained on.
    """

    kind = "janus"
    usual_scale = 5.0

    @staticmethod
    def parts_of(model: Any) -> tuple[Any, Ids, Raster]:
        """Return the language model, the codes, and the square that it was trained on."""
        codes = range(model.model.generation_embeddings.num_embeddings)
        return model.model.language_model, codes, janus_raster(model)

    @property
    def output_head(self) -> torch.nn.Module:
        """The head for codes, which is not the one for text."""
        head: torch.nn.Module = self.model.model.generation_head
        return head

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return codes i64 [B, n] embedded and projected to the text's space, [B, n, hidden]."""
        embedded: Tensor = self.model.prepare_embeddings_for_image_generation(codes)
        return embedded


def janus_raster(model: Any) -> Raster:
    """Return the raster of a Janus model's own images."""
    return _square(int(model.config.vision_config.num_image_tokens))


def _square(count: int) -> Raster:
    """Return a square of `count` codes, or one row if that is no square number."""
    side = side_of(count)
    return Raster(1, count) if side is None else Raster(side, side)


def janus_unconditional(prompt: Ids, bos: int, boi: int, pad: int) -> list[int]:
    """Return Janus' unconditional prompt, padding for all but begin of text and of image."""
    return [token if token in (bos, boi) else pad for token in prompt]


class _TextCodesTarget(_MultimodalTarget):
    """A base of targets whose codes are tokens of the text's vocabulary."""

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return the embeddings [B, n, hidden] of the text tokens of codes i64 [B, n]."""
        embedded: Tensor = self.model.get_input_embeddings()(self.outputs[codes])
        return embedded

    def head(self, states: Tensor) -> Tensor:
        """Return logits over the codes alone, [..., V]."""
        return super().head(states)[..., self.outputs]


class Emu3Target(_TextCodesTarget):
    """Emu3 (`Emu3ForConditionalGeneration`) as a target.

    A line end, the last code of the vocabulary here (V - 1), follows every row of codes, as in the
    model. It is allowed nowhere else, and no other code is allowed there.

    Args:
        prompts: Token ids that end with the image wrapper token.
        raster: Rows, and codes per row; `ends` is set to 1.
    """

    kind = "emu3"
    usual_scale = 3.0

    def __init__(self, *inputs: Any, raster: Raster, **settings: Any) -> None:
        super().__init__(*inputs, raster=replace(raster, ends=1), **settings)
        self.width = raster.width
        self._is_end = torch.arange(self.vocab_size, device=self.device) == self.vocab_size - 1

    @staticmethod
    def parts_of(model: Any) -> tuple[Any, Ids, Raster]:
        """Return the text decoder, the codes and the line end, and the least raster."""
        mapping = model.vocabulary_mapping
        outputs = [*_in_order(mapping.img2bpe), mapping.eol_token_id]
        return model.model.text_model, outputs, Raster(1, 1, ends=1)

    def allowed(self, index: Tensor) -> Tensor:
        """Return which codes are allowed at indices i64 [B, k]: bool [B, k, V]."""
        fitting = (index % (self.width + 1) == self.width)[..., None] == self._is_end
        free = super().allowed(index)
        return fitting if free is None else fitting & free


class ChameleonTarget(_TextCodesTarget):
    """Chameleon or Anole (`ChameleonForConditionalGeneration`) as a target.

    The model's own forward excludes codes, so the target runs its decoder and head itself.

    Args:
        prompts: Token ids that end with the begin-of-image token.
        raster: None for 32 x 32 codes.
    """

    kind = "chameleon"

    @staticmethod
    def parts_of(model: Any) -> tuple[Any, Ids, Raster]:
        """Return the text decoder, the codes, and the published models' raster."""
        inner = model.model
        return inner, _in_order(inner.vocabulary_mapping.img2bpe), Raster(32, 32)


class ImageGPTTarget(_MultimodalTarget):
    """ImageGPT (`ImageGPTForCausalImageModeling`) as a target; its codes are clusters of colours.

    It has no conditions: its only prompt, `prompt(0)`, is the start token. Its causal mask ends
    with the image: drafts are cut to what fits, and a draft model of this class stops drafting a
    few codes before the end.
    """

    kind = "imagegpt"

    def __init__(self, model: Any) -> None:
        _expect(model, self.kind)
        super().__init__(model, [[model.config.vocab_size - 1]])
        self.max_length = model.config.n_positions + 1  # the last code is never an input

    @staticmethod
    def parts_of(model: Any) -> tuple[Any, Ids, Raster]:
        """Return the transformer, the codes, and the square that it was trained on."""
        config = model.config
        return model.transformer, range(config.vocab_size - 1), _square(int(config.n_positions))

    def open(
        self,
        rows: int = 0,
        capacity: int = 0,
        prefix_cache: PrefixCache | None = None,
        most: int = 1,
    ) -> TreeSession:
        """Return a session whose drafts fit the model's own causal mask."""
        return _Bounded(self, rows, capacity, prefix_cache)


class _Bounded(TreeSession):
    """A session in which committed tokens and draft together never exceed the positions."""

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the nodes for which there is room behind the root; see `keep_best`."""
        room = self.target.model.config.n_positions - self.active_rows[row].cache.extent - 1
        return keep_best(tree, max(room, 0))


def prompt_table(
    model: Any, prompts: Sequence[Ids], unconditional: Unconditional
) -> ConditionTable:
    """Return the table of embedded prompts; without unconditional ones each is its own partner.

    Raises:
        InputError: A prompt is empty, no list of token ids, or has an id that the model lacks.
    """
    prompted = _ids(prompts)
    beside = prompted if unconditional is None else _partners(unconditional, len(prompted))
    rows = [*prompted, *beside]
    if not rows or not all(rows):
        raise InputError(
            f"got {len(prompted)} prompts, of {[len(row) for row in rows][:8]} tokens (the "
            "unconditional ones included); expected at least one, and none that is empty."
        )
    embedding = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    wrong = [token for row in rows for token in row if not 0 <= token < size]
    if wrong:
        raise InputError(
            f"got a prompt with the token id {wrong[0]}; expected ids from 0 to {size - 1}, "
            "made with the model's own tokenizer."
        )
    count, length = len(prompted), max(map(len, rows))
    padding = [length - len(row) for row in rows]
    padded = [[row[0]] * pad + row for row, pad in zip(rows, padding, strict=True)]
    with torch.no_grad():
        embedded = embedding(torch.tensor(padded, device=input_device(embedding)))
    conditional, none = embedded.split(count)
    return ConditionTable.of_pairs(conditional, none, padding[:count], padding[count:])


def _partners(unconditional: Any, count: int) -> list[list[int]]:
    """Return one unconditional prompt for each of `count` prompts."""
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
    """Return the text id of each code; raise UnsupportedModelError unless they count from 0."""
    if sorted(text_ids) != list(range(len(text_ids))) or not text_ids:
        raise UnsupportedModelError(
            f"the model's vocabulary map names {len(text_ids)} codes that are not numbered from 0 "
            "on; expected the map that its checkpoint comes with."
        )
    return [text_ids[code] for code in range(len(text_ids))]


def _expect(model: Any, kind: str) -> None:
    actual = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if actual != kind:
        raise UnsupportedModelError(
            f"got a model of type {actual!r}; expected {kind!r}. Use the target class that is made "
            "for it."
        )
