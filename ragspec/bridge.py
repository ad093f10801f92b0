"""The engine behind transformers' `model.generate`.

    spec = Speculation(drafter="context", tokenizer=tokenizer, streamer=streamer)
    model.generate(**inputs, custom_generate=speculative, speculation=spec, max_new_tokens=200)
    spec.reports[0].summary()

With a callable `custom_generate`, transformers silently drops `streamer`, `tokenizer`,
`assistant_model` and `synced_gpus`: a streamer passed to `generate` waits forever, and stop_strings
fail without a tokenizer. They are fields of `Speculation` instead. `generate` of this module
accepts them, and stop_strings, in the usual place.

Processors and criteria get the same ids as in transformers, including the padding of a batch, but
one row at a time: in a batch, each row has a copy (`BatchRows`, `criterion_of_text`). So greedy
text is that of transformers, with two exceptions. Code that distinguishes rows by their index, or
mixes them, gets each row as row 0. Without end tokens, transformers continues a row that a
criterion has ended until all rows have ended; here it is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ragspec.bridge_rows import BatchRows, RowCriterion, RowProcessors
from ragspec.drafters.base import Drafter
from ragspec.engine.engine import Engine
from ragspec.engine.request import OnStep
from ragspec.errors import InputError, PromptTooLongError
from ragspec.models.supported import check_scope
from ragspec.reports.generation import Generation
from ragspec.reports.report import Report
from ragspec.sampling.settings import Sampling
from ragspec.types import BaseStreamer, GenerationConfig, PreTrainedModel, Tokenizer
from ragspec.verification.reading import asks_for_length, continues_rotation

_CACHES = ("cache", "past_key_values")  # the name since transformers 5.24, and before
_HARMLESS = frozenset({*_CACHES, "use_cache", "logits_to_keep", "cache_position"})
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Settings of other decoding methods, which custom_generate would silently drop.
_OTHER_WAYS = {
    "penalty_alpha": "contrastive search cannot be speculated",
    "dola_layers": "DoLa contrasts layers, which cannot be speculated",
    "force_words_ids": "constrained beams cannot be speculated",
    "constraints": "constrained beams cannot be speculated",
    "assistant_ensemble_weight": "an ensemble with the draft model is another distribution",
    "prompt_lookup_num_tokens": "Speculation(drafter='context') drafts from the prompt",
}
_WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


@dataclass
class Speculation:
    """Settings of speculation under `model.generate`, and the generations of the last call.

    Attributes:
        drafter, draft_model, budget: As for `Engine`.
        seed: None draws one from torch's global generator, which `set_seed` of transformers sets.
        tokenizer: For stop_strings and checks.
        streamer: Any transformers streamer (batch of one).
        generations: Those of the last call, one per sequence.
    """

    drafter: str | Drafter | Sequence[str | Drafter] | None = "auto"
    draft_model: Any = None
    budget: Any = "auto"
    seed: int | None = None
    tokenizer: Any = None
    streamer: Any = None
    generations: list[Generation] = field(default_factory=list)
    _engine: Engine | None = field(default=None, repr=False)
    _engine_key: tuple[Any, ...] = field(default=(), repr=False)
    _decodes: bool = field(default=False, repr=False)  # whether `speculative` was reached

    @property
    def reports(self) -> list[Report]:
        """The reports of the last call, one per sequence."""
        return [generation.report for generation in self.generations]

    def engine(self, model: PreTrainedModel) -> Engine:
        """Return the engine for a model, a new one after a change of the fields."""
        key = (model, self.tokenizer, self.drafter, self.draft_model, self.budget)
        if self._engine is None or not all(map(is_, self._engine_key, key)):
            self._engine, self._engine_key = Engine(*key), key
            if continues_rotation(model):  # transformers writes on beyond the context
                self._engine.target.max_length = None
        return self._engine


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    speculation: Speculation | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Tokenizer | None = None,
    assistant_model: PreTrainedModel | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Return the output of `model.generate(inputs, ...)`, computed by speculative decoding.

    streamer, tokenizer and assistant_model work as in transformers; the assistant becomes a further
    drafter. stop_strings need the tokenizer, also those of generation_config or of the model.
    """
    values = speculation or Speculation()
    spec = replace(
        values,
        streamer=streamer or values.streamer,
        tokenizer=tokenizer or values.tokenizer,
        draft_model=assistant_model or values.draft_model,
        _decodes=False,
    )
    try:
        kwargs = _with_stop_strings(stop_strings, spec.tokenizer, model.generation_config, kwargs)
        inputs, kwargs = _healed(model, inputs, spec.tokenizer, kwargs)
        output = model.generate(inputs, custom_generate=speculative, speculation=spec, **kwargs)
    except BaseException:
        if spec.streamer is not None and not spec._decodes:
            spec.streamer.end()  # its reader waits
        raise
    values.generations = spec.generations
    values._engine, values._engine_key = spec._engine, spec._engine_key
    return output


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: GenerationConfig | None = None,
    speculation: Speculation | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode for `model.generate(custom_generate=speculative, speculation=...)`.

    Shapes: input_ids i64 [B, T] -> i64 [B, T + new], padded; with return_dict_in_generate, a
    GenerateDecoderOnlyOutput.

    Raises:
        InputError: There are other model inputs than text, or position_ids that skip tokens.
        UnsupportedModelError: `check_scope` refuses the model or its adapter.
    """
    if not isinstance(speculation, Speculation | None):
        raise InputError(f"got speculation={speculation!r}; expected a Speculation or None.")
    spec = speculation or Speculation()
    spec._decodes = True
    try:
        more = logits_processor, stopping_criteria, generation_config, model_kwargs
        spec.generations = _flat(_decode(model, input_ids, spec, *more))
    finally:
        if spec.streamer is not None:
            spec.streamer.end()
    return _sequences(input_ids, spec.generations, generation_config)


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    spec: Speculation,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """Return the engine's generations for the arguments of `speculative`."""
    # Not named parameters: transformers would then pass them a second time.
    attention_mask = model_kwargs.pop("attention_mask", None)
    positions = model_kwargs.pop("position_ids", None)
    # peft calls its base model, with the virtual tokens in this method alone.
    caller = getattr(model.prepare_inputs_for_generation, "__self__", model)
    check_scope(caller if isinstance(caller, torch.nn.Module) else model)
    _refuse_unknown(model_kwargs)
    _refuse_positions(positions, input_ids, attention_mask)
    _refuse_outputs(config)
    sampling, rest = _settings(config, processors, spec.seed)
    engine = spec.engine(model)
    rows = BatchRows(input_ids, attention_mask, sampling.n, (model, spec.tokenizer))
    limit, ends, further = _ending(criteria, config, engine.target.vocab_size)
    _refuse_dynamic(model, limit, engine.target.max_length)
    return engine.generate(
        input_ids[:: sampling.n],
        sampling,
        max_new_tokens=max(limit - input_ids.shape[1], 1),
        logits_processor=[RowProcessors(rows, rest)] if rest else [],
        attention_mask=None if attention_mask is None else attention_mask[:: sampling.n],
        stopping_criteria=[RowCriterion(rows, criterion) for criterion in further],
        stop_token_ids=ends,
        ignore_eos=True,  # the end tokens of this call are in `ends`,
        ignore_defaults=True,  # and the model's defaults among its processors
        on_step=_streaming(spec.streamer, input_ids),
    )


