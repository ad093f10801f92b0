"""The interface between the decoding loop and a target: its model, and a generation's session."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from ragspec.errors import ModelError
from ragspec.models.block_linear import weights_of
from ragspec.models.device import input_device, rounds
from ragspec.models.supported import cache_argument, unwrapped
from ragspec.needs import HiddenStates
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best, keep_path, limit_depth
from ragspec.types import ModelOutput, PreTrainedModel
from ragspec.verification.batch import Batch
from ragspec.verification.reading import READ_AGAIN, piece_of, table_border
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_attention import model_configs, tree_view

Pending = Sequence[Sequence[int]]  # tokens of each row, the root last
# The distribution of each row, and all its committed tokens, the root last. Not modified.
Followed = Sequence[tuple[TokenDistribution, Sequence[int]]]


class TargetModel:
    """A transformers causal model that attends through the functions of `tree_attention`.

    The model object is never changed: see `tree_attention.lease`. Subclasses may compute the logits
    of a sequence from several rows of the model.

    Attributes:
        vocab_size: The ids that the model may generate, V.
        input_size: The ids that it may read: V, plus any tokens for input only.
        copies: Cache rows per sequence.
        piece: The chunk size of prompts in tokens, None for no chunks.
        chains: Whether drafts are cut to their likeliest path.
        packs: Whether one forward may cover several sequences, which the load-time probe decides.
        selects_logits: Whether `forward` returns what the output head does, so that the head may
            compute some of its inputs alone.
        divisible: Whether prompts may be read in chunks and their prefixes reused. Not for rotary
            tables that depend on the length of the whole prompt.
        border: See `table_border`.
        max_slots: Slots that the model's own causal mask has; None for any number.
        rereads: Whether a text is read again beyond the border.
    """

    copies: int = 1
    piece: int | None = None
    chains: bool = False
    packs: bool = True
    selects_logits: bool = True
    divisible: bool = True
    border: int | None = None
    max_slots: int | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config
        text = model.config.get_text_config()
        self.vocab_size: int = int(text.vocab_size)
        self.input_size: int = self.vocab_size
        # Beyond `keep_window_size` Doge drops keys, among equal ones any.
        limits = (getattr(text, n, None) for n in ("max_position_embeddings", "keep_window_size"))
        self.max_length: int | None = min((int(n) for n in limits if n), default=None)
        self._unwrapped = unwrapped(model)
        accepted = inspect.signature(self._unwrapped.forward).parameters
        self.cache_argument = cache_argument(model)
        self.keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        self.border = table_border(model)
        self.divisible = self.border is None
        self.rereads = not self.divisible and model.config.model_type in READ_AGAIN
        self.packs = self.divisible and not any(custom for _, custom in model_configs(model))
        self._embedding = model.get_input_embeddings()
        self.piece = piece_of(self.device) if self.divisible else None
        self._training: bool = self._unwrapped.training

    @property
    def loaded(self) -> PreTrainedModel:
        """The model, or a stand-in until something needs its modules; see `CachedTarget`."""
        return self.model

    @property
    def weights(self) -> str:
        """What the model's weights are stored in; see `weights_of`."""
        return weights_of(self.loaded)

    @property
    def device(self) -> torch.device:
        """The device of token ids, also if the model was moved after it was opened."""
        if "_hf_hook" in vars(self._embedding):
            return input_device(self._embedding)
        nearest = self._embedding._parameters.values()  # every forward asks: no walk over modules
        every = chain(nearest, self._embedding.parameters())
        return torch.device(next(weight for weight in every if weight is not None).device)

    @property
    def kinds(self) -> frozenset[tuple[type, type, torch.dtype]]:
        """The classes of modules with weights, and classes and dtypes of the weights."""
        return frozenset(
            (type(module), type(weight), weight.dtype)
            for module in self.loaded.modules()
            for weight in module.parameters(recurse=False)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, also if it was cast after it was opened."""
        dtype: torch.dtype = self.loaded.dtype
        return dtype

    @property
    def rounds(self) -> bool:
        """Whether forwards of several widths round visibly, as the model is at present."""
        return rounds(self.loaded, self.device)

    def runs_alone(self, taps: Iterable[int] = ()) -> bool:
        """Return whether a forward needs no module of the model.

        Args:
            taps: The hidden states that it also tells, see `Needs.hidden_states`.
        """
        return False

    def check_mode(self) -> None:
        """Raise ModelError if the model was put into training mode after it was opened.

        With dropout no two forwards are equal, so that no text could be reproduced.
        """
        if self._unwrapped.training and not self._training:
            raise ModelError(
                f"{type(self._unwrapped).__name__} was put into training mode after it was "
                "opened; expected evaluation mode, as it was probed. Call model.eval() before "
                "generating and model.train() when you go on training."
            )

    @property
    def output_head(self) -> torch.nn.Module:
        """The module that computes logits of the last hidden states."""
        head: torch.nn.Module = self.loaded.get_output_embeddings()
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [copies * B, n, H] of tokens i64 [B, n]."""
        embedded: Tensor = self.loaded.get_input_embeddings()(tokens)
        return embedded

    def head_logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, n, V] of hidden states [copies * B, n, H].

        Args:
            positions: The text positions of the states, i64 [B, n].
        """
        logits: Tensor = self.output_head(states)
        return logits

    def forward(self, tokens: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Run packed tokens i64 [1, n] and fill their cache slots; return logits [1, k, V].

        Args:
            keep: The number k of last queries whose logits are returned, or their indices i64 [k].
        """
        from ragspec.verification.model_cache import ModelCache  # imports transformers

        with tree_view(batch):
            cache = {self.cache_argument: ModelCache(batch), "use_cache": True}
            logits: Tensor = self.call(tokens, batch.positions, keep, **cache).logits
        batch.advance()
        return logits

    def call(
        self, tokens: Tensor, positions: Tensor, keep: int | Tensor, **options: object
    ) -> ModelOutput:
        """Run the model over tokens i64 [B, n] at their positions; return its output.

        Positions are passed as in transformers' `generate`: some models would count differently.

        Args:
            keep: See `forward`.
            options: Those of the model.
        """
        if self.takes_positions:
            options["position_ids"] = positions
        if self.keeps_logits:
            options["logits_to_keep"] = keep
        with torch.no_grad():
            output = self.model(input_ids=tokens, **options)
        if not self.keeps_logits:
            output.logits = output.logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
        return output


