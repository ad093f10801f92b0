"""The target: one forward verifies a draft tree per row, and its cache keeps the accepted paths.

It handles a transformers causal model and token ids. Text, sampling and drafters are not its part.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ragspec.errors import InputError, ModelError
from ragspec.models.device import input_device
from ragspec.models.supported import unwrapped
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.top_tokens import TopTokens, best_tokens
from ragspec.trees.draft_tree import DraftTree, Ints
from ragspec.trees.operations import ancestors, depths, limit_depth
from ragspec.verification.base import Beginning, StepSession
from ragspec.verification.cpu_weights import Packed, lend, pack
from ragspec.verification.kv_cache import SlotCache, slot_bytes
from ragspec.verification.reading import (
    LONG,
    HeadInputs,
    OnRead,
    in_chunks,
    piece_of,
    read_in_chunks,
)
from ragspec.verification.rotary_tables import rereads, table_border
from ragspec.verification.row_prefixes import Place, RowPrefixes
from ragspec.verification.tree_attention import Configs, TreeView, model_configs, tree_view

FIRST_BYTES = 256 << 20  # initial keys and values of a session for texts of any length
FIRST_SLOTS = 512  # minimum for each of its rows
TIMINGS = 4  # forwards per measurement; the first is a warm-up
SLOW = 0.05  # seconds of a forward from which on it is timed only once
MOST_LOGITS = 1 << 24  # logits of a prompt that are held at once to find its best tokens


class CausalTarget:
    """A transformers causal model that attends through the functions of `tree_attention`.

    The model object is never changed: see `tree_attention.lease`. Subclasses may compute the logits
    of a sequence from several rows of the model.

    Attributes:
        vocab_size: The ids that the model may generate, V.
        input_size: The ids that it may read: V, plus any tokens for input only.
        copies: Cache rows per sequence.
        piece: The chunk size of prompts in tokens, None for no chunks.
        widths: The possible widths of forwards after a prompt, () for any.
        static: How steps of fixed shape run, see `static.target`.
        bit_exact: Whether forwards of all widths give the same bits, in any dtype.
        border: See `table_border`.
        rereads: Whether a text is read again beyond the border.
    """

    copies: int = 1
    piece: int | None = None
    widths: Sequence[int] = ()
    static: str = "off"
    bit_exact: bool = False

    def __init__(self, model: Any) -> None:
        self.model = model
        text = model.config.get_text_config()
        self.vocab_size: int = int(text.vocab_size)
        self.input_size: int = self.vocab_size
        limit = getattr(text, "max_position_embeddings", None)
        self.max_length: int | None = int(limit) if limit else None
        accepted = inspect.signature(unwrapped(model).forward).parameters
        self.keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        self.border = table_border(model)
        self.rereads = self.border is not None and rereads(model)
        self.device = input_device(model.get_input_embeddings())
        self.dtype: torch.dtype = model.dtype
        self.piece = piece_of(self.device) if self.border is None else None
        self._training: bool = unwrapped(model).training

    def check_mode(self) -> None:
        """Raise ModelError if the model was put into training mode after it was opened.

        With dropout no two forwards are equal, so that no text could be reproduced.
        """
        model = unwrapped(self.model)
        if model.training and not self._training:
            raise ModelError(
                f"{type(model).__name__} was put into training mode after it was "
                "opened; expected evaluation mode, as it was probed. Call model.eval() before "
                "generating and model.train() when you go on training."
            )

    @property
    def generation_config(self) -> Any:
        """The model's generation config, None if it has none."""
        return getattr(self.model, "generation_config", None)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that the model cannot continue. Its ids are in range."""

    @property
    def divisible(self) -> bool:
        """Whether prompts may be read in chunks and their prefixes reused.

        Not for rotary tables that depend on the length of the whole prompt, nor for bit-exact
        targets: forwards of another shape give other bits.
        """
        return not self.bit_exact and self.border is None

    def open(self, rows: int, capacity: int) -> TreeSession:
        """Return an empty session of R rows of initially `capacity` slots."""
        return TreeSession(self, rows, capacity)

    def open_rows(self, rows: int) -> TreeSession:
        """Return an empty session of R rows for texts of any length.

        Its first allocation suffices for most texts, because growing takes as long as some steps.
        """
        each = slot_bytes(self.model.config, self.dtype) * self.copies * rows
        most = max(FIRST_SLOTS, FIRST_BYTES // each)
        return self.open(rows, most if self.max_length is None else min(most, self.max_length))

    @property
    def output_head(self) -> torch.nn.Module:
        """The module that computes logits of the last hidden states."""
        head: torch.nn.Module = self.model.get_output_embeddings()
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [copies * B, n, H] of tokens i64 [B, n]."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def head_logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, n, V] of hidden states [copies * B, n, H].

        Args:
            positions: The text positions of the states, i64 [B, n].
        """
        logits: Tensor = self.output_head(states)
        return logits

    def forward(
        self, tokens: Tensor, view: TreeView, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Run tokens i64 [B, n] and fill their cache slots; return logits [B, k, V].

        Args:
            keep: The number k of last queries whose logits are returned, or their indices i64 [k].
        """
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if self.takes_positions:
            arguments["position_ids"] = view.positions
        if self.keeps_logits:
            arguments["logits_to_keep"] = keep
        with tree_view(view), torch.no_grad():
            logits: Tensor = self.model(input_ids=tokens, **arguments).logits
        cache.advance(tokens.shape[1])
        if self.keeps_logits:
            return logits
        return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]

    def time_forward(self, n: int, length: int) -> float:
        """Return the minimum seconds of a forward over n positions after `length` cached ones."""
        if self.max_length is not None:
            n = max(1, min(n, self.max_length - length))
        tree = DraftTree.chain([0] * (n - 1), "timing")
        distribution, best = TokenDistribution(Sampling(), NoiseStream(0)), math.inf
        with self.open(1, length + n) as session:
            session.verify([[0]], [DraftTree.empty()])
            session.cache.commit([[0]])
            for attempt in range(TIMINGS):
                session.cache.book.lengths = [length]
                if isinstance(session, StepSession):
                    session.follow([distribution], [[0]])
                self.synchronize()
                start = time.perf_counter()
                session.verify([[0]], [tree])
                self.synchronize()
                seconds = time.perf_counter() - start
                session.cache.commit([[]])
                if attempt or seconds > SLOW:  # the first forward of a fast model is a warm-up
                    best = min(best, seconds)
                if seconds > SLOW:
                    break
        return best

    def synchronize(self) -> None:
        """Wait for the device, so that the host clock can time it."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)


class TreeSession:
    """Verifies draft trees over a slot cache; implements `CachedSession`."""

    def __init__(self, target: CausalTarget, rows: int, capacity: int) -> None:
        self.target = target
        self.cache = SlotCache(rows, capacity, target.copies)
        self._texts = RowPrefixes(rows)
        self._inputs: list[tuple[Sequence[int], DraftTree]] = []
        self.hidden: list[Tensor] = []
        self.width = 1  # minimum positions of a forward after the prompt
        self.on_read: OnRead | None = None
        self._pending: list[int] = []
        self._rereads: dict[int, list[int]] = {}
        self._configs: Configs = []
        self._packs = Packed(())
        self._head_inputs: HeadInputs | None = None

    def __enter__(self) -> Self:
        self._configs = model_configs(self.target.model)
        self._packs = Packed(pack(self.target.model))
        return self

    def __exit__(self, *raised: object) -> None:
        self._packs = Packed(())

    def keep_hidden(self) -> None:
        """Keep the hidden states of later forwards; see `base.CachedSession`."""
        if self._head_inputs is None:
            self._head_inputs = HeadInputs(self.target.output_head)

    def join(self, tokens: Sequence[int], scope: str = "") -> tuple[int, int]:
        """Take a free row for a sequence; see `TargetSession.join`."""
        place = self._texts.join(tokens[:-1] if self.target.divisible else (), scope)
        return self._take(place), place.known

    def fork(self, row: int) -> int:
        """Copy a row to a free row; see `TargetSession.fork`."""
        return self._take(self._texts.fork(row))

    def _take(self, place: Place) -> int:
        try:
            self.cache.copy(place.source, place.row, place.known)
        except BaseException:  # out of memory
            self._texts.free_again(place.row)
            raise
        return place.row

    def leave(self, row: int) -> None:
        """Free a row; see `TargetSession.leave`.

        With several copies its memory is freed too: otherwise every forward would copy the keys.
        """
        if self._texts.leave(row) and self.target.copies > 1:
            self.shrink()

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; see `TargetSession.select_rows`."""
        return self.cache.select_rows(rows)

    def discard_uncommitted(self) -> list[int]:
        """Discard uncommitted tokens; see `TargetSession.discard_uncommitted`."""
        self._rereads = {}
        self.cache.discard_uncommitted()
        return []

    def shrink(self) -> None:
        """Free the memory of the free rows; see `TargetSession.shrink`."""
        self.cache.drop(self._texts.free())

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the draft up to the rotary border of the row; see `TargetSession.trim_draft`."""
        border = self.target.border
        if border is None:
            return tree
        if len(text) <= border:
            return limit_depth(tree, border - len(text))
        if self.target.rereads and border >= self.cache.book.lengths[row]:
            self._rereads[row] = list(text)
            return DraftTree.empty(tree.kind)
        return tree

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> Tensor:
        """Run one forward, or several over a long prompt; see `TargetSession.verify`."""
        if self._rereads:
            pending = self._reread(pending)
        book = self.cache.book
        tokens, view = self._lay_out(pending, trees, self.width if any(book.lengths) else 1)
        unused = book.read(tokens.shape[1]) - book.extent - tokens.shape[1]
        view = replace(view, unused=unused) if unused else view
        width = max(len(tree) for tree in trees) + 1
        firsts = [count - 1 for count in self._pending]
        n = tokens.shape[1]
        if len(set(firsts)) == 1:
            logits, states = self._forward(tokens, view, n - firsts[0])
            self.hidden = [] if states is None else list(states[:, :, :width].unbind(1))
            return logits[:, :width]
        index = (torch.tensor(firsts)[:, None] + torch.arange(width)).clamp(max=n - 1)
        unique, where = torch.unique(index, return_inverse=True)
        logits, states = self._forward(tokens, view, unique.to(self.target.device))
        rows = torch.arange(len(firsts))[:, None]
        self.hidden = [] if states is None else list(states[:, rows, where].unbind(1))
        return logits[rows, where]

    def _lay_out(
        self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree], width: int = 1
    ) -> tuple[Tensor, TreeView]:
        """Return the tokens of the next forward and their view, and record both for `commit`."""
        self._expect_one_table(pending, trees)
        self._pending = [len(row) for row in pending]
        self._inputs = list(zip(pending, trees, strict=True))
        target = self.target
        return _layout(self.cache.book.lengths, pending, trees, target.device, width, target.piece)

    def _reread(self, pending: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Empty the rows beyond the border; return the tokens to read in each row."""
        self.on_read = None  # output has begun, so no more progress reports
        for row in self._rereads:
            self.cache.truncate(row, 0)
            self._texts.forget(self.cache.line[row])
        texts = [self._rereads.get(row, tokens) for row, tokens in enumerate(pending)]
        self._rereads = {}
        return texts

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[Tensor, list[TopTokens]]:
        """Read the prompts; see `base.CachedSession`. T' is limited by `MOST_LOGITS`."""
        rows, device = len(pending), self.target.device
        tokens, view = self._lay_out(pending, [DraftTree.empty()] * rows)
        counts, n = self._pending, tokens.shape[1]
        start = max(0, n - MOST_LOGITS // (rows * self.target.vocab_size))
        columns = sorted({*range(start, n), *(count - 1 for count in counts)})
        index = torch.tensor(columns, device=device)
        logits, states = self._forward(tokens, view, index)
        first = columns.index(start) if start < n else n
        remaining = [max(0, count - start) for count in counts]
        if states is not None:
            self.hidden = [states[:, row, first : first + t] for row, t in enumerate(remaining)]
        top_tokens = TopTokens.rows(best_tokens(logits[:, first:], k)[1], remaining) if k else []
        ends = torch.searchsorted(index, torch.tensor(counts, device=device) - 1)
        return logits[torch.arange(rows, device=device), ends][:, None], top_tokens

    def read_states(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the hidden states of a row's next tokens; see `base.CachedSession`."""
        target, head_inputs = self.target, self._head_inputs
        moved, view = self._lay_out([tokens], [DraftTree.empty()])
        # Logits of all positions would take a fifth of the time and hundreds of megabytes.
        self._head_inputs = HeadInputs(target.output_head, last_alone=target.keeps_logits)
        try:
            states = self._forward(moved, view, len(tokens))[1]
        finally:
            self._head_inputs = head_inputs
        return None if states is None else states[:, 0]

    def _forward(
        self, tokens: Tensor, view: TreeView, keep: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, k, V] of the last or indexed queries, and any states [C, B, k, H]."""
        most = self.target.piece
        if most is None or not in_chunks(view, most):
            return self._run(tokens, view, keep)
        return read_in_chunks(self._run, tokens, view, keep, most, self.on_read)

    def _run(
        self, tokens: Tensor, view: TreeView, keep: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward; see `_forward`.

        The model is leased for this forward only. Between forwards it is in its original state.
        """
        self.target.check_mode()
        states = None
        with lend(self.target.model, self._configs, self._packs):
            if self._head_inputs is None:
                logits = self.target.forward(tokens, view, self.cache, keep)
            else:
                with self._head_inputs:
                    logits = self.target.forward(tokens, view, self.cache, keep)
                states = self._head_inputs.taken()
        if states is None:
            return logits, None
        if not self.target.keeps_logits:
            states = states[:, -keep:] if isinstance(keep, int) else states[:, keep]
        return logits, states.view(-1, len(tokens), *states.shape[1:])

    def _expect_one_table(
        self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]
    ) -> None:
        """Raise InputError if a forward has rows on both sides of the rotary border."""
        border, lengths = self.target.border, self.cache.book.lengths
        if border is None:
            return
        rows = list(zip(lengths, pending, trees, strict=True))
        longest = max(n + len(p) + int(depths(t.parents).max(initial=0)) for n, p, t in rows)
        if longest > border and not all((n or len(p) - 1) >= border for n, p, _ in rows):
            raise InputError(
                f"got rows on both sides of {border} tokens, where the model changes its rotary "
                "table; expected one side a forward. Use open_target(model) or one row."
            )

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        self.cache.commit(
            [
                [*range(count), *(count + node for node in path)]
                for count, path in zip(self._pending, paths, strict=True)
            ]
        )
        for row, (tokens, tree), path in zip(self.cache.line, self._inputs, paths, strict=True):
            self._texts.grow(row, [*tokens, *(int(tree.tokens[node]) for node in path)])

    def resume(self, length: int) -> int:
        """Truncate the only row, to 0 tokens if `CausalTarget.divisible` is false.

        See `base.CachedSession`.
        """
        self.discard_uncommitted()
        self.cache.truncate(0, length if self.target.divisible else 0)
        return self.cache.book.lengths[0]

    def beginning(self, length: int) -> Beginning | None:
        """Return a copy of the first keys and values of the only row; see `CachedSession`."""
        if not self.target.divisible or self.cache.book.lengths[0] < length:
            return None
        return self.cache.beginning(length)

    def begin_with(self, beginning: Beginning) -> None:
        """Replace the contents of the cache; see `base.CachedSession`."""
        self._rereads = {}
        self.cache.begin_with(beginning)


def read_states(target: CausalTarget, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the hidden states [copies, T, H] of each text before the output head, in one batch.

    If the texts have more than `MOST_LOGITS` logits, only the states of their last tokens.
    """
    with target.open(len(texts), max(map(len, texts))) as session, torch.no_grad():
        session.keep_hidden()
        session.read_prompts(texts, 0)
        return list(session.hidden)


def _layout(
    lengths: Sequence[int],
    pending: Sequence[Sequence[int]],
    trees: Sequence[DraftTree],
    device: torch.device,
    width: int = 1,
    piece: int | None = None,
) -> tuple[Tensor, TreeView]:
    """Lay out pending tokens and nodes in one batch. Pads attend to themselves.

    Args:
        width: The minimum of n.
        piece: The chunk size of the target. With one, long chains need no table of ancestors.

    Returns:
        Tokens i64 [B, n] and the view of their attention.
    """
    rows = len(trees)
    n = max(width, *(len(p) + len(t) for p, t in zip(pending, trees, strict=True)))
    if rows == 1 and n == 1:  # plain decoding: one token that attends to all committed ones
        moved = torch.tensor([[pending[0][0]], [lengths[0]]], device=device)[:, None]
        return moved[0], TreeView(moved[1, 0], moved[1], moved[1], related=None)
    level = len(set(lengths)) == 1
    long = piece is not None and n > min(piece, LONG)
    chains = all(np.array_equal(tree.parents, np.arange(-1, len(tree) - 1)) for tree in trees)
    plain = chains and (long or (level and not lengths[0]))
    table = None if plain else _related(pending, trees, n)
    tokens = np.zeros((2, rows, n), dtype=np.int64)
    for row, (head, tree) in enumerate(zip(pending, trees, strict=True)):
        start, end, first = len(head), len(head) + len(tree), lengths[row]
        tokens[0, row, :start] = head
        tokens[0, row, start:end] = tree.tokens
        tokens[1, row, end:] = first + start - 1
        tokens[1, row, :end] = first - 1 + _places(end, None if table is None else table[row, :end])
    related = None if table is None else torch.from_numpy(table).to(device)
    moved = torch.from_numpy(tokens).to(device)
    # Without a table of ancestors, pads must lie behind the root so that it does not see them.
    starts = torch.tensor(lengths, device=device)
    slots = starts[:, None] + torch.arange(n, device=device) if plain else moved[1]
    view = TreeView(starts, moved[1], slots, related, level=level)
    return moved[0], view


def _places(count: int, visible: np.ndarray[Any, np.dtype[np.bool_]] | None) -> Ints:
    """Return the positions of new queries, from 1: behind all visible ones; None: a chain."""
    return np.arange(1, count + 1) if visible is None else visible.sum(-1)


def _related(
    pending: Sequence[Sequence[int]], trees: Sequence[DraftTree], n: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the new slots that each query attends to: bool [B, n, n]."""
    related = np.zeros((len(trees), n, n), dtype=np.bool_)
    for row, (head, tree) in enumerate(zip(pending, trees, strict=True)):
        start, end = len(head), len(head) + len(tree)
        related[row, :start, :start] = True if start == 1 else np.tri(start, dtype=np.bool_)
        related[row, start:end, :start] = True
        related[row, start:end, start:end] = ancestors(tree.parents)
        if end < n:
            pads = np.arange(end, n)
            related[row, pads, pads] = True
    return related
