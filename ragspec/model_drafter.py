"""The model drafter: any smaller causal model of the same vocabulary proposes the next tokens.

Two ways to draft. Coupled (the default, see `coupled`): chains or trees of the choices that the
draft model would make with the target's own noise, exact under `walk`. Sampled (see `sampled`):
tokens drawn from the draft model's law, which comes along as q, for the classical rules: chains
(Leviathan et al., arXiv 2211.17192), several chains or siblings (SpecInfer, 2305.09781; SpecTr,
2310.15141), siblings without replacement (MCSD, 2401.06706).

The session keeps a cache of its own in step with the text (see `draft_cache`): what the target
accepted of a draft is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ragspec.attention import lease
from ragspec.coupled import CoupledGrowth
from ragspec.draft import DraftContext, DraftKind, DraftRequest, DraftTree, Step
from ragspec.draft_cache import DraftCache
from ragspec.errors import InputError, TokenizerMismatchError, UnsupportedModelError
from ragspec.law import TokenLaw
from ragspec.noise import NoiseStream
from ragspec.sampled import SampledGrowth
from ragspec.sampling import Sampling
from ragspec.scope import check_scope, state_layers
from ragspec.target import CausalTarget

WIDTH = 4
WORTH = 0.3
_MODES = {
    "coupled": DraftKind.COUPLED,
    "sampled": DraftKind.SAMPLED,
    "sampled-without-replacement": DraftKind.SAMPLED_WITHOUT_REPLACEMENT,
}


class Growth(Protocol):
    """Makes one draft out of a draft model's laws."""

    kind: DraftKind

    def grow(
        self,
        cache: DraftCache,
        logits: torch.Tensor,
        context: DraftContext,
        budget: int,
        depth: int,
    ) -> DraftTree:
        """Return at most `budget` nodes, at most `depth` deep, below the root's logits [1, V]."""
        ...

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that were emitted in place of the last draft."""
        ...


class ModelDrafter:
    """Drafts with a smaller model.

    model: a transformers causal model, or a `CausalTarget` over one, on any device; it is left as
    it was found. depth: the deepest draft; None sets no bound but the budget. width: in coupled
    mode the nodes read by one forward and the least number of candidates per node (1 = a chain,
    None = 4); in the sampled modes the children of each node by depth, 1 beyond its end, so that
    k or (k,) means k chains (None = one chain). mode: "coupled", "sampled" or
    "sampled-without-replacement". worth: a coupled draft ends when the next forward is expected
    to add less than this many accepted nodes; 0 uses up the budget.
    Raises InputError for no model or settings outside their range, UnsupportedModelError for a
    model that cannot draft.
    """

    def __init__(
        self,
        model: Any = None,
        depth: int | None = None,
        width: int | Sequence[int] | None = None,
        *,
        mode: str = "coupled",
        worth: float = WORTH,
        name: str = "model",
    ) -> None:
        if model is None:
            raise InputError(
                "got no draft model; expected a causal model of the target's vocabulary. Use "
                "Engine(..., draft_model=model) or ModelDrafter(model)."
            )
        if mode not in _MODES:
            raise InputError(f"got mode {mode!r}; expected one of {', '.join(map(repr, _MODES))}.")
        self.model = _checked(model)
        self.depth = depth
        self.widths = _widths(width, mode)
        self.worth = worth
        self.name = name
        self.kind = _MODES[mode]
        if (depth is not None and depth < 1) or worth < 0.0:
            raise InputError(
                f"got depth {depth} and worth {worth}; expected at least 1, and 0 or more. Use "
                "drafter=None for plain decoding."
            )

    def open(self, request: DraftRequest) -> ModelSession:
        """Return a session whose cache holds the prompt, so that drafting begins at once."""
        if request.law is not None:
            law = request.law.without_lazy()
        else:
            law = TokenLaw(Sampling(), NoiseStream(0), len(request.prompt))
        growth: Growth
        if self.kind is DraftKind.COUPLED:
            growth = CoupledGrowth(law, self.name, self.widths[0], self.worth)
        else:
            growth = SampledGrowth(law, self.name, self.widths, self.kind)
        cache = DraftCache(self.model, request.vocab_size, len(request.prompt) + 256)
        if request.prompt and cache.readable(request.prompt):
            with lease(self.model.model):
                cache.read(request.prompt)
        return ModelSession(cache, growth, self.depth)


class ModelSession:
    """The draft model's cache for one row of text; see `ModelDrafter`."""

    def __init__(self, cache: DraftCache, growth: Growth, depth: int | None) -> None:
        self.cache = cache
        self._growth = growth
        self._depth = depth
        self._committed = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes; none where the text has outgrown the draft model."""
        cache, tokens = self.cache, context.tokens
        self._committed = len(tokens)
        depth = min(budget, context.remaining - 1, cache.room(tokens))
        depth = depth if self._depth is None else min(depth, self._depth)
        if depth < 1 or not cache.readable(tokens):
            return DraftTree.empty(self._growth.kind)
        with lease(cache.model.model):
            logits = cache.read(tokens)
            return self._growth.grow(cache, logits, context, budget, depth)

    def observe(self, step: Step) -> None:
        """Keep what the target accepted of the last proposal, wherever it stood in the tree."""
        self._committed += len(step.tokens)
        self.cache.commit(step.tokens)
        self._growth.learn(step.tokens)

    def rollback(self, n: int) -> None:
        """Forget the last `n` committed tokens."""
        self._committed -= n
        self.cache.truncate(self._committed)


def check_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int
) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    The tokenizers must give every id that both have the same token; special tokens may have
    different names. The models' vocabularies may be padded to different sizes. Where a tokenizer
    is None only the sizes can be compared. Raises TokenizerMismatchError.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            raise TokenizerMismatchError(
                f"the draft model has {draft_size} token ids and the target {target_size}, and "
                "without both tokenizers they cannot be compared; expected one vocabulary. Pass "
                "draft_model=(model, tokenizer) and the target's tokenizer."
            )
        return
    target, draft = _tokens_by_id(target_tokenizer), _tokens_by_id(draft_tokenizer)
    special = _special_ids(target_tokenizer) & _special_ids(draft_tokenizer)
    shared = target.keys() & draft.keys()
    wrong = sorted(i for i in shared if target[i] != draft[i] and i not in special)
    if wrong or not shared:
        example = (
            f"id {wrong[0]} is {draft[wrong[0]]!r} in the draft model's tokenizer and "
            f"{target[wrong[0]]!r} in the target's"
            if wrong
            else "no id in common"
        )
        raise TokenizerMismatchError(
            f"the draft model's tokenizer differs from the target's in {len(wrong)} of "
            f"{len(shared)} token ids ({example}); expected one vocabulary. Use a draft model of "
            "the target's family, or drafter='context', which needs no model."
        )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}


def _special_ids(tokenizer: Any) -> set[int]:
    return {int(number) for number in getattr(tokenizer, "added_tokens_decoder", {})}


def _checked(model: Any) -> CausalTarget:
    if not isinstance(model, CausalTarget):
        check_scope(model)
        model = CausalTarget(model)
    states = state_layers(model.model.config)
    if states or type(model) is not CausalTarget:
        reason = f"layers of kind {', '.join(sorted(states))}" if states else "no tree attention"
        raise UnsupportedModelError(
            f"{type(model.model).__name__} cannot draft: it has {reason}, so a draft could not be "
            "taken back from its cache. Use a draft model of attention layers only."
        )
    return model


def _widths(width: int | Sequence[int] | None, mode: str) -> tuple[int, ...]:
    if width is None:
        return (WIDTH,) if mode == "coupled" else (1,)
    widths = (width,) if isinstance(width, int) else tuple(width)
    if not widths or min(widths) < 1 or (mode == "coupled" and len(widths) > 1):
        expected = "one number" if mode == "coupled" else "numbers"
        raise InputError(
            f"got width {width!r} in mode {mode!r}; expected {expected} of at least 1."
        )
    return widths