class TargetSession:
    """The caches of sequences of different lengths, as a context manager.

    A forward covers the *selected* rows. These are all at first, later those of the last
    `select_rows`, in the order that it returned. `trim_draft`, `verify` and `commit` address rows
    by their index among these; `join`, `fork`, `leave` and `select_rows` by their numbers.

    Subclasses define `new_row`, `copy_row`, `verify` and `commit`. By default rows share nothing
    and hold only committed tokens, and forwards run in `settle`. Rows of a target with a `border`
    or `max_slots` have a `length`, that of their cache, and `clear` it.

    Args:
        rows: Empty rows to begin with, numbered from 0; `join` adds others.

    Attributes:
        ahead: Whether a launched forward runs while the host does other things.
        hidden: Hidden states of the last forward, of each row; empty if none are kept.
        chosen: For each row the target's own tokens after the root and the nodes, of the last
            forward. The host computes tokens below 0 from the logits. None if it computes all.
    """

    ahead = False
    hidden: Sequence[HiddenStates] = ()
    chosen: list[list[int]] | None = None

    def __init__(self, target: TargetModel, rows: int) -> None:
        self.target = target
        self._rows: dict[int, Any] = {row: self.new_row() for row in range(rows)}
        self._line = list(self._rows)
        self._waiting: tuple[Pending, Sequence[DraftTree]] = (), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._rows, self._line = {}, []

    @property
    def active_rows(self) -> list[Any]:
        """The selected rows."""
        return [self._rows[row] for row in self._line]

    @property
    def caches(self) -> Mapping[int | None, SequenceCache]:
        """The keys and values of the rows that have buffers of their own, by number."""
        return {}

    @property
    def seconds(self) -> float:
        """Device seconds of the last settled forward, 0 if the device does not measure them."""
        return 0.0

    def new_row(self) -> object:
        """Return an empty row."""
        raise NotImplementedError

    def copy_row(self, row: int) -> object:
        """Return a copy of a row, as of the last commit."""
        raise NotImplementedError

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row for a sequence; return its number and the count of cached tokens.

        The cached tokens are the common prefix with an earlier sequence of the same tenant. The
        last token is never among them: it must be read.

        Args:
            room: Tokens for which there should be room behind these.
        """
        return self._add(self.new_row()), 0

    def fork(self, row: int) -> int:
        """Copy the committed tokens of a row to a new row; return the number of the new row."""
        return self._add(self.copy_row(row))

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row.

        Args:
            keep: Whether its keys and values may serve sequences with a common prefix.
        """
        del self._rows[row]
        self._line = [other for other in self._line if other != row]

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; return them in the order of the batch.

        Uncommitted tokens are discarded.
        """
        self._line = list(rows)
        return list(rows)

    def discard_uncommitted(self) -> None:
        """Discard uncommitted tokens, also of an interrupted forward."""

    def shrink(self) -> None:
        """Free the memory of sequences that have left."""

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Trim a row's next draft to the part that this session can verify.

        It ends at the rotary border of the row and with the model's slots, and may be cut to its
        most likely path, of sampled paths the first. Beyond the border the next forward may read
        the whole text again.

        Args:
            row: The index of the row among the selected ones.
            text: All committed tokens of the row, the root last.
        """
        border, selected = self.target.border, self.active_rows[row]
        if border is not None and len(text) <= border:
            tree = limit_depth(tree, border - len(text))
        elif border is not None and self.target.rereads and border >= selected.length:
            selected.clear()
            return DraftTree.empty(tree.kind)
        if self.target.max_slots is not None:
            tree = keep_best(tree, max(self.target.max_slots - selected.length - 1, 0))
        return keep_path(tree) if self.target.chains else tree

    def verify(self, pending: Pending, trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward over the pending tokens and the draft trees below them.

        Args:
            pending: For each row the committed tokens that the cache lacks, the root last. At first
                this is the whole prompt.
            trees: One draft tree per row.

        Returns:
            Logits [N + 1, V] of each row, the root first, then its nodes. Further entries are
            undefined.
        """
        raise NotImplementedError

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and these nodes of the last forward; drop all other nodes."""
        raise NotImplementedError

    def launch(
        self, pending: Pending, trees: Sequence[DraftTree], followed: Followed | None = None
    ) -> None:
        """Start a forward, which may be abandoned; `verify` equals this and then `settle`.

        Rows and their texts must not change until `settle`.

        Args:
            followed: Distributions by which the forward may choose tokens; it keeps the accepted
                paths then, and `commit` must receive these or prefixes of them.
        """
        self._waiting = pending, trees

    def settle(self) -> list[Tensor]:
        """Wait for the launched forward; return the logits of `verify`."""
        return self.verify(*self._waiting)

    def _add(self, held: object) -> int:
        """Add a row under the lowest free number."""
        row = next(number for number in range(len(self._rows) + 1) if number not in self._rows)
        self._rows[row] = held
        return row
