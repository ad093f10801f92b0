"""Sampling settings: one frozen object with GenerationConfig's field names."""

import math
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from operator import index
from typing import Any, SupportsIndex, TypeGuard

from ragspec.errors import InputError, SamplingError
from ragspec.types import GenerationConfig

# Lowest and highest value, and whether None leaves it to the model; int limits accept int only.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "top_k": (0, 1 << 31, False),
    "frequency_penalty": (-100.0, 100.0, False),
    "presence_penalty": (-100.0, 100.0, False),
    "n": (1, 4096, False),
    "repetition_penalty": (1e-6, 100.0, True),
    "no_repeat_ngram_size": (0, 1 << 20, True),
    "min_new_tokens": (0, 1 << 31, True),
}
# Settings that the engine cannot apply, with the value beside None that asks for nothing. Guidance
# runs the model once more for every token; a watermark comes after the filters.
_REFUSED: dict[str, object] = {"guidance_scale": 1, "watermarking_config": None}
_REFUSED |= {"dola_layers": None, "constraints": None, "force_words_ids": None}
_REFUSED |= {"token_healing": False, "max_time": None, "assistant_ensemble_weight": None}
# Those that choose among tokens, which a Sampling of the caller replaces.
_SEARCHES = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0}
_FILTERS = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
_TOP_K = 50  # of transformers, where a config that samples names none


@dataclass(frozen=True)
class Sampling:
    """Settings of the output distribution; the default is greedy.

    Filters apply in the order of transformers: penalties, bias, temperature, top_k, top_p, min_p.
    None leaves a setting to the model's generation config; 1.0, 0 or () switches it off.

    Attributes:
        temperature: 0, or do_sample=False, is greedy.
        top_k, top_p, min_p: Filters; 0, 1 and 0 switch them off.
        frequency_penalty, presence_penalty: Count generated tokens, as OpenAI does.
        repetition_penalty: Counts the prompt too, as transformers does.
        bad_words_ids, sequence_bias: By token ids.
        n: Samples of each prompt, which share one prefill.
        seed: None chooses one and reports it. One seed gives all prompts the same noise: equal
            prompts get equal texts. A list gives each prompt its own, such as
            `seed=range(7, 7 + len(prompts))`.
        defaults: A generation config before the model's, see `from_generation_config`.

    Raises:
        SamplingError: A value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Mapping[Sequence[int], float] | None = None
    logit_bias: Mapping[int, float] | None = None
    n: int = 1
    seed: int | Sequence[int] | None = None
    do_sample: bool | None = None
    defaults: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, (low, high, optional) in _RANGES.items():
            value = plain_value(getattr(self, name))
            if value is None and optional:
                continue
            if not (is_number(value) and low <= value <= high):
                off = "; 0 is off" if isinstance(low, int) and not low else ""
                raise SamplingError(f"{name} is {value!r}, expected a number, {low} to {high}{off}")
            if isinstance(low, int) and not isinstance(value, int):
                raise SamplingError(f"{name} is {value!r}, expected a whole number")
            object.__setattr__(self, name, value)
        seed: Any = plain_value(self.seed)
        listed = hasattr(seed, "__getitem__") and not isinstance(seed, (str, bytes, Mapping))
        seeds = tuple(seed) if listed else (seed,)
        numbers = tuple(None if each is None else checked_seed(each) for each in seeds)
        object.__setattr__(self, "seed", numbers if listed else numbers[0])
        if self.top_p == 0.0:
            raise SamplingError("top_p is 0.0, expected above 0 and at most 1; use temperature=0")
        if 0.0 < self.temperature < 1e-30:  # logits over it could overflow
            raise SamplingError(f"temperature is {self.temperature}, expected 0, or 1e-30 to 100.0")
        flag = plain_value(self.do_sample)
        if not isinstance(flag, int | None) or flag not in (None, 0, 1):
            raise SamplingError(f"do_sample is {self.do_sample!r}, expected True, False or None")
        object.__setattr__(self, "do_sample", None if flag is None else bool(flag))
        if flag and self.temperature == 0.0:
            raise SamplingError(
                "do_sample=True with temperature=0: expected a temperature above 0, for example "
                "Sampling(temperature=1.0); leave do_sample out to sample whenever it is above 0"
            )
        if self.defaults is not None and not hasattr(self.defaults, "from_model_config"):
            raise SamplingError(f"defaults is {self.defaults!r}, expected a GenerationConfig")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0 or self.do_sample is False

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p excludes tokens."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def seed_of(self, row: int) -> int | None:
        """Return the seed of prompt number `row`, None if it has none."""
        return self.seed[row] if isinstance(self.seed, Sequence) else self.seed

    @classmethod
    def from_generation_config(cls, config: "GenerationConfig", **overrides: Any) -> "Sampling":
        """Return the settings of a transformers GenerationConfig.

        The engine applies the rest of the config, such as suppress_tokens, min_length, stop_strings
        and eos_token_id, and its max_new_tokens or max_length where the call has no max_new_tokens.
        As in transformers, the model's config fills in what it leaves open, but for sampling and
        filters. Settings of caches, outputs and assistants change no token.

        Raises:
            SamplingError: The config asks for a search or a filter that the engine lacks.
        """
        samples = bool(getattr(config, "do_sample", False))
        _refuse(config, _REFUSED | _SEARCHES | (_FILTERS if samples else {}), "")
        usual, values = {"temperature": 1.0, "top_k": _TOP_K}, _values(config)
        values = usual | values if samples else values | {"temperature": 0.0}
        values["n"] = getattr(config, "num_return_sequences", 1) or 1
        return cls(**values | {"defaults": config} | overrides)

    def config_over(self, model: "GenerationConfig | None") -> "GenerationConfig | None":
        """Return `defaults` with what they leave open (None) from a model's config, if any."""
        if model is None or self.defaults is None:
            return self.defaults or model
        merged = copy(model)
        vars(merged).update((k, v) for k, v in vars(self.defaults).items() if v is not None)
        return merged

    def with_defaults(self, config: "GenerationConfig | None") -> "Sampling":
        """Return the settings with open ones (None) filled in from a model's config, if any.

        Raises:
            SamplingError: The config has a setting that the engine cannot apply, or a value is out
                of range.
        """
        _refuse(config, _REFUSED, " or ignore_defaults=True")
        values = _values(config).items()
        unset = {name: value for name, value in values if getattr(self, name) is None}
        return replace(self, **unset) if unset else self


