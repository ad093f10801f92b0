"""The target: one forward verifies a draft tree per row, and its cache keeps the accepted paths.

It handles a transformers causal model and token ids. Text, sampling and drafters are not its part.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.budget.forward_cost import ForwardCost
from ragspec.errors import ModelError
from ragspec.models.device import input_device, rounds
from ragspec.models.supported import unwrapped
from ragspec.needs import LAST, Capabilities, HiddenStates
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.batch import Batch
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.reading import piece_of
from ragspec.verification.rotary_tables import rereads, table_border
from ragspec.verification.static.layout import QUERIES
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.session import StaticSession
from ragspec.verification.tree_attention import model_configs, tree_view
from ragspec.verification.tree_session import TreeSession

TIMINGS = 4  # forwards per measurement; the first is a warm-up
SLOW = 0.05  # seconds of a forward from which on it is timed only once

SCORED = 64  # tokens of a text that one forward scores


class CausalTarget:
    """A transformers causal model that attends through the functions of `tree_attention`.

    The model object is never changed: see `tree_attention.lease`. Subclasses may compute the logits
    of a sequence from several rows of the model.

    Attributes:
        vocab_size: The ids that the model may generate, V.
        input_size: The ids that it may read: V, plus any tokens for input only.
        capabilities: The data that its sessions offer to drafters, rules and transforms.
        open_view: Makes a rule's view of the logits of one row.
        copies: Cache rows per sequence.
        piece: The chunk size of prompts in tokens, None for no chunks.
        chains: Whether drafts are cut to their likeliest path.
        packs: Whether one forward may cover several sequences, which the load-time probe decides.
        probed: The kinds of weights that were probed, None without a probe; see `probe_again`.
        selects_logits: Whether `forward` returns what the output head does, so that the head may
            compute some of its inputs alone.
        known_cost: The cost of forwards as it was measured before, None if it was not.
        head_folder: Folder of the model's draft head, None without one.
        fixed_steps: Runs steps of fixed shape, None if the model does not support them.
        border: See `table_border`.
        rereads: Whether a text is read again beyond the border.
    """

    capabilities = Capabilities()
    open_view: Callable[..., RowView] = RowView
    copies: int = 1
    piece: int | None = None
    chains: bool = False
    packs: bool = True
    probed: frozenset[tuple[type, type, torch.dtype]] | None = None
    selects_logits: bool = True
    known_cost: ForwardCost | None = None
    head_folder: Path | None = None
    fixed_steps: StepRunner | None = None
    refusal: str = ""  # why there are no steps of fixed shape
    detour: str = ""  # why forwards do not run on ONNX Runtime

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        text = model.config.get_text_config()
        self.vocab_size: int = int(text.vocab_size)
        self.input_size: int = self.vocab_size
        limit = getattr(text, "max_position_embeddings", None)
        self.max_length: int | None = int(limit) if limit else None
        self._unwrapped = unwrapped(model)
        accepted = inspect.signature(self._unwrapped.forward).parameters
        self.keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        self.border = table_border(model)
        self.rereads = self.border is not None and rereads(model)
        custom_attention = any(custom for _, custom in model_configs(model))
        self.packs = self.border is None and not custom_attention
        self._embedding = model.get_input_embeddings()
        self.piece = piece_of(self.device) if self.border is None else None
        self._training: bool = self._unwrapped.training

    @property
    def loaded(self) -> Any:
        """The model, or a stand-in until something needs its modules; see `CachedTarget`."""
        return self.model

    @property
    def device(self) -> torch.device:
        """The device of token ids, also if the model was moved after it was opened."""
        if hasattr(self._embedding, "_hf_hook"):
            return input_device(self._embedding)
        device: torch.device = next(self._embedding.parameters()).device
        return device

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
    def generation_config(self) -> Any:
        """The model's generation config, None if it has none."""
        return getattr(self.loaded, "generation_config", None)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that the model cannot continue. Its ids are in range."""

    @property
    def divisible(self) -> bool:
        """Whether prompts may be read in chunks and their prefixes reused.

        Not for rotary tables that depend on the length of the whole prompt.
        """
        return self.border is None

    @property
    def static(self) -> str:
        """How steps of fixed shape run, see `static.runner`; "off" may be followed by a reason."""
        if self.runner is not None:
            return self.runner.mode
        reason = self.refusal
        if (steps := self.fixed_steps) is not None:
            cast = steps.dtype != self.dtype
            change = f"cast to {self.dtype}" if cast else f"moved to {self.device}"
            reason = f"the model was {change} after it was opened"
        return f"off: {reason}" if reason else "off"

    @property
    def runtime(self) -> str:
        """What runs forwards: "torch" or "onnx"."""
        return "torch"

    @property
    def widths(self) -> Sequence[int]:
        """The possible widths of forwards after a prompt, () for any."""
        return () if self.runner is None else QUERIES

    @property
    def runner(self) -> StepRunner | None:
        """The runner of steps, None for forwards of any shape: a changed model has had no trial."""
        steps = self.fixed_steps
        same = steps is not None and (steps.dtype, steps.device) == (self.dtype, self.device)
        return steps if same else None

    def open(
        self,
        rows: int = 0,
        capacity: int = 0,
        prefix_cache: PrefixCache | None = None,
        most: int = 1,
    ) -> TreeSession:
        """Return a session for sequences that join and leave.

        Args:
            rows: Empty rows to begin with, R.
            capacity: The first slots of each of them, 0 for a default.
            prefix_cache: Keys and values of earlier texts, None for none.
            most: Rows at once, for sessions that allocate them beforehand.
        """
        runner = self.runner
        if runner is None:
            return TreeSession(self, rows, capacity, prefix_cache)
        if not capacity:
            slots = runner.first_slots(most)
            capacity = slots if self.max_length is None else min(slots, self.max_length)
        return StaticSession(self, runner, rows, capacity, prefix_cache, most)

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

        arguments: dict[str, Any] = {"past_key_values": ModelCache(batch), "use_cache": True}
        if self.takes_positions:
            arguments["position_ids"] = batch.positions
        if self.keeps_logits:
            arguments["logits_to_keep"] = keep
        with tree_view(batch), torch.no_grad():
            logits: Tensor = self.model(input_ids=tokens, **arguments).logits
        batch.advance()
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
            session.commit([()])
            for attempt in range(TIMINGS):
                session.active_rows[0].cache.length = length
                session.follow([distribution], [[0]])
                self.synchronize()
                start = time.perf_counter()
                session.verify([[0]], [tree])
                self.synchronize()
                seconds = time.perf_counter() - start
                session.active_rows[0].cache.truncate(length)
                if attempt or seconds > SLOW:  # the first forward of a fast model is a warm-up
                    best = min(best, seconds)
                if seconds > SLOW:
                    break
        return best

    def synchronize(self) -> None:
        """Wait for the device, so that the host clock can time it."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)


def read_states(
    target: CausalTarget, texts: Sequence[Sequence[int]], taps: Sequence[int] = (LAST,)
) -> list[HiddenStates]:
    """Return the hidden states of each text, read in one batch; see `Needs.hidden_states`."""
    with target.open(len(texts), max(map(len, texts))) as session, torch.no_grad():
        session.keep_hidden(taps)
        session.read_prompts(texts, 0)
        return list(session.hidden)


def score_tokens(target: CausalTarget, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of a text's tokens; that of the first is nan.

    Args:
        top: Number of alternatives for each token.
    """
    scored = [TokenLogprob(tokens[0], math.nan)]
    with TreeSession(target, 1, len(tokens)) as session, torch.no_grad():
        for start in range(0, len(tokens) - 1, SCORED):
            root, *rest = tokens[start : start + SCORED]
            (logits,) = session.verify([[root]], [DraftTree.chain(rest, "prompt")])
            session.commit([range(len(rest))])
            following = zip(logits, tokens[start + 1 : start + SCORED + 1], strict=False)
            scored += [logprob_of(row, token, top) for row, token in following]
    return scored
