"""Build drafters from names, and look inside combined ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.combined import check_fits, within
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import Sources, build, one
from ragspec.errors import InputError
from ragspec.models.supported import check_vocabulary
from ragspec.rules.base import Rule
from ragspec.verification.causal import CausalTarget

if TYPE_CHECKING:
    from ragspec.drafters.model.drafter import ModelDrafter


DrafterSpec = str | Drafter | Sequence[str | Drafter] | None


def build_drafter(
    drafter: DrafterSpec, draft_model: Any, tokenizer: Any, target: CausalTarget
) -> Drafter | None:
    """Return the drafter for a name, an object, a list of these (fused), or None for none.

    draft_model: a transformers model, (model, tokenizer), a `CausalTarget`, a path or a name; one
    more source. All drafters go through `Fuse`, which also keeps a failing source from breaking
    the output. Raises UnknownNameError, TokenizerMismatchError, ModelNotFoundError, InputError.
    """
    requests: list[Any] = [drafter]
    if drafter is None:
        requests = []
    elif isinstance(drafter, Sequence) and not isinstance(drafter, str):
        requests = list(drafter)
    sources = [instance for item in requests for instance in _create(item)]
    if draft_model is not None:
        sources.append(model_drafter(draft_model, tokenizer, target))
    check_fits(sources, target.model, tokenizer)
    if not sources:
        return None
    if len(sources) == 1 and isinstance(sources[0], Fuse):
        return sources[0]
    return Fuse([source for each in sources for source in _flat(each)])


def _flat(drafter: Drafter) -> Sequence[Drafter]:
    """Return the sources of a plain fusion, so that all sources meet in one."""
    if isinstance(drafter, Fuse) and drafter.open_to_more:
        return drafter.drafters
    return (drafter,)


def with_prediction(drafter: Drafter, rule: Rule) -> Drafter:
    """Return the drafter, and the context's beside it where nothing else reads what is predicted.

    Where the rule could not judge the two together, the drafter stays alone.
    """
    if any(getattr(each, "reads_texts", False) for each in within(drafter)):
        return drafter
    joined = Fuse([one("context", Sources()), *_flat(drafter)])
    return joined if joined.kind in rule.accepts else drafter


def _create(item: Any) -> Sequence[Drafter]:
    if isinstance(item, str):
        built = build(item, Sources())
        return built if isinstance(built, list) else [built]
    expect_drafter(item)
    return [item]


def model_drafter(draft_model: Any, tokenizer: Any, target: CausalTarget) -> ModelDrafter:
    """Return the drafter over a model of the target's vocabulary, see `build_drafter`."""
    from ragspec.drafters.model.drafter import ModelDrafter as AnyDrafter
    from ragspec.models.load import load_model

    if isinstance(draft_model, (str, Path)):
        draft_model = load_model(draft_model, target.device, target.dtype)
    model, draft_tokenizer = draft_model if isinstance(draft_model, tuple) else (draft_model, None)
    if isinstance(model, CausalTarget):
        check_vocabulary(tokenizer, draft_tokenizer, target.vocab_size, model.vocab_size)
        return AnyDrafter(model)
    if not hasattr(model, "config"):
        raise InputError(
            f"got {type(model).__name__} as a draft model; expected a transformers model, (model, "
            "tokenizer), a path or a name"
        )
    check_draft_model(model, draft_tokenizer, tokenizer, target.vocab_size)
    return AnyDrafter(model)


def check_draft_model(model: Any, draft_tokenizer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Refuse a transformers model as the draft of a target with other token ids.

    draft_tokenizer: its tokenizer. tokenizer, vocab_size: the target's. Raises
    TokenizerMismatchError.
    """
    check_vocabulary(
        tokenizer, draft_tokenizer, vocab_size, int(model.config.get_text_config().vocab_size)
    )
