"""An image model as a target: codes below a condition, with guidance as a pair of rows.

Ids 0 .. V - 1 are codes. Ids from V on stand for condition embeddings and can only be read: a
prompt is L of them. With classifier-free guidance (Ho and Salimans, arXiv 2207.12598) a sequence
owns two rows of the model, the second with every condition replaced by its unconditional partner,
and its logits are u + s (c - u), combined before any processor sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.verification.causal import CausalTarget
from ragspec.verification.kv_cache import SlotBook, SlotCache
from ragspec.verification.tree_attention import TreeView, hiding, tree_view
from ragspec.visual.models.raster import Raster


@dataclass(frozen=True, slots=True, eq=False)
class ConditionTable:
    """What the condition ids V, V + 1, ... stand for.

    Attributes:
        embeddings [M, hidden]: Of each id.
        partners i64 [M]: The number (0 .. M - 1) of each one's unconditional partner.
        length: L, the ids that a prompt begins with.
        padding: How many of them are padding, in the prompt of each condition, for which the last
            id stands. hides bool [M]: which ids stand for padding, which comes first and is not
            seen; None where there is none.
    """

    embeddings: Tensor
    partners: Tensor
    length: int
    padding: tuple[int, ...] = ()
    hides: Tensor | None = None

    def __len__(self) -> int:
        return len(self.embeddings)

    @classmethod
    def of_rows(
        cls, conditions: Tensor, unconditional: Tensor, padding: Sequence[int] = ()
    ) -> ConditionTable:
        """Return the table of R conditions [R, L, hidden] and the one without [L, hidden].

        Condition r has the ids from r * L on, in order; the unconditional one comes last, as
        condition R.

        Args:
            padding: Of each condition, as many of its first embeddings are not seen; the
                unconditional partners of the others are the last ones, as LlamaGen has it.
        """
        rows, length, hidden = conditions.shape
        embeddings = torch.cat([conditions, unconditional[None].to(conditions)])
        partners = torch.arange(length, device=conditions.device) + rows * length
        embeddings, partners = embeddings.reshape(-1, hidden), partners.repeat(rows + 1)
        if any(padding):
            embeddings = torch.cat([embeddings, torch.zeros_like(embeddings[:1])])
            partners = torch.cat([partners, partners.new_tensor([len(partners)])])
            hides = torch.arange(len(partners), device=partners.device) == len(partners) - 1
            return cls(embeddings, partners, length, (*padding,), hides)
        return cls(embeddings, partners, length)

    @classmethod
    def of_pairs(
        cls,
        conditions: Tensor,
        unconditional: Tensor,
        padding: Sequence[int],
        unconditional_padding: Sequence[int],
    ) -> ConditionTable:
        """Return the table of R conditions [R, L, hidden], each with a partner [R, L, hidden].

        Args:
            padding, unconditional_padding: Of each row of the two, as many of its first embeddings
                are not seen. Condition r has the ids from r * L on, its partner those from (R + r)
                * L on.
        """
        rows, length, hidden = conditions.shape
        embeddings = torch.cat([conditions, unconditional.to(conditions)]).reshape(-1, hidden)
        first_half = torch.arange(rows * length, device=conditions.device)
        partners = torch.cat([first_half + rows * length] * 2)
        counts = torch.tensor([*padding, *unconditional_padding], device=conditions.device)
        hides = torch.arange(length, device=conditions.device) < counts[:, None]
        return cls(embeddings, partners, length, (), hides.reshape(-1) if any(counts) else None)

    def ids(self, row: int) -> list[int]:
        """Return the numbers of the L ids of condition `row`, counted from 0."""
        padded = self.padding[row] if row < len(self.padding) else 0
        end = (row + 1) * self.length
        return [len(self) - 1] * padded + [*range(end - self.length + padded, end)]


class ImageTarget(CausalTarget):
    """A model of image codes, ready for `Engine` and `ModelDrafter`.

    Args:
        model: A `LlamaGenModel`, or another model of codes that takes `inputs_embeds`.
        conditions: What its prompts may hold.
        guidance_scale: S; 1 runs the conditional row alone.
        guidance_interval: (first, last) indices of the codes for which guidance is on, last
            excluded; None for all.
        codes: V, where the model's configuration says something else.
        fixed i64 [n]: The codes that must stand at the first n indices, -1 where the model chooses.
        raster: How the codes lie; None for the model's whole square, of which a smaller one keeps
            the left of the first rows. Subclasses say for other models what stands for a code
            (`code_embeddings`), how the model runs (`run`) and which codes may stand where
            (`allowed`).

    Raises:
        InputError: For settings outside their range and conditions of another model.
    """

    generation_config = None  # the model's own is about text

    def __init__(
        self,
        model: Any,
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
        self.guidance_scale = float(guidance_scale)
        self.guidance_interval = guidance_interval
        self.condition_length = conditions.length
        self.vocab_size = codes or self.vocab_size
        self.input_size = self.vocab_size + len(conditions)
        # LlamaGen's codes have places of their own: a shorter condition begins later.
        self._shift = getattr(model.config, "condition_length", conditions.length)
        self._shift -= conditions.length
        if self.max_length is not None:
            self.max_length -= self._shift
        self.copies = 1 if self.guidance_scale == 1.0 else 2
        self.piece = None  # conditions are short
        self._conditions = conditions.embeddings.detach().to(self.device, self.dtype)
        self._partners = conditions.partners.to(self.device)
        self._hides = None if conditions.hides is None else conditions.hides.to(self.device)
        self._table = conditions
        self.raster = raster
        side = getattr(model.config, "grid_size", None)
        self._side = side if raster is not None and side != raster.line else None
        if self._side is not None and raster is not None and self.max_length is not None:
            self.max_length = conditions.length + raster.tokens
        self._fixed = None if fixed is None else fixed.to(self.device)

    def prompt(self, row: int) -> list[int]:
        """Return the prompt of condition `row` of the table: L ids."""
        return [self.vocab_size + number for number in self._table.ids(row)]

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that does not begin with exactly L condition ids."""
        length, size = self.condition_length, self.vocab_size
        result = next((i for i, token in enumerate(tokens) if token < size), len(tokens))
        if result != length or max(tokens[length:], default=0) >= size:
            raise InputError(
                f"got a prompt of {len(tokens)} ids that begins with {result} condition ids; "
                f"expected {length} of them (ids from {size} to {self.input_size - 1}) and codes "
                "after them. Use target.prompt(row)."
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the first layer reads for ids i64 [B, n]: [copies * B, n, hidden]."""
        rows = [self._embedded(tokens, None)]
        if self.copies == 2:
            rows.append(self._embedded(tokens, self._partners))
        return torch.cat(rows)

    def head_logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return the guided logits [B, n, V] of hidden states [copies * B, n, hidden].

        Args:
            positions i64 [B, n]: Where the tokens stand that these states are of.
        """
        return self._guided(self.head(states), positions)

    def head(self, states: Tensor) -> Tensor:
        """Return logits over the codes [..., V] of hidden states [..., hidden]."""
        logits: Tensor = self.output_head(states)
        return logits

    def forward(
        self, tokens: Tensor, view: TreeView, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Return guided logits of the kept queries [B, k, V]; see `CausalTarget.forward`."""
        book = cache.book
        with torch.no_grad():
            if min(book.lengths) + book.pending < self.condition_length:
                embedded = self.embed(tokens)
                self._note_padding(tokens, book)
            else:  # codes only, and these are the same in both rows
                embedded = self.code_embeddings(tokens)
                embedded = embedded if self.copies == 1 else embedded.repeat(2, 1, 1)
            positions = view.positions
            hidden = [row[copy] for copy in range(self.copies) for row in book.hidden]
            difference = any(len(set(row)) > 1 for row in book.hidden)
            # What one sequence sees fits both of its rows, unless their padding differs.
            known = _doubled(view) if self.copies == 2 and (len(tokens) > 1 or difference) else view
            if any(hidden):
                hidden = hidden[: len(known.positions)]
                known = hiding(known, hidden)
            with tree_view(known):
                logits = self.run(embedded, self.placed(known.positions, hidden), cache, keep)
        cache.advance(tokens.shape[1])
        return self._guided(
            logits, positions[:, -keep:] if isinstance(keep, int) else positions[:, keep]
        )

    def placed(self, positions: Tensor, hidden: Sequence[int]) -> Tensor:
        """Return where the model reads what stands at positions i64 [R, n] of the cache.

        Args:
            hidden: The padding of each of the R rows. LlamaGen's codes have places of their own.
        """
        places = positions + self._shift if self._shift else positions
        if self._side is None or self.raster is None:
            return places
        index = positions - self.condition_length
        row, column = index // self.raster.line, index % self.raster.line
        start = self.condition_length + self._shift
        codes = (start + row * self._side + column).clamp(max=start + self._side**2)
        return torch.where(index < 0, places, codes)

    def _note_padding(self, tokens: Tensor, book: SlotBook) -> None:
        """Have the cache hide the padding of the prompts that are read, ids i64 [B, n]."""
        if self._hides is None:
            return
        which, code = (tokens - self.vocab_size).clamp(min=0), tokens < self.vocab_size
        pads = [self._hides[each] & ~code for each in (which, self._partners[which])]
        counts = torch.stack([pad.sum(1) for pad in pads[: self.copies]], dim=1).tolist()
        starts = zip(book.lengths, counts, book.hidden, strict=True)
        book.hidden = [before if length else tuple(count) for length, count, before in starts]

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return what the first layer reads for codes i64 [B, n]: [B, n, hidden]."""
        embedded: Tensor = self.model.get_input_embeddings()(codes)
        return embedded

    def run(
        self, embedded: Tensor, positions: Tensor, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Return the kept queries' logits over the codes [C * B, k, V], before guidance.

        embedded [C * B, n, hidden], positions i64 [C * B, n] or [1, n] for all rows.
        """
        logits: Tensor = self.model(
            inputs_embeds=embedded,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits

    def allowed(self, index: Tensor) -> Tensor | None:
        """Return which codes may stand at indices i64 [B, k]: bool [B, k, V]; None for all."""
        fixed = self._fixed
        if fixed is None:
            return None
        required = fixed[index.clamp(0, len(fixed) - 1)]
        free = (required < 0) | (index < 0) | (index >= len(fixed))
        every = torch.arange(self.vocab_size, device=fixed.device)
        return free[..., None] | (every == required[..., None])

    def _embedded(self, tokens: Tensor, partners: Tensor | None) -> Tensor:
        """Return embeddings [B, n, hidden] of ids, conditions replaced by their partners if any."""
        which = (tokens - self.vocab_size).clamp(min=0)
        if partners is not None:
            which = partners[which]
        codes = self.code_embeddings(tokens.clamp(max=self.vocab_size - 1))
        return torch.where((tokens >= self.vocab_size)[..., None], self._conditions[which], codes)

    def _guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return u + s (c - u), [B, k, V], of logits [2 * B, k, V]; c alone where it is off."""
        if self.copies == 2:
            logits = self._combined(logits, positions)
        allowed = self.allowed(positions - (self.condition_length - 1))
        return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))

    def _combined(self, logits: Tensor, positions: Tensor) -> Tensor:
        if logits.dtype != torch.float64:
            logits = logits.float()
        conditional, unconditional = logits.chunk(2)
        difference = conditional - unconditional
        guided = torch.add(unconditional, difference, alpha=self.guidance_scale)
        if self.guidance_interval is None:
            return guided
        first, last = self.guidance_interval
        index = positions - (self.condition_length - 1)
        return torch.where(((index >= first) & (index < last))[..., None], guided, conditional)


def _doubled(view: TreeView) -> TreeView:
    related = view.related
    return TreeView(
        lengths=view.lengths.repeat(2),
        positions=view.positions.repeat(2, 1),
        slot_positions=view.slot_positions.repeat(2, 1),
        related=None if related is None else related.repeat(2, 1, 1),
        unused=view.unused,
        hidden=None if view.hidden is None else view.hidden.repeat(2),
    )


def _check(
    model: Any, conditions: ConditionTable, scale: Any, interval: tuple[int, int] | None
) -> None:
    if not (isinstance(scale, Real) and 0.0 <= float(scale) < inf):
        raise InputError(
            f"guidance_scale is {scale!r}; expected a finite number of 0 or more (1 turns guidance "
            "off)."
        )
    if interval is not None and not _is_interval(interval):
        raise InputError(
            f"guidance_interval is {interval!r}; expected whole numbers (first, last), "
            "0 <= first < last."
        )
    hidden = model.get_input_embeddings().weight.shape[1]
    count = len(conditions)
    if conditions.embeddings.ndim != 2 or conditions.embeddings.shape[1] != hidden:
        raise InputError(
            f"got condition embeddings of shape {list(conditions.embeddings.shape)}; expected "
            f"[M, {hidden}]. Make them with this very model's condition()."
        )
    if not bool(conditions.embeddings.isfinite().all()):
        raise InputError(
            "got condition embeddings that hold NaN or infinite numbers; expected finite ones. "
            "Check the features that they were made from (prompt_embeds), or use a wider dtype."
        )
    partners = conditions.partners
    if not count or partners.shape != (count,) or not 0 <= int(partners.min()) <= count - 1:
        raise InputError(f"got {len(partners)} partners for {count} conditions; expected one each.")
    most = getattr(model.config, "condition_length", None)
    if conditions.length < 1 or (most is not None and conditions.length > most):
        raise InputError(f"got conditions of {conditions.length} ids; expected 1 to {most}.")


def _is_interval(interval: Any) -> bool:
    if not isinstance(interval, Sequence) or len(interval) != 2:
        return False
    return all(isinstance(end, Integral) for end in interval) and 0 <= interval[0] < interval[1]
