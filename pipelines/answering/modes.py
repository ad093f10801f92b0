"""The drafters and the transform that write answers over a long document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ragspec.drafters.build import model_drafter
from ragspec.retrievers.rapid.drafter import Rapid
from ragspec.retrievers.rapid.steering import eta_of

if TYPE_CHECKING:
    from ragspec.drafters.base import Drafter
    from ragspec.engine.engine import Engine
    from ragspec.sampling.transform import Transform

RAPID = "rapid"


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """An engine for answers, and the transform of its target's distribution, if any."""

    engine: Engine
    transform: Transform | None = None


def writer_of(
    engine: Engine,
    drafter: str | Drafter | Sequence[str | Drafter] | None,
    draft_model: Any,
    mode: str,
    eta: float | None,
) -> AnswerWriter:
    """Return the engine and transform of a mode; see `LongDocument.open` for the arguments.

    Raises:
        InputError: An argument is out of range.
        UnknownNameError: There is no such mode or drafter.
        TokenizerMismatchError: The draft model has another tokenizer.
    """
    eta_of(mode, eta)  # checks both even if no model reads chunks
    several = isinstance(drafter, Sequence) and not isinstance(drafter, str)
    requests: list[Any] = list(cast(Sequence[Any], drafter)) if several else [drafter]
    requests = [each for each in requests if each is not None]
    if mode == "exact" and draft_model is None and not requests:
        return AnswerWriter(engine)
    rapid = None  # reads the chunks
    if mode != "exact" or draft_model is not None or RAPID in requests:
        reader = engine.target
        if draft_model is not None:
            reader = model_drafter(draft_model, engine.tokenizer, engine.target).model
        rapid = Rapid(reader, mode=mode, eta=eta)
    sources = [rapid if each == RAPID else each for each in requests] or [engine.drafter]
    if draft_model is not None and rapid not in sources:
        sources.append(rapid)
    if requests or draft_model is not None:
        drafters = [each for each in sources if each is not None]
        engine = engine.with_drafter(drafters, engine.budget)
    return AnswerWriter(engine, None if rapid is None else rapid.transform)
