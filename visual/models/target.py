"""Image models as targets: codes behind a condition, with guidance as a pair of rows.

Ids 0 .. V - 1 are codes. Ids from V on stand for condition embeddings and are never generated: a
prompt is L of them. With classifier-free guidance (Ho and Salimans, arXiv 2207.12598) a sequence
has two rows of the model. The second has every condition replaced by its unconditional partner.
The logits are u + s (c - u), combined before any processor sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import cast

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.supported import cache_argument
from ragspec.types import ModelOutput, PreTrainedModel
from ragspec.verification.batch import Batch, TreeView, hide_padding
from ragspec.verification.causal import CausalTarget
from ragspec.verification.model_cache import ModelCache
from ragspec.verification.tree_attention import tree_view
from ragspec.visual.checks import check_finite, check_setting
from ragspec.visual.models.raster import Raster


@dataclass(frozen=True, slots=True, eq=False)
class ConditionTable:
    """The R conditions that prompts may name, each with an unconditional partner.

    Attributes:
        conditions: [R, L, hidden]; the ids V + r * L to V + r * L + L - 1 stand for condition r.
        partners: [R, L, hidden], or one for all [L, hidden].
        padding, partner_padding: How many of each row's first embeddings are masked; () for none.
    """

    conditions: Tensor
    partners: Tensor
    padding: Sequence[int] = ()
    partner_padding: Sequence[int] = ()


class ImageTarget(CausalTarget):
    """A model of image codes, ready for `Engine` and `ModelDrafter`.

    Subclasses for other models override `code_embeddings`, `run` and `allowed`.

    Args:
        model: A `LlamaGenModel`, or another model of codes that takes `inputs_embeds`.
        guidance_scale: s; 1 runs the conditional row alone.
        guidance_interval: (first, last) indices of the codes with guidance, last excluded; None
            for all.
        codes: V, where it is not the vocabulary size of the model's configuration.
        fixed: Codes at the first n indices, i64 [n]; -1 where the model chooses.
        raster: Layout of the codes; None for the model's whole square.
    """

    generation_config = None  # the model's own is about text
    selects_logits = False  # guidance follows the head

    def __init__(
        self,
        model: PreTrainedModel,
        conditions: ConditionTable,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[int, int] | None = None,
        *,
        codes: int | None = None,
        fixed: Tensor | None = None,
        raster: Raster | None = None,
    ) -> None:
        super().__init__(model)
        _check(model, conditions, guidance_scale, guidance_interval)
        self.guidance_scale, self.guidance_interval = float(guidance_scale), guidance_interval
        rows, length, hidden = conditions.conditions.shape
        self.condition_length = length
        self.vocab_size = codes or self.vocab_size
        self.input_size = self.vocab_size + rows * length
        # LlamaGen's codes have fixed positions: a shorter condition begins at a later one.
        self._shift = getattr(model.config, "condition_length", length) - length
        if self.max_length is not None:
            self.max_length -= self._shift
        self.copies = 1 if self.guidance_scale == 1.0 else 2
        self.piece = None  # no chunked prefill: conditions are short
        self._conditions = [
            each.detach().to(self.device, self.dtype).expand(rows, length, hidden).flatten(0, 1)
            for each in (conditions.conditions, conditions.partners)
        ]
        paddings = [each or [0] * rows for each in (conditions.padding, conditions.partner_padding)]
        counts = torch.tensor(paddings, device=self.device)[..., None]
        hides = (torch.arange(length, device=self.device) < counts).flatten(1)
        self._hides = hides if any(map(any, paddings)) else None
        self.raster = raster
        self._fixed = None if fixed is None else fixed.to(self.device)

    def prompt(self, row: int) -> list[int]:
        """Return the L ids of the prompt of condition `row` of the table."""
        first = self.vocab_size + row * self.condition_length
        return [*range(first, first + self.condition_length)]

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that does not begin with exactly L condition ids."""
        length, size = self.condition_length, self.vocab_size
        count = next((i for i, token in enumerate(tokens) if token < size), len(tokens))
        if count != length or max(tokens[length:], default=0) >= size:
            raise InputError(
                f"got a prompt of {len(tokens)} ids that begins with {count} condition ids; "
                f"expected {length} of them (ids from {size} to {self.input_size - 1}) and codes "
                "after them. Use target.prompt(row)."
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [copies * B, n, hidden] of ids i64 [B, n]."""
        which = (tokens - self.vocab_size).clamp(min=0)
        codes = self.code_embeddings(tokens.clamp(max=self.vocab_size - 1))
        conditional = (tokens >= self.vocab_size)[..., None]
        tables = self._conditions[: self.copies]
        return torch.cat([torch.where(conditional, each[which], codes) for each in tables])

    def head_logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return the guided logits [B, n, V] of hidden states [copies * B, n, hidden].

        Args:
            positions: Positions i64 [B, n] of the tokens that these states belong to.
        """
        return self._guided(self.head(states), positions)

    def head(self, states: Tensor) -> Tensor:
        """Return logits over the codes [..., V] of hidden states [..., hidden]."""
        return cast(Tensor, self.output_head(states))

    def forward(self, tokens: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Return guided logits of the kept queries [1, k, V]; see `CausalTarget.forward`."""
        with torch.no_grad():
            prefill = any(row.extent < self.condition_length for row in batch.rows)
            if prefill:
                embedded = self.embed(tokens)
                self._note_padding(tokens, batch)
            else:  # codes only, and these are the same in both copies
                embedded = self.code_embeddings(tokens)
                embedded = embedded if self.copies == 1 else embedded.repeat(2, 1, 1)
            positions, pairs = batch.positions, zip(batch.views, batch.rows, strict=True)
            padded = [_padded(view, row.hidden) for view, row in pairs]
            places = [self.placed(view.positions, hidden) for view, hidden in padded]
            copies = max(len(each) for each in places)
            placed = torch.cat([each.expand(copies, -1) for each in places], 1)
            batch.views = [view for view, _ in padded]
            with tree_view(batch):
                logits = self.run(embedded, placed, batch, keep)
        batch.advance()
        if prefill and bool(logits.isnan().any()):  # later ones would cost a wait each
            check_finite(logits, f"{self.model.name_or_path or 'the image model'} returned logits")
        queries = slice(-keep, None) if isinstance(keep, int) else keep
        return self._guided(logits, positions[:, queries])

    def placed(self, positions: Tensor, hidden: Sequence[int]) -> Tensor:
        """Return the model's positions of what the cache has at positions i64 [R, n].

        Args:
            hidden: Padding of each of the R rows, unused here: LlamaGen's positions are fixed.
        """
        return positions + self._shift if self._shift else positions

    def _note_padding(self, tokens: Tensor, batch: Batch) -> None:
        """Make the caches hide the padding of prompts that begin in packed ids i64 [1, n]."""
        if self._hides is None:
            return
        for row, part in zip(batch.rows, torch.split(tokens, batch.counts, 1), strict=True):
            if row.extent:
                continue
            pads = self._hides[: self.copies, part[part >= self.vocab_size] - self.vocab_size]
            row.hidden = tuple(pads.sum(-1).tolist())

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return the embeddings [B, n, hidden] of codes i64 [B, n]."""
        return cast(Tensor, self.model.get_input_embeddings()(codes))

    def run(self, embedded: Tensor, positions: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Return the kept queries' logits over the codes [C * B, k, V], before guidance.

        Args:
            embedded: Inputs of the first layer, [C * B, n, hidden].
            positions: i64 [C * B, n], or [1, n] for all rows.
        """
        outputs = run_model(self.model, embedded, positions, batch, logits_to_keep=keep)
        return torch.as_tensor(outputs.logits)

    def allowed(self, index: Tensor) -> Tensor | None:
        """Return which codes may stand at indices i64 [B, k]: bool [B, k, V]; None for all."""
        fixed = self._fixed
        if fixed is None:
            return None
        required = fixed[index.clamp(0, len(fixed) - 1)]
        free = (required < 0) | (index < 0) | (index >= len(fixed))
        every = torch.arange(self.vocab_size, device=fixed.device)
        return free[..., None] | (every == required[..., None])

    def _guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return u + s (c - u), [B, k, V], of logits [2 * B, k, V]; c where guidance is off."""
        index = positions - (self.condition_length - 1)
        if self.copies == 2:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            conditional, unconditional = logits.chunk(2)
            difference = conditional - unconditional
            logits = torch.add(unconditional, difference, alpha=self.guidance_scale)
            if self.guidance_interval is not None:
                first, last = self.guidance_interval
                guided = (index >= first) & (index < last)
                logits = torch.where(guided[..., None], logits, conditional)
        allowed = self.allowed(index)
        return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))


def run_model(
    model: PreTrainedModel, embedded: Tensor, positions: Tensor, batch: Batch, **options: object
) -> ModelOutput:
    """Return the outputs of a model that reads and extends the caches of a batch."""
    options |= {cache_argument(model): ModelCache(batch), "use_cache": True}
    return model(inputs_embeds=embedded, position_ids=positions, **options)


def _padded(view: TreeView, hidden: tuple[int, ...]) -> tuple[TreeView, tuple[int, ...]]:
    """Return the view of one sequence without its padding, and the padding of its rows.

    One row serves all copies, unless their padding differs.
    """
    if len(set(hidden)) > 1:
        related = view.related
        view = replace(
            view,
            positions=view.positions.repeat(2, 1),
            slot_positions=view.slot_positions.repeat(2, 1),
            related=None if related is None else related.repeat(2, 1, 1),
        )
    hidden = hidden[: len(view.positions)]
    return hide_padding(view, hidden) if any(hidden) else view, hidden


def _check(model: PreTrainedModel, table: ConditionTable, scale: float, interval: object) -> None:
    check_setting("guidance_scale", scale)
    ends = interval if isinstance(interval, Sequence) else ()
    whole = len(ends) == 2 and all(isinstance(end, Integral) for end in ends)
    if interval is not None and not (whole and 0 <= ends[0] < ends[1]):
        raise InputError(
            f"guidance_interval is {interval!r}; expected whole numbers (first, last), "
            "0 <= first < last."
        )
    hidden = model.get_input_embeddings().weight.shape[1]
    assert table.conditions.shape[2] == hidden, "conditions of another model"
    name = model.name_or_path or "the image model"
    for each in (table.conditions, table.partners):
        check_finite(each, f"{name} returned embeddings of conditions")