def _settings(config: Any, processors: Any, seed: int | None) -> tuple[Sampling, list[Any]]:
    """Return settings for transformers' own filters at the end of the processors, and the rest."""
    rest = list(processors)
    record: dict[str, Any] = {"temperature": 1.0}
    order = list(_WARPERS)
    while rest and (kind := type(rest[-1]).__name__) in order:
        if getattr(rest[-1], "min_tokens_to_keep", 1) > 1:
            break
        order = order[: order.index(kind)]  # only filters that ragspec applies before this one
        record[_WARPERS[kind]] = getattr(rest.pop(), _WARPERS[kind])
    if not getattr(config, "do_sample", False):
        record = {"temperature": 0.0}
    n = max(getattr(config, "num_return_sequences", 1) or 1, 1)
    if (getattr(config, "num_beams", 1) or 1) > 1:
        raise InputError(f"num_beams={config.num_beams}; expected 1: beams cannot be speculated")
    for name, why in _OTHER_WAYS.items():
        if value := getattr(config, name, None):
            raise InputError(f"{name}={value!r}; expected none: {why}")
    if seed is None and record["temperature"] > 0.0:
        seed = int(torch.randint(1 << 31, ()))
    return Sampling(**record, n=n, seed=seed), rest


def _ending(criteria: Any, config: Any, vocab_size: int) -> tuple[int, list[int], list[Any]]:
    """Return the token limit of a row, its end tokens, and all other criteria.

    A criterion of the caller replaces the one of the same kind that transformers makes.
    """
    limit, ends, rest = int(config.max_length), [], []
    for criterion in criteria:
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            limit = int(criterion.max_length)
        elif kind == "EosTokenCriteria":
            ends += torch.as_tensor(criterion.eos_token_id).flatten().tolist()
        else:
            rest.append(criterion)
    return limit, [end for end in ends if 0 <= end < vocab_size], rest


def _streaming(streamer: BaseStreamer | None, input_ids: Tensor) -> OnStep | None:
    """Return a callback that puts each step to the streamer, which gets the prompt first."""
    if streamer is None:
        return None
    if len(input_ids) > 1:
        raise InputError(f"a streamer was given with {len(input_ids)} sequences; expected one")
    streamer.put(input_ids.cpu())
    return lambda row, step: streamer.put(torch.tensor(step.tokens))


