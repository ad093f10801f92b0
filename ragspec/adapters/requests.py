"""What a host's caller asks of one text, by the field's names, as sampling and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.adapters.host_text import HostText
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


_TAIL = 16  # last tokens by which candidates are found; the whole text decides

Key = tuple[int, bytes]


class TextsByWords:
    """The sessions of a host's texts.

    opening: makes the session of a text that none knows, from its tokens [T]. idle, idle_tokens:
    how many texts that the last call did not ask for are kept, and their tokens in sum.
    """

    def __init__(
        self, opening: Callable[[NDArray[np.int64]], HostText], idle: int, idle_tokens: int
    ) -> None:
        self._opening = opening
        self._idle = idle
        self._idle_tokens = idle_tokens
        self._selection: dict[int, HostText] = {}  # by number, the longest unasked first
        self._matches: dict[Key, list[int]] = {}
        self._next = 0
        self.opened = 0

    def __len__(self) -> int:
        return len(self._selection)

    def take(self, text: NDArray[np.int64]) -> HostText:
        """Return the session that knows exactly this text [T], and release it; or a new one."""
        key = _key(text)
        for number in self._matches.get(key, ()):
            known = self._selection[number]
            if np.array_equal(known.ids, text):
                self._forget(number, key)
                return known
        self.opened += 1
        return self._opening(text)

    def keep(self, texts: list[HostText]) -> None:
        """Keep the sessions of one call; of the others those that fit the limits, latest first."""
        idle = sum(map(len, self._selection.values()))
        for number in list(self._selection):
            if len(self._selection) <= self._idle and idle <= self._idle_tokens:
                break
            known = self._selection[number]
            idle -= len(known)
            self._forget(number, _key(known.ids))
        for text in texts:
            self._selection[self._next] = text
            self._matches.setdefault(_key(text.ids), []).append(self._next)
            self._next += 1

    def _forget(self, number: int, key: Key) -> None:
        del self._selection[number]
        places = self._matches[key]
        places.remove(number)
        if not places:
            del self._matches[key]


def _key(text: NDArray[np.int64]) -> Key:
    return len(text), text[-_TAIL:].tobytes()
