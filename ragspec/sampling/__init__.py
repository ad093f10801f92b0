"""From logits to tokens: settings, processors, noise, stop conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.sampling.distribution import TokenLaw as TokenLaw
    from ragspec.sampling.noise import NoiseStream as NoiseStream
    from ragspec.sampling.noise import Stream as Stream
    from ragspec.sampling.processors import HFCallable as HFCallable
    from ragspec.sampling.processors import Processor as Processor
    from ragspec.sampling.settings import Sampling as Sampling
    from ragspec.sampling.settings import TokenLogprob as TokenLogprob
    from ragspec.sampling.stopping import StopRule as StopRule
    from ragspec.sampling.top_tokens import Tops as Tops
    from ragspec.sampling.top_tokens import best_tokens as best_tokens

_WHERE = {
    "HFCallable": "ragspec.sampling.processors",
    "NoiseStream": "ragspec.sampling.noise",
    "Processor": "ragspec.sampling.processors",
    "Sampling": "ragspec.sampling.settings",
    "StopRule": "ragspec.sampling.stopping",
    "Stream": "ragspec.sampling.noise",
    "TokenLaw": "ragspec.sampling.distribution",
    "TokenLogprob": "ragspec.sampling.settings",
    "Tops": "ragspec.sampling.top_tokens",
    "best_tokens": "ragspec.sampling.top_tokens",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