def _with_stop_strings(
    strings: object, tokenizer: object, defaults: GenerationConfig, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments with a criterion for the stop strings, which transformers may not see.

    It has no tokenizer here. The strings are those of the call, else of its config, else of
    `defaults`, the model's config.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    config = kwargs.get("generation_config")
    places = (strings, getattr(config, "stop_strings", None), defaults.stop_strings)
    stops = next((each for each in places if each is not None), None)
    if stops is None:
        return kwargs
    if tokenizer is None:
        raise InputError("stop_strings need a tokenizer; pass tokenizer=... as well")
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stops)]
    more: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList(criteria)}
    if config is not None:
        config = more["generation_config"] = copy(config)
        config.stop_strings = None
    if defaults.stop_strings is not None:
        more["stop_strings"] = None  # replaces the model's own
    return {**kwargs, **more}


def _healed(
    model: PreTrainedModel, inputs: Tensor | None, tokenizer: object, kwargs: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the arguments after token healing, for which transformers has no tokenizer here."""
    config = kwargs.get("generation_config") or model.generation_config
    if not kwargs.get("token_healing", getattr(config, "token_healing", False)):
        return inputs, kwargs
    if tokenizer is None:
        raise InputError("token_healing needs a tokenizer; pass tokenizer=... as well")
    ids = kwargs["input_ids"] if inputs is None else inputs
    healed, mask = model.heal_tokens(ids, tokenizer), kwargs.get("attention_mask")
    if mask is None or mask.shape != healed.shape:
        mask = torch.ones_like(healed)
    kwargs = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return healed, {**kwargs, "attention_mask": mask, "token_healing": False}


def _refuse_positions(positions: Tensor | None, ids: Tensor, mask: Tensor | None) -> None:
    """Raise InputError for padding on the right, or positions that transformers does not compute.

    Behind padding at the end, transformers would go on.
    """
    if mask is not None and not bool(mask[:, -1].all()):
        raise InputError(
            "got a batch that is padded on the right; expected padding on the left. Set "
            "tokenizer.padding_side='left'."
        )
    if positions is None:
        return
    visible = torch.ones_like(ids) if mask is None else mask.long()
    rows, length = ids.shape
    fits = positions.shape[-2:] in ((1, length), (rows, length))
    if not fits or bool(((positions != visible.cumsum(-1) - 1) & (visible > 0)).any()):
        raise InputError(
            "got position_ids that do not count each row's tokens from 0; expected none. Call "
            "model.generate without custom_generate for them."
        )


def _refuse_dynamic(model: torch.nn.Module, length: int, limit: int | None) -> None:
    """Raise PromptTooLongError for texts in which dynamic rotary scaling changes its table."""
    if limit is not None and length > limit and asks_for_length(model, ("dynamic",)):
        raise PromptTooLongError(
            f"got {length} tokens of text for a model with rope_type='dynamic' and a context of "
            f"{limit}; expected no more: beyond it every forward rotates by a table of its own, so "
            "that no draft could be verified. Ask for fewer tokens, or leave custom_generate out."
        )


def _refuse_unknown(model_kwargs: dict[str, Any]) -> None:
    extra = [k for k, v in model_kwargs.items() if v is not None and k not in _HARMLESS]
    if extra:
        raise InputError(
            f"got the model inputs {', '.join(sorted(extra))}; expected text only (input_ids and "
            "attention_mask). Call model.generate without custom_generate for them."
        )
    for name in _CACHES:
        if getattr(model_kwargs.get(name), "get_seq_length", int)() > 0:
            raise InputError(f"got {name} with tokens; expected none. Pass all input_ids.")


def _refuse_outputs(config: object) -> None:
    requests = [name for name in _OUTPUTS if getattr(config, name, False)]
    if requests and getattr(config, "return_dict_in_generate", False):
        raise InputError(
            f"got {', '.join(requests)}; expected none: a verified tree has no such rows. Use "
            "Engine.generate(logprobs=...) for log-probabilities."
        )


def _flat(output: Generation | list[Generation] | list[list[Generation]]) -> list[Generation]:
    if isinstance(output, Generation):
        return [output]
    return [generation for item in output for generation in _flat(item)]


def _sequences(input_ids: Tensor, generations: list[Generation], config: GenerationConfig) -> Any:
    pad = config.pad_token_id
    if pad is None:
        ends = config.eos_token_id
        pad = 0 if ends is None else ends if isinstance(ends, int) else ends[0]
    rows = [input_ids.new_tensor(each.tokens) for each in generations]
    new = pad_sequence(rows, batch_first=True, padding_value=int(pad))
    sequences = torch.cat([input_ids, new], dim=1)
    if not getattr(config, "return_dict_in_generate", False):
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
