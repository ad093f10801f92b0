"""The head drafter: a draft head (see `head`) as a source of drafts.

Modes and shapes of drafts are those of `ModelDrafter`; EAGLE-2 (arXiv 2406.16858) and LANTERN are
"deterministic". With guidance the head runs on every copy of the sequence, and its logits are
combined like the target's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from ragspec.drafters.base import Drafter, DraftRequest, Prefill
from ragspec.drafters.heads.cache import HeadCache, HeadModel, SlotCache, open_steps
from ragspec.drafters.heads.checkpoint import refuse_damage
from ragspec.drafters.heads.files import head_of, read_head
from ragspec.drafters.heads.graph import HeadGraph, open_graph
from ragspec.drafters.heads.head import DraftHead, check_head, taps_of
from ragspec.drafters.method import Method
from ragspec.drafters.model.drafter import ModelSession, pick_static
from ragspec.drafters.model.settings import GrowthSettings
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.block_linear import BlockLinear
from ragspec.models.checks import check_static
from ragspec.models.quantized import replace_linears
from ragspec.needs import Needs
from ragspec.rules.base import Step
from ragspec.types import Tokenizer
from ragspec.verification.causal import CausalTarget, Model

LONGEST = 256  # tokens of a prompt that a head reads; more cost time and add little


class HeadDrafter(Drafter):
    """Drafts with a draft head, which needs the target's hidden states.

    Args:
        head: A trained head, or its folder.
        target: The model that it was trained for, or a `CausalTarget` over it; the engine must run
            the same one.
        depth: Largest depth of a draft; None leaves it to the budget.
        width, mode, min_expected_gain, static: As for `ModelDrafter`; captures include the head.

    Raises:
        InputError: The settings are invalid.
        UnsupportedModelError: The head is for another target.
        MissingModelError, ModelError: The folder has no head, or a damaged one.
    """

    method = Method(
        "a head on the model's hidden states", "EAGLE", needs=frozenset({"head"}), listed=False
    )
    looks_up = False
    name = "head"

    def __init__(
        self,
        head: DraftHead | Path | str | None = None,
        target: Model | None = None,
        depth: int | None = None,
        width: int | Sequence[int] | TreeShape | None = None,
        *,
        mode: str = "coupled",
        static: str = "auto",
        min_expected_gain: float | None = None,
    ) -> None:
        if head is None or target is None:
            raise InputError(
                f"got {'no head' if head is None else 'no target'}; expected both. Use "
                "HeadDrafter(folder, model) with the folder that `ragspec train-head` wrote."
            )
        self.target = target if isinstance(target, CausalTarget) else CausalTarget(target)
        chains = self.target.chains
        self.settings = GrowthSettings.checked(mode, depth, width, min_expected_gain, chains)
        check_static(static, self.target.device)
        self.static = static
        self.kind = self.settings.kind
        self.head = _ready(head, self.target)
        self._opened = {"off": HeadModel(self.head, self.target)}
        self.taps = taps_of(self.head.config, self.target)
        self.needs = Needs(hidden_states=tuple(set(self.taps)))

    def fits(self, model: object = None, tokenizer: Tokenizer | None = None) -> None:
        """Raise UnsupportedModelError if the engine runs another model than the head's target."""
        model = model.loaded if isinstance(model, CausalTarget) else model
        if model is not None and model is not self.target.loaded:
            raise UnsupportedModelError(
                f"drafter {self.name!r} goes on from the hidden states of another model object "
                f"({type(self.target.loaded).__name__}) than the engine's "
                f"({type(model).__name__}); give HeadDrafter the engine's model or target."
            )

    def open(self, request: DraftRequest) -> HeadSession:
        """Return a session that drafts once it has the prompt's hidden states."""
        mode = pick_static(self.static, request.static, self.target.device)
        if mode not in self._opened:
            self._opened[mode] = open_steps(copy.copy(self._opened["off"]), mode)
        kind = HeadCache if self.head.config.recurrent else SlotCache
        model = copy.copy(self._opened[mode])  # the states in it are of one session
        cache = kind(model, request.vocab_size, len(request.prompt) + 256)
        return HeadSession(cache, self, request)


class HeadSession(ModelSession):
    """The head's KV cache and growth for one row; see `HeadDrafter`."""

    cache: HeadCache

    def __init__(self, cache: HeadCache, drafter: HeadDrafter, request: DraftRequest) -> None:
        super().__init__(cache, drafter.settings.open(request, drafter.name), drafter.settings)
        self._request = request
        self._copies, self._taps = drafter.target.copies, drafter.taps

    def observe(self, step: Step) -> None:
        """Learn the target's states at the root and the path."""
        super().observe(step)
        if step.hidden is not None:
            verified = [0, *(node + 1 for node in step.path)]
            self.cache.notify(step.hidden.at(verified[: len(step.tokens)]).of(self._taps))

    def observe_prefill(self, prefill: Prefill) -> None:
        """Learn the target's states at the prompt's last tokens, of which it reads `LONGEST`.

        Raises:
            InputError: The engine's target has another number of rows per sequence (guidance).
        """
        if prefill.hidden is None:
            return
        hidden = prefill.hidden.at(slice(-LONGEST, None)).of(self._taps)
        first = len(self._request.prompt) - hidden.shape[1]
        if hidden.shape[0] != self._copies:
            raise InputError(
                f"the engine's target has {hidden.shape[0]} row(s) a text, the drafter's "
                f"{self._copies} (guidance). Give HeadDrafter the target that the engine runs."
            )
        self.cache.notify(hidden, first)
        if self.cache.readable(self._request.prompt):
            with self.cache.lease():  # not in the first draft, whose time is measured
                self.cache.read(self._request.prompt)


def _ready(head: DraftHead | Path | str, target: CausalTarget) -> DraftHead | HeadGraph:
    """Return the checked head, stored as the target is; the caller's head does not change."""
    if isinstance(head, (str, Path)):
        weights = read_head(head, target)
        check_head(weights.config, target)
        with refuse_damage(head):
            if (graph := open_graph(weights, target)) is not None:
                return graph
        head = head_of(weights, head)
    elif isinstance(head, DraftHead):
        check_head(head.config, target)
    else:
        raise InputError(
            f"got {type(head).__name__} as a head; expected a DraftHead or the folder of one."
        )
    small = isinstance(target.output_head, BlockLinear)
    place = next(head.parameters()).device
    if (place, head.dtype) != (target.device, target.dtype) or head.training or small:
        head = copy.deepcopy(head).to(target.device, target.dtype).eval()
    if small:
        replace_linears(head)
    return head
