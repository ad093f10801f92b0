"""The target: one forward verifies a draft tree per row, and its cache keeps the accepted paths.

It handles a transformers causal model and token ids. Text, sampling and drafters are not its part.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from ragspec.budget.forward_cost import ForwardCost
from ragspec.needs import LAST, Capabilities, HiddenStates, Needs, match
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.trees.draft_tree import DraftTree
from ragspec.types import GenerationConfig, PreTrainedModel
from ragspec.verification.base import TargetModel
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.static.layout import QUERIES
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.session import StaticSession
from ragspec.verification.tree_session import MOST_LOGITS, TreeSession

Model: TypeAlias = "PreTrainedModel | CausalTarget"
TIMINGS = 3  # forwards per measurement; the first is a warm-up
SLOW = 0.05  # seconds of a forward from which on it is timed only once
SCORED = 64  # tokens of a text that one forward scores


class CausalTarget(TargetModel):
    """A model, with sessions that verify drafts.

    Attributes:
        capabilities: The data that its sessions offer to drafters, rules and transforms.
        open_view: Makes a rule's view of the logits of one row.
        probed: The kinds of weights that were probed, None without a probe; see `probe_again`.
        known_cost: The cost of forwards as it was measured before, None if it was not.
        head_folder, next_tokens: The model's draft head, and its table; None without one.
        fixed_steps: Runs steps of fixed shape, None if the model does not support them.
    """

    capabilities = Capabilities()
    open_view: Callable[..., RowView] = RowView
    probed: frozenset[tuple[type, type, torch.dtype]] | None = None
    known_cost: ForwardCost | None = None
    head_folder: Path | None = None
    next_tokens: Path | None = None
    fixed_steps: StepRunner | None = None
    refusal: str = ""  # why there are no steps of fixed shape
    detour: str = ""  # why forwards do not run on ONNX Runtime

    @property
    def generation_config(self) -> "GenerationConfig | None":
        """The model's generation config, None if it has none."""
        return getattr(self.loaded, "generation_config", None)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that the model cannot continue. Its ids are in range."""

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
        """The runtime of forwards: "torch" or "onnx"."""
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

    def time_forward(self, n: int, length: int) -> float:
        """Return the minimum seconds of a forward over n positions after `length` cached ones."""
        if (most := self.max_slots or self.max_length) is not None:
            length = min(length, most - 1)
            n = min(n, most - length)
        tree = DraftTree.chain([0] * (n - 1), "timing")
        followed, best = [(TokenDistribution(Sampling(), NoiseStream(0)), [0])], math.inf
        with self.open(1, length + n) as session:
            session.verify([[0]], [DraftTree.empty()])
            session.commit([()])
            for attempt in range(TIMINGS):
                session.active_rows[0].cache.length = length
                self.synchronize()
                start = time.perf_counter()
                session.launch([[0]], [tree], followed)
                session.settle()
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
) -> Iterator[tuple[int, HiddenStates]]:
    """Yield the number of each text and its hidden states; see `Needs.hidden_states`.

    Texts of similar length are read in one batch, the longest batch first, with little padding.
    """
    match("a reader of hidden states", Needs(hidden_states=tuple(taps)), target.capabilities)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    while order:
        longest = len(texts[order[-1]])
        # The forward also computes the logits of all positions, which limits a batch.
        most = max(1, MOST_LOGITS // (longest * target.vocab_size))
        order, part = order[:-most], order[-most:]
        with target.open(len(part), longest) as session, torch.no_grad():
            session.keep_hidden(taps)
            session.read_prompts([texts[i] for i in part], 0)
            hidden = list(session.hidden)
        yield from zip(part, hidden, strict=True)


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
