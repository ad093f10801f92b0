"""Build drafters from names, models and objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import Sources, build
from ragspec.errors import InputError
from ragspec.models.quantized import SMALL
from ragspec.models.vocabulary import check_vocabulary
from ragspec.registry import resolve
from ragspec.rules.base import Rule
from ragspec.types import Tokenizer
from ragspec.verification.causal import CausalTarget, Model

if TYPE_CHECKING:
    from ragspec.drafters.model.drafter import ModelDrafter


DraftModel: TypeAlias = "Model | tuple[Model, Tokenizer | None] | str | Path | None"
DrafterSpec = str | Drafter | Sequence[str | Drafter] | None


def build_drafter(
    drafter: DrafterSpec, draft_model: DraftModel, tokenizer: Tokenizer | None, target: CausalTarget
) -> Drafter | None:
    """Return the drafter for a name, an object, or a list of these; None or "none" for none.

    All drafters are wrapped by `Fuse`, which also keeps a failing source from breaking the output.

    Args:
        draft_model: That of methods which use one, else one more source: a transformers model,
            (model, tokenizer), a `CausalTarget`, a path or a name.

    Raises:
        UnknownNameError, MissingModelError, TokenizerMismatchError: From the name, path or model.
        InputError: Another type, or a method that needs a source.
    """
    several = isinstance(drafter, Sequence) and not isinstance(drafter, str)
    requests: Any = drafter if several else [] if drafter in (None, "none") else [drafter]
    draft = None if draft_model is None else model_drafter(draft_model, tokenizer, target).model
    sources = build_all(requests, Sources(draft_model=draft, table=target.next_tokens))
    for source in sources:
        source.fits(target, tokenizer)
    if not sources:
        return None
    if len(sources) == 1 and isinstance(sources[0], Fuse):
        return sources[0]
    return Fuse([source for each in sources for source in _flat(each)])


def build_all(requests: Iterable[object], sources: Sources) -> list[Drafter]:
    """Return the drafters of names and objects; a draft model that none uses drafts beside them."""
    drafters, used = list[Drafter](), False
    for item in requests:
        if isinstance(item, str):
            drafters += build(item, sources)
            method = resolve("drafter", item).method
            used |= "draft model" in method.needs | method.uses
        else:
            drafters.append(expect_drafter(item))
    return drafters if used else drafters + sources.models()


def _flat(drafter: Drafter) -> Sequence[Drafter]:
    """Return the sources of a fusion that accepts further ones, else the drafter alone."""
    return drafter.drafters if isinstance(drafter, Fuse) and drafter.open_to_more else (drafter,)


def with_prediction(drafter: Drafter, rule: Rule) -> Drafter:
    """Return the drafter, fused with `context` unless it already reads predicted outputs.

    The drafter is unchanged if the rule cannot judge the fused trees.
    """
    if drafter.needs.texts:
        return drafter
    joined = Fuse([*build("context", Sources()), *_flat(drafter)])
    return joined if joined.kind in rule.accepts else drafter


def with_head(drafter: Drafter | None, target: CausalTarget, rule: Rule) -> Drafter | None:
    """Return "auto" with the model's draft head, if the rule can judge it."""
    folder = target.head_folder
    if drafter is None or drafter.name != "auto" or folder is None:
        return drafter
    from ragspec.drafters.heads.drafter import HeadDrafter

    joined = Fuse([*_flat(drafter), HeadDrafter(folder, target)], name=drafter.name)
    lacking = target.capabilities.lacking(joined.needs)
    return drafter if lacking or joined.kind not in rule.accepts else joined


def model_drafter(
    draft_model: DraftModel, tokenizer: Tokenizer | None, target: CausalTarget
) -> ModelDrafter:
    """Return the drafter over a model with the target's vocabulary; see `build_drafter`.

    Args:
        target: A model by path or name runs as it would, on ONNX Runtime where that can run it.
    """
    from ragspec.drafters.model.drafter import ModelDrafter as AnyDrafter
    from ragspec.verification.open import load_target

    if isinstance(draft_model, (str, Path)):
        dtype = "auto" if target.weights in SMALL else target.dtype
        runtime = "auto" if target.detour or target.runtime == "onnx" else "torch"
        draft_model = load_target(draft_model, target.device, dtype, static="off", runtime=runtime)
    model, draft_tokenizer = draft_model if isinstance(draft_model, tuple) else (draft_model, None)
    if not hasattr(model, "config"):
        raise InputError(
            f"got {type(model).__name__} as a draft model; expected a transformers model, (model, "
            "tokenizer), a path or a name"
        )
    drafter = AnyDrafter(model)
    check_vocabulary(tokenizer, draft_tokenizer, target.vocab_size, drafter.model.vocab_size)
    return drafter
