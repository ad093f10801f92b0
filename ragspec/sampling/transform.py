"""Transforms of the target's distribution, applied before a token is chosen from it.

A kNN language model mixes in a datastore's distribution of the next token. RAPID steers by the
distribution of a model that reads less. The changed distribution is decoded exactly: drafts,
sampling and penalties work as before, and the text depends on the seed and never on the drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.penalties import Penalties
from ragspec.sampling.processors import HFProcessor, Processor
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TextStart:
    """The facts about a text for its transform.

    Attributes:
        distribution: The text's own processors, settings and noise.
        prompt: Token ids, without those that earlier calls wrote.
        draft_prompt: Token ids that models with a context of their own read in place of the prompt.
    """

    distribution: TokenDistribution
    prompt: tuple[int, ...]
    vocab_size: int
    draft_prompt: tuple[int, ...] | None = None


class RowTransform(ABC):
    """The transform of one text; its logits depend on the text alone."""

    @property
    def drift(self) -> float | None:
        """Mean total variation from the target's distribution, over the visited nodes, if known."""
        return None

    @abstractmethod
    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Take a forward of the target, before `logits` is called for any of its nodes.

        Args:
            states: Last hidden states [N + 1, H] at the root and the nodes, None if not needed.
            tree: The draft tree of the forward.
            tokens: The text so far, the root last; the list is lent and grows after the step.
        """

    @abstractmethod
    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the changed logits [1, V] after a node, -1 for the root, from the target's own.

        It is called once for every node that the rule visits, in the rule's order.

        Args:
            index: The generated index of the token that follows.
        """


class Transform(ABC):
    """Makes the transforms of texts, see `Options.transform`.

    Attributes:
        name: The name of the changed distribution, as in the label `exact-for(name)`.
        needs: The data that `RowTransform.forward` gets; hidden states only if they are needed.
    """

    name: str
    needs: Needs = Needs()

    @abstractmethod
    def open(self, start: TextStart) -> RowTransform:
        """Return the transform of one text."""


_SAMPLING = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "sequence_bias",
)
# Guidance runs the model once more for every token; a watermark comes after the filters.
_REFUSED = {"guidance_scale": (None, 1, 1.0), "watermarking_config": (None,)}


def with_defaults(sampling: Sampling, config: Any) -> Sampling:
    """Return the sampling with its open settings (None) filled in from a model's config, if any.

    Raises:
        InputError: The config has a setting that the engine cannot apply.
        SamplingError: A value is out of range.
    """
    for name, none in _REFUSED.items():
        if (value := getattr(config, name, None)) not in none:
            raise InputError(
                f"the model's generation_config has {name}={value!r}; expected none of it. Use "
                "ragspec.bridge, which follows it, or ignore_defaults=True."
            )
    values = {name: getattr(config, name, None) for name in _SAMPLING}
    if isinstance(values["sequence_bias"], Sequence):
        values["sequence_bias"] = {tuple(ids): bias for ids, bias in values["sequence_bias"]}
    unset = {
        name: value
        for name, value in values.items()
        if value is not None and getattr(sampling, name) is None
    }
    return replace(sampling, **unset) if unset else sampling


def default_processors(
    config: Any, prompt: Tensor, limit: int, ends: Sequence[int], vocab_size: int
) -> list[Processor]:
    """Return the processors of a model's config, if any, that `Sampling` lacks.

    They are in transformers' order.

    Args:
        prompt: Token ids i64 [1, T], on the device of the logits.
        limit: Most tokens of prompt and text together.
        ends: Token ids that end the text.
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
        "min_length": lambda least: (
            Penalties(ends=ends, minimum=least - start, prompt_length=start) if least else None
        ),
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
        "suppress_tokens": lambda tokens: Penalties(
            {token: float("-inf") for token in tokens if 0 <= token < vocab_size}
        ),
        "begin_suppress_tokens": lambda tokens: HFProcessor(
            hf.SuppressTokensAtBeginLogitsProcessor(tokens, first)
        ),
    }
    values = ((make, getattr(config, name, None)) for name, make in makers.items())
    processors = [make(value) for make, value in values if value is not None]
    return [processor for processor in processors if processor is not None]
