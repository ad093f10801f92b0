"""The KV cache of a draft head: one text and a draft that continues from predicted states.

A slot holds a token paired with the hidden state at the token before it. For the text these are the
target's states, which arrive for the end of the prompt and then step by step. Below the root a node
is paired with the state that the head predicted at its parent. So no slot of a draft is kept:
accepted tokens are read again, with the target's own states.

On an accelerator a forward is a step of fixed shape, and the states before its tokens lie in a
buffer of the arena. A head whose steps differ from its forwards has none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.graph import HeadGraph
from ragspec.drafters.heads.head import DraftHead, RecurrentHead
from ragspec.drafters.model.cache import DraftCache, Visible
from ragspec.drafters.model.forward_step import ForwardShape, ForwardStep
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.models.supported import layer_windows
from ragspec.verification.batch import Batch
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.buffers import Arena
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.step import Mask, Masks
from ragspec.verification.tree_attention import tree_view

TOLERANCE = 0.02  # of the largest logit: half precision rounds


class HeadModel(CausalTarget):
    """A draft head with the interface of a `CausalTarget`; set `states` before each forward.

    Attributes:
        states: Hidden states before the tokens of the next forward [copies, n, H].
        guessed: Hidden states that the last forward predicted [copies, n, H].
        first: Position of the token in slot 0.
    """

    def __init__(self, head: DraftHead | HeadGraph, target: CausalTarget) -> None:
        self.head, self.rows = head, head.rows(target)
        self.target, self.model = target, head.layers
        self.vocab_size, self.input_size = target.vocab_size, target.input_size
        self.max_length, self.copies = target.max_length, target.copies
        self.keeps_logits = True
        self.states = self.guessed = torch.empty(0)
        self.first = 1

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.target.device

    def check_mode(self) -> None:
        """Raise ModelError if the target was put into training mode after it was opened."""
        self.target.check_mode()

    def forward(self, tokens: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Return the logits [1, k, v] of the last k predicted states; see `CausalTarget`."""
        assert isinstance(keep, int)  # by `DraftCache`
        with tree_view(batch), torch.no_grad():
            if isinstance(self.head, HeadGraph):
                embedded = self.target.embed(tokens)
                logits, self.guessed = self.head.run(embedded, self.states, batch, keep)
                batch.advance()
                return logits
            embedded = self.head.embed(self.target, tokens)
            read, self.guessed = self.head.read(embedded, self.states, batch)
            batch.advance()
            config, positions = self.head.config, batch.positions
            if not config.recurrent:
                root = positions[:, -1 - config.masks, None]
                positions = root + torch.arange(read.shape[1], device=root.device)
            else:
                read, positions = read[:, -keep:], positions[:, -keep:]
            return _logits(self.target, self.rows, read, positions + self.first)


def _logits(target: CausalTarget, rows: nn.Module | None, read: Tensor, places: Tensor) -> Tensor:
    """Return the logits [R, n, v] of states at some positions, see `DraftHead.rows`."""
    read = read.to(target.dtype)
    return target.head_logits(read, places) if rows is None else rows(read)


class HeadStep(ForwardStep):
    """Reads tokens, and the states before them, into the first row of an arena."""

    def __init__(self, model: HeadModel, masks: Masks, arena: Arena, shape: ForwardShape) -> None:
        super().__init__(model, masks, arena, shape)
        assert arena.states is not None and isinstance(model.head, RecurrentHead)
        # Not the model, which belongs to one session.
        self._head, self._target, self._rows = model.head, model.target, model.rows
        self._states = arena.states[:, : shape.tokens]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        """Return the logits [n, v], and the states [1, n, H] that the head reads next."""
        embedded = self._head.embed(self._target, tokens)
        read, fed = self._head(embedded, self._states, positions, mask=mask, keys=self._cache)
        return _logits(self._target, self._rows, read, positions)[0], fed


