"""Settings shared by LangChain's and LlamaIndex's models, as pydantic fields."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ragspec.adapters.writer import HostWriter
from ragspec.errors import InputError
from ragspec.pipelines.openai import NAMES, GenerateRequest, read_settings


class HostModel(BaseModel):
    """A model that drafts from its prompt, from documents and from any other source.

    Attributes:
        model: Name or path. Alternatively pass `engine`. Concurrent calls share it.
        max_batch_size: Texts decoded in one batch; it needs `model`.
        drafter, draft_model, budget: See `Engine`; they need `model`.
        chat_template: Jinja source, for models without a chat template.
        temperature: 0, the default, is greedy. Calls take the sampling fields too, and n,
            logprobs, top_logprobs, prediction, tenant and documents, which are drafted
            from and cited.

    Raises:
        InputError, SamplingError: Settings contradict each other; also the errors of `Engine`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)
    max_batch_size: int | None = None
    drafter: Any = Field(default="auto", exclude=True)
    draft_model: Any = Field(default=None, exclude=True)
    budget: Any = Field(default="auto", exclude=True)
    chat_template: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    tenant: str | None = None
    _writer: HostWriter = PrivateAttr()

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        # Not in a validator: pydantic would hide our errors in one of its own.
        read_settings(self.settings)
        of_writer = HostModel.model_fields.keys() - NAMES
        self._writer = HostWriter(**{name: getattr(self, name) for name in of_writer})

    def request(
        self, per_call: Mapping[str, object], bookkeeping: Collection[str], stop: object = None
    ) -> GenerateRequest:
        """Return the request of a call; raise InputError for tools.

        Args:
            bookkeeping: Keywords that the host passes on for its own use.
        """
        if per_call.get("tools") or per_call.get("functions"):
            raise InputError("got tools; expected none, as texts are not parsed for calls of them.")
        named = {name: value for name, value in per_call.items() if name not in bookkeeping}
        return read_settings(self.settings, named, stop=stop)

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a call may change."""
        return {name: getattr(self, name) for name in HostModel.model_fields if name in NAMES}
