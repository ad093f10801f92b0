"""Comparison of a speculative run with a plain one: times, tokens and the first difference.

A forward over several positions may round differently from one over a single position. So in bf16
and fp16 two tokens of almost equal score may change places; the margin says how close they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.generation import Generation


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which two runs differ.

    Attributes:
        index: Index of the generated token.
        plain, speculative: Token ids at the index, None past the end.
        margin: Distance between the target's two best choices in logits, noise included.
    """

    index: int
    plain: int | None
    speculative: int | None
    margin: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs of one request.

    Attributes:
        ratio: seconds_plain / seconds; None for texts of different length.
        decode_ratio: The same for the seconds after search and prefill, which speculation does not
            change.
    """

    seconds_plain: float
    seconds: float
    ratio: float | None
    decode_ratio: float | None
    equal: bool
    first_divergence: Divergence | None

    def summary(self) -> str:
        """Return one line for people."""
        times = f"plain {self.seconds_plain:.2f} s, speculative {self.seconds:.2f} s"
        if self.ratio is None or self.decode_ratio is None:
            times = f"{times} for a text of another length"
        else:
            times = f"{times}: {self.ratio:.2f} times as fast"
            times = f"{times} ({self.decode_ratio:.2f} while decoding)"
        if self.first_divergence is None:
            return f"{times}, the same tokens"
        at = self.first_divergence
        return (
            f"{times}; the tokens part at number {at.index}, "
            f"where the best two are {at.margin:.2g} apart"
        )


def plain_engine(engine: Engine) -> Engine:
    """Return an engine over the same model and tokenizer that decodes without speculation."""
    return engine.with_drafter(None).with_limits(1)  # with a prefix cache of its own


def same_seed(sampling: Sampling, generation: Generation) -> Sampling:
    """Return the settings with the seed that a generation used."""
    return replace(sampling, seed=generation.report.seed, n=1)


def compare(
    engine: Engine, speculative: Generation, plain: Generation, sampling: Sampling
) -> Comparison:
    """Compare two generations of one prompt; run the model once if they differ."""
    one, other = plain.report, speculative.report
    index = first_difference(plain.tokens, speculative.tokens)
    divergence = None
    if index is not None:
        divergence = Divergence(
            index=index,
            plain=plain.tokens[index] if index < len(plain.tokens) else None,
            speculative=speculative.tokens[index] if index < len(speculative.tokens) else None,
            margin=margin_at(engine, plain, index, same_seed(sampling, speculative)),
        )
    alike = len(plain.tokens) == len(speculative.tokens)
    return Comparison(
        one.seconds,
        other.seconds,
        _ratio(one.seconds, other.seconds) if alike else None,
        _ratio(one.decode_seconds, other.decode_seconds) if alike else None,
        index is None,
        divergence,
    )


def _ratio(plain: float, seconds: float) -> float:
    return plain / seconds if seconds > 0 else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def margin_at(engine: Engine, plain: Generation, index: int, sampling: Sampling) -> float:
    """Return the distance between the target's two best choices of generated token `index`.

    Runs one forward over prompt and common prefix. The distance is in logits, for a sampled token
    in logits over temperature plus noise.
    """
    import torch

    from ragspec.engine.prompts import end_tokens
    from ragspec.sampling.distribution import TokenDistribution
    from ragspec.sampling.noise import NoiseStream
    from ragspec.sampling.processors import build_processors, default_processors

    context = [*plain.prompt_tokens, *plain.tokens[:index]]
    ids = torch.tensor([context], device=engine.model.device)
    with torch.inference_mode():
        logits = engine.model(input_ids=ids, use_cache=False).logits[:, -1].double()
    noise = NoiseStream(sampling.seed if isinstance(sampling.seed, int) else 0, plain.sample)
    config, start = engine.target.generation_config, len(plain.prompt_tokens)
    ends = end_tokens(config, engine.tokenizer)
    limit = start + len(plain.tokens)
    current = default_processors(config, ids[:, :start], limit, ends, engine.target.vocab_size)
    settings = sampling.with_defaults(config)
    processors = build_processors(settings, start, ends, current)
    distribution = TokenDistribution(settings, noise, start, processors)
    scores = distribution.process(logits, context, [()])
    values = distribution.best(scores, [index], 2)[1][0]
    return float(values[0] - values[1])
