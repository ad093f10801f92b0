"""The model drafter: any smaller causal model of the same vocabulary proposes the next tokens.

There are three kinds of draft. Coupled (the default, see `coupled`): chains or trees of the draft
model's choices under the target's noise, exact under `walk`. Deterministic: its most probable
tokens. Sampled (see `sampled`): tokens drawn from the draft's distribution, with that distribution
as q, for the classical rules: chains (Leviathan et al., arXiv 2211.17192), several chains or
siblings (SpecInfer, 2305.09781; SpecTr, 2310.15141), siblings without replacement (MCSD,
2401.06706).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, NodeChances
from ragspec.drafters.method import Method
from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.growth import DraftState, Growth
from ragspec.drafters.model.settings import GrowthSettings
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.device import is_cuda
from ragspec.models.supported import check_scope, state_layers
from ragspec.registry import resolve
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, Model
from ragspec.verification.open import open_static
from ragspec.verification.path_rows import PathTarget

MIN_EXPECTED_GAIN = 0.3
_CHEAPEST = 0.02
_FIRST = 3  # drafts before their times count: the first ones may also read parts of the text
_RECENT = 9  # drafts whose median time counts


class ModelDrafter(Drafter):
    """Drafts with a smaller model.

    Args:
        model: A transformers causal model, or a `CausalTarget` over one, which is not changed.
        depth: Largest depth of a draft; None leaves it to the budget.
        mode: "coupled", "deterministic", "sampled" or "sampled-without-replacement".
        width: In the first two modes the nodes read by one forward and the least number of
            candidates per node (1 = a chain, None = 4, or 1 of a model in 8 bits on ONNX Runtime,
            whose branches share no forward), or a static tree: its shape, or the sizes of its
            levels (`TreeShape.by_rank`). In the sampled modes the children of each
            node by depth, 1 beyond its end, so k or (k,) means k chains (None = one chain).
        min_expected_gain: A draft that grows best first ends when the next forward is expected to
            add less than this many accepted nodes; 0 uses up the budget. None derives it from the
            time of a forward, if the budget policy knows the tokens per millisecond; see
            `required_gain`.
        static: Steps of fixed shape, as in `Engine`: each forward, or all levels of a static shape
            of most probable tokens, is one call. "auto" follows the engine's target if the draft
            model is on CUDA.

    Raises:
        InputError: There is no model, or a setting is out of range.
        UnsupportedModelError: The model cannot draft.
    """

    method = Method(
        "a smaller model",
        "Leviathan 2023",
        make=lambda sources: ModelDrafter(sources.draft_model),
        needs=frozenset({"draft model"}),
        colour=3,
    )
    looks_up = False

    def __init__(
        self,
        model: Model | None = None,
        depth: int | None = None,
        width: int | Sequence[int] | TreeShape | None = None,
        *,
        mode: str = "coupled",
        static: str = "auto",
        min_expected_gain: float | None = None,
        name: str = "model",
    ) -> None:
        if model is None:
            raise InputError(
                "got no draft model; expected a causal model of the target's vocabulary. Use "
                "Engine(..., draft_model=model) or ModelDrafter(model)."
            )
        self.model = draft_target(model)
        chains = self.model.chains
        self.settings = GrowthSettings.checked(mode, depth, width, min_expected_gain, chains)
        self.kind, self.name, self.static = self.settings.kind, name, static
        self._stepping = functools.cache(functools.partial(open_static, self.model))
        if static != "auto":
            self._stepping(static)

    def open(self, request: DraftRequest) -> ModelSession:
        """Return a session whose cache already contains the prompt."""
        growth = self.settings.open(request, self.name)
        model = self._stepping(pick_static(self.static, request.static, self.model.device))
        cache = DraftCache(model, request.vocab_size, len(request.prompt) + 256)
        if request.prompt and cache.readable(request.prompt):
            with cache.lease():
                cache.read(request.prompt)
        return ModelSession(cache, growth, self.settings)


def required_gain(fixed: float | None, milliseconds: Sequence[float], rate: float) -> float:
    """Return the accepted nodes that pay for one more forward of a draft.

    Args:
        fixed: That number, regardless of time; None derives it from the time.
        milliseconds: The time of a forward in each of the last drafts.
        rate: Tokens per millisecond; 0 if unknown.
    """
    if fixed is not None:
        return fixed
    if rate <= 0.0 or len(milliseconds) < _FIRST:
        return MIN_EXPECTED_GAIN
    return min(max(rate * median(milliseconds), _CHEAPEST), 1.0)


class ModelSession(DraftSession):
    """The draft model's KV cache and growth for one row; see `ModelDrafter`."""

    def __init__(self, cache: DraftCache, growth: Growth, settings: GrowthSettings) -> None:
        self.cache = cache
        self._growth, self._settings = growth, settings
        self._milliseconds = deque[float](maxlen=_RECENT)  # of a forward in the last drafts
        self._drafted = False

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes; none if the text exceeds the draft model's limits."""
        cache, tokens = self.cache, context.tokens
        depth = min(budget, context.remaining - 1, cache.room(tokens))
        depth = depth if self._settings.depth is None else min(depth, self._settings.depth)
        self._drafted = depth >= 1 and cache.readable(tokens)
        if not self._drafted:
            return DraftTree.empty(self._growth.kind)
        rate = 0.0 if context.adviser is None else context.adviser.rate
        gain = required_gain(self._settings.min_expected_gain, self._milliseconds, rate)
        began, before = perf_counter(), cache.forwards
        tree = self._growth.grow(DraftState(cache, context, budget, depth, gain))
        self._milliseconds.append(1000.0 * (perf_counter() - began) / (cache.forwards - before))
        return tree

    def distributions(self) -> list[NodeChances]:
        """Return the distributions at the root and the read nodes of the last proposal.

        Nodes have the numbers of that proposal. They are copied to the host only on this call.
        """
        return self._growth.distributions() if self._drafted else []

    def observe(self, step: Step) -> None:
        """Keep the accepted tokens of the last proposal in the cache and learn from them."""
        # Without a draft since the last step, both have none: the text grows in steps alone.
        self.cache.commit(step.tokens)
        self._growth.learn(step.tokens)


def pick_static(mode: str, followed: str, device: torch.device) -> str:
    """Return the mode of a draft model's steps: under "auto" on CUDA the target's, see `Engine`."""
    if mode != "auto":
        return mode
    return followed if followed in ("graph", "compile") and is_cuda(device) else "off"


def draft_target(model: Model) -> CausalTarget:
    """Return a `CausalTarget` over a model that can draft.

    Raises:
        UnsupportedModelError: Drafts could not be removed from the model's cache.
    """
    if not isinstance(model, CausalTarget):
        check_scope(model)
        model = CausalTarget(model)
    states = state_layers(model.config)
    if states or isinstance(model, PathTarget):
        reason = f"layers of kind {', '.join(sorted(states))}" if states else "no tree attention"
        raise UnsupportedModelError(
            f"{type(model.loaded).__name__} cannot draft: it has {reason}, so a draft could not "
            "be taken back from its cache. Use a draft model of attention layers only."
        )
    return model


FUSED = Method(
    "context and draft model",
    "ours",
    make=lambda sources: [resolve("drafter", "context")(), *sources.models()],
    needs=frozenset({"draft model"}),
)