class HeadCache(DraftCache):
    """The KV cache of one row in a draft head; see `DraftCache`."""

    model: HeadModel
    step_type = HeadStep

    def __init__(self, model: HeadModel, vocab_size: int, capacity: int) -> None:
        super().__init__(model, vocab_size, capacity)
        self.tokens = model.head.tokens
        self._first = self._count = 0  # place of the first token with a state, and their number
        self._states: list[Tensor] = []  # those that may still be read
        self._guessed = torch.empty(0)

    def notify(self, states: Tensor, first: int = 0) -> None:
        """Append the target's states at n tokens of the text.

        Args:
            states: The head's taps side by side [copies, n, H times taps].
            first: Place of the first of all in the text.
        """
        with torch.no_grad():
            states = self.model.head.project(states).to(self.model.target.dtype)
        if not self._count:
            self._first, self.model.first = first, first + 1
        self._states.append(states.clone())  # the target may write over its own
        self._count += states.shape[1]

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the state before the root is there and the text fits the model."""
        pairs = self._pairs(len(tokens))
        return pairs > 0 and self._first + pairs == len(tokens) - 1 and super().readable(tokens)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the missing part of the text; return the root's logits [1, v]."""
        logits = self._read_pairs(tokens)
        self._guessed = self.model.guessed[:, -1:]
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes; return their logits [n, v], see `DraftCache.extend`.

        Earlier calls must have read their parents: a node needs the predicted state there.
        """
        # Not by an index, for which an accelerator would wait.
        self.model.states = torch.stack([self._guessed[:, parent + 1] for parent in above], 1)
        logits = super().extend(tokens, above)
        self._guessed = torch.cat([self._guessed, self.model.guessed], 1)
        return logits

    def draft(self, tokens: Sequence[int], tree: TreeShape, levels: int, k: int) -> None:
        """Return None: a head drafts level by level; see `DraftCache.draft`."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Drop the draft, whose states are only predicted."""
        super().commit(())

    def _stepped(
        self, tokens: Sequence[int], positions: Sequence[int], visible: Visible
    ) -> list[Tensor]:
        n, states = len(tokens), self.model.states
        if (arena := self._arena) is not None:
            if arena.states is None:
                arena.states = states.new_zeros(1, MOST_QUERIES, states.shape[2])
            arena.states[:, :n] = states
        outputs = super()._stepped(tokens, positions, visible)
        if outputs:
            self.model.guessed = outputs[1][:, :n]
        return outputs

    def _read_pairs(self, tokens: Sequence[int], more: Sequence[int] = ()) -> Tensor:
        """Read the missing pairs of the text, and `more` tokens behind it; see `_read`."""
        end = self._pairs(len(tokens))
        self._keep(end - 1)
        states = torch.cat(self._states, 1)
        start, dropped = len(self), self._count - states.shape[1]
        self.model.states = states[:, start - dropped : end - dropped]
        self._states = [states[:, max(0, end - 1 - dropped) :]]  # the last may be read again
        fresh = tokens[self._first + start + 1 : self._first + end + 1]
        return self._read([*fresh, *more], len(more))

    def _pairs(self, length: int) -> int:
        """Return the number of pairs in the first `length` tokens of the text."""
        return max(0, min(self._count, length - 1 - self._first))


class SlotCache(HeadCache):
    """The cache of a head that drafts several tokens in one pass; see `HeadConfig.slots`."""

    def __init__(self, model: HeadModel, vocab_size: int, capacity: int) -> None:
        super().__init__(model, vocab_size, capacity)
        self._logits = torch.empty(0)  # of the slots, [K, v]
        self._paths: list[tuple[int, ...]] = []  # from the root to each read node

    def room(self, tokens: Sequence[int]) -> int:
        """Return the depth of draft, at most one level a slot; see `DraftCache.room`."""
        return min(super().room(tokens), self.model.head.config.slots)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the missing part of the text and fill the slots; see `HeadCache.read`."""
        config = self.model.head.config
        self._paths = []
        self._logits = self._read_pairs(tokens, [config.mask_token or 0] * config.masks)
        return self._after([(tokens[-1],)])

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Return the logits [n, v] after n draft nodes; see `DraftCache.extend`."""
        self.forwards += 1
        return self._after(
            [(*self._paths[parent + 1], token) for token, parent in zip(tokens, above, strict=True)]
        )

    @property
    def drafted(self) -> int:
        """The number of draft nodes read since the last commit."""
        return len(self._paths) - 1

    def _after(self, paths: list[tuple[int, ...]]) -> Tensor:
        """Return the logits after paths, each of which is the path of a node from now on."""
        self._paths += paths
        head, target = self.model.head, self.model.target
        assert not isinstance(head, HeadGraph)
        with torch.no_grad():
            return self._fitted(head.logits_after(target, paths, self._logits, self.model.guessed))


def open_steps(model: HeadModel, mode: str) -> HeadModel:
    """Return the model, with forwards as steps of fixed shape or the reason why it has none.

    Args:
        mode: See `static.runner`; "compile" captures too.
    """
    head, target = model.head, model.target
    if not (isinstance(head, RecurrentHead) and head.config.recurrent):
        kind = "on ONNX Runtime" if isinstance(head, HeadGraph) else f"of {head.config.form}"
        model.refusal = f"a head {kind} has no such steps"
        return model
    if type(target) is not CausalTarget:
        model.refusal = f"its target ({type(target).__name__}) has guidance or other positions"
        return model

    def read() -> tuple[Tensor, HeadCache]:
        cache = HeadCache(model, target.vocab_size, 8)
        size = len(head.config.taps) * head.config.target_size
        generator = torch.Generator().manual_seed(0)
        cache.notify(torch.randn(1, 4, size, generator=generator).to(target.device, target.dtype))
        with cache.lease():
            cache.read([1, 2, 3, 4])
            return cache.extend([5, 6], [-1, -1]), cache

    expected, cache = read()
    windows = layer_windows(head.layers.config)
    masks = Masks(windows, len(windows) > 1)
    # The modules whose weights the steps read, at addresses that must not change.
    read_by_steps = [head, target.output_head, target.loaded.get_input_embeddings()]
    weights: Any = nn.ModuleList(read_by_steps)
    weights.dtype = head.dtype
    runner = StepRunner(weights, "eager", masks, cache.layers)
    model.fixed_steps = runner
    try:
        result, _ = read()
        off = float((result - expected).abs().max() / expected.abs().max())
        fault = "" if off <= TOLERANCE else f"logits are off by {off:.2g} of the largest"
    except Exception as error:  # a layer of another library may raise anything
        fault = f"{type(error).__name__}: {error}"
    if fault:
        model.fixed_steps, model.refusal = None, f"a step of fixed shape goes wrong here ({fault})"
    runner.mode = "graph" if mode == "compile" else mode
    return model
