"""What a host's caller asks of one text, by the field's names, as sampling and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from ragspec.engine.options import Options
from ragspec.errors import InputError
from ragspec.registry import unknown
from ragspec.sampling.settings import Sampling

# Names that hosts use for one of ours; OpenAI's and transformers', mostly.
ALIASES = MappingProxyType(
    {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "num_return_sequences": "n",
        "stop_words": "stop",
        "stop_sequences": "stop",
    }
)
SAMPLING = frozenset(field.name for field in fields(Sampling))
OPTIONS = frozenset(
    {
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "ignore_defaults",
        "logprobs",
        "prediction",
    }
)
OF_MODEL = frozenset({"documents", "tenant", "top_logprobs"})


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What was asked of one text.

    documents: to draft from and to cite. tenant: whose text it is, for pools.
    """

    sampling: Sampling
    options: Options
    documents: tuple[Any, ...] = ()
    tenant: str = ""

    @property
    def several(self) -> bool:
        """Whether more than one text was asked for."""
        return self.sampling.n > 1


def read_settings(
    *inputs: Mapping[str, Any], stop: Iterable[str] | str | None = None
) -> GenerateRequest:
    """Return what was asked for; a later mapping wins, and None says nothing.

    stop: joins that of the mappings. Raises InputError for unknown names, SamplingError.
    """
    settings: dict[str, Any] = {}
    for mapping in inputs:
        if not isinstance(mapping, Mapping):
            raise InputError(f"got {mapping!r} as settings; expected a mapping of names to values.")
        for name, value in mapping.items():
            ours = ALIASES.get(name, name)
            if ours not in SAMPLING | OPTIONS | OF_MODEL:
                known = SAMPLING | OPTIONS | OF_MODEL | frozenset(ALIASES)
                raise InputError(unknown("setting", name, known))
            if value is not None:
                settings[ours] = value
    stops = list(dict.fromkeys([*_strings(settings.pop("stop", None)), *_strings(stop)]))
    documents = settings.pop("documents", ())
    if isinstance(documents, str | Mapping) or not isinstance(documents, Iterable):
        raise InputError(f"documents is {documents!r}; expected a list of texts or documents.")
    tenant = settings.pop("tenant", "")
    if not isinstance(tenant, str):
        raise InputError(f"tenant is {tenant!r}; expected a text.")
    if (top := settings.pop("top_logprobs", None)) is not None:
        settings["logprobs"] = top
    request: Any = {name: value for name, value in settings.items() if name in OPTIONS}
    if stops:
        request["stop"] = stops
    sampling = Sampling(**{name: v for name, v in settings.items() if name in SAMPLING})
    return GenerateRequest(sampling, request, tuple(documents), tenant)


def _strings(stop: Any) -> list[str]:
    results = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(results, Iterable):
        raise InputError(f"stop is {stop!r}; expected a text, a list of them, or None")
    return list(results)
