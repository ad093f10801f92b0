"""What changes the distribution of the target before a token is chosen from it.

The mixture of a kNN language model is one: it adds what a datastore knows of the next token; the
steering of RAPID another: it adds what a model says that reads less. The changed distribution is
the one that is decoded exactly, so that drafts, sampling and penalties stay as they are, and the
text depends on the seed and never on the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.processors import HFProcessor, MinimumLength, Processor, TokenBias
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TextStart:
    """What a transform is told of a text.

    distribution: processors, settings and noise of its own. prompt: without what was written before
    this call. draft_prompt: what is read in place of the prompt by who does not read that.
    """

    distribution: TokenDistribution
    prompt: tuple[int, ...]
    vocab_size: int
    draft_prompt: tuple[int, ...] | None = None


class RowTransform(Protocol):
    """The transform of one text on its way. What it gives depends on the text alone.

    One that measures by how much its distribution differs from the target's own may have `drift`:
    the mean total variation of the places that were asked.
    """

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Hear of a forward of the target, before any of its places is asked about.

        states: its last hidden states [N + 1, H] at the root and the nodes of the tree, None where
        they are not read. tokens: the text so far, the root last; lent, it grows after the step.
        """

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the changed logits [1, V] after a node, -1 for the root, from the target's own.

        index: the generated index of the token that follows. Asked once for every node that the
        rule visits, in its order.
        """


@runtime_checkable
class Transform(Protocol):
    """Makes the transforms of texts, see `Options.transform`.

    name: of the changed distribution, as the label `exact-for(name)` says it. reads_hidden: whether
    it needs the target's last hidden states.
    """

    @property
    def name(self) -> str:
        """The name of the distribution."""

    @property
    def reads_hidden(self) -> bool:
        """Whether the states of `RowTransform.forward` are wanted."""

    def open(self, start: TextStart) -> RowTransform:
        """Return the transform of one text."""


_SAMPLING = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "sequence_bias",
)
# Guidance runs the model once more for every token, a watermark comes after the filters.
_REFUSED = {"guidance_scale": (None, 1, 1.0), "watermarking_config": (None,)}


def with_defaults(sampling: Sampling, config: Any) -> Sampling:
    """Return the sampling, what it leaves open (None) filled in from a model's config, if any.

    Raises InputError for what the engine cannot honour, SamplingError for values out of range.
    """
    for name, none in _REFUSED.items():
        if (value := getattr(config, name, None)) not in none:
            raise InputError(
                f"the model's generation_config has {name}={value!r}; expected none of it. Use "
                "ragspec.bridge, which follows it, or ignore_defaults=True."
            )
    request = {name: getattr(config, name, None) for name in _SAMPLING}
    if isinstance(request["sequence_bias"], Sequence):
        request["sequence_bias"] = {tuple(ids): bias for ids, bias in request["sequence_bias"]}
    unset = {
        name: value
        for name, value in request.items()
        if value is not None and getattr(sampling, name) is None
    }
    return replace(sampling, **unset) if unset else sampling


def default_processors(
    config: Any, prompt: Tensor, limit: int, ends: Sequence[int], vocab_size: int
) -> list[Processor]:
    """Return what a model's config, if any, asks for beside `Sampling`, in transformers' order.

    prompt i64 [1, T]: of the text, where the logits are. limit: the most tokens of prompt and
    text. ends: ids that end the text.
    """
    from transformers.generation import logits_process as hf

    start = prompt.shape[1]
    first = start + (start == 1 and getattr(config, "forced_bos_token_id", None) is not None)
    makers: dict[str, Callable[[Any], Processor | None]] = {
        "encoder_repetition_penalty": lambda penalty: HFProcessor(
            hf.EncoderRepetitionPenaltyLogitsProcessor(penalty, prompt)
        ),
        "encoder_no_repeat_ngram_size": lambda size: (
            HFProcessor(hf.EncoderNoRepeatNGramLogitsProcessor(size, prompt)) if size else None
        ),
        "min_length": lambda least: MinimumLength(least - start, ends, start) if least else None,
        "forced_bos_token_id": lambda token: HFProcessor(hf.ForcedBOSTokenLogitsProcessor(token)),
        "forced_eos_token_id": lambda token: HFProcessor(
            hf.ForcedEOSTokenLogitsProcessor(limit, token)
        ),
        "remove_invalid_values": lambda remove: (
            HFProcessor(hf.InfNanRemoveLogitsProcessor()) if remove else None
        ),
        "exponential_decay_length_penalty": lambda decay: (
            HFProcessor(hf.ExponentialDecayLengthPenalty(decay, list(ends), start))
            if ends
            else None
        ),
        "suppress_tokens": lambda tokens: TokenBias(
            {token: float("-inf") for token in tokens if 0 <= token < vocab_size}
        ),
        "begin_suppress_tokens": lambda tokens: HFProcessor(
            hf.SuppressTokensAtBeginLogitsProcessor(tokens, first)
        ),
    }
    request = ((make, getattr(config, name, None)) for name, make in makers.items())
    processors = [make(value) for make, value in request if value is not None]
    return [processor for processor in processors if processor is not None]