def _refuse(config: object, settings: Mapping[str, object], otherwise: str) -> None:
    """Raise SamplingError for settings of a config that the engine cannot apply."""
    for name, off in settings.items():
        if (value := getattr(config, name, None)) not in (None, off):
            raise SamplingError(
                f"the generation config has {name}={value!r}, which the engine cannot apply; "
                "expected none of it. Use model.generate for it, with ragspec.bridge where that "
                f"follows it,{otherwise or ' or leave it out'}."
            )


def _values(config: object) -> dict[str, Any]:
    """Return the settings of a config that `Sampling` has, by name."""
    names = {each.name for each in fields(Sampling)} - {"n", "seed", "do_sample", "defaults"}
    values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if isinstance(bias := values.get("sequence_bias"), Sequence):  # as JSON has it
        values["sequence_bias"] = {tuple(ids): number for ids, number in bias}
    return values


def plain_value(value: Any) -> Any:
    """Return a scalar of NumPy or torch as Python's; other values as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def fresh_seed() -> int:
    """Return a seed from the system's entropy (0 .. 2^31 - 1)."""
    return secrets.randbelow(1 << 31)


def seeded(sampling: Sampling | None, caller: str) -> Sampling:
    """Return the settings of one text with a seed, for several calls that share its noise.

    Args:
        caller: The name of the calling function, for the error.

    Raises:
        InputError: It is no Sampling, or n is above 1.
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise InputError(f"got {sampling!r} as sampling; expected a Sampling, or None.")
    if sampling.n != 1:
        raise InputError(f"{caller} gives one text, got n={sampling.n}; call it once for each.")
    return sampling if sampling.seed is not None else replace(sampling, seed=fresh_seed())


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token and its log-probability, after processors, at temperature 1.

    Attributes:
        top: The requested number of most probable tokens and their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def whole(value: object) -> int | None:
    """Return the value as an int if it is a whole number of Python, NumPy or torch, else None.

    Booleans do not count, nor arrays of one number but those without dimensions.
    """
    kind = str(getattr(value, "dtype", type(value).__name__))
    if kind.endswith("bool") or getattr(value, "ndim", None):
        return None
    try:
        return index(value) if isinstance(value, SupportsIndex) else None
    except TypeError:
        return None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value's type is a real number's; booleans do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def checked_count(count: object, name: str, least: int = 1) -> int:
    """Return the count as an int.

    Raises:
        InputError: It is below `least` or not whole.
    """
    number = whole(count)
    if number is None or number < least:
        raise InputError(f"{name} is {count!r}; expected a whole number, at least {least}.")
    return number


def checked_seed(seed: object, count: int = 1) -> int:
    """Return a seed as an int, the first of `count` successive ones; all are of 64 bits, signed.

    Raises:
        SamplingError: It is not whole or out of range. The noise repeats every 2^64 seeds.
    """
    number, least, most = whole(seed), -(1 << 63), (1 << 63) - count
    if number is None or not least <= number <= most:
        raise SamplingError(f"seed is {seed!r}; expected a whole number from {least} to {most}.")
    return number


def checked_number(value: object, name: str, least: float = 0.0, most: float = math.inf) -> float:
    """Return a finite number; raise InputError for others and outside of the limits."""
    if not (is_number(value) and math.isfinite(value) and least <= value <= most):
        raise InputError(f"{name} is {value!r}; expected a number from {least:g} to {most:g}.")
    return float(value)
