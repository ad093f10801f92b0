"""Every error the project raises on purpose, and the counts in their messages.

Each message says what was received, what was expected and what to do. The command line exits with
the error's `exit_code`.
"""


def pluralize(number: int, noun: str, form: str = "") -> str:
    """Return a number, in a format, and its noun for a message: 1 token, 2 tokens."""
    stem = f"{noun[:-1]}ie" if noun.endswith("ry") else noun
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"1 {noun}" if number == 1 else f"{number:{form}} {stem}{ending}"


class RagspecError(Exception):
    """Root of all errors raised by ragspec on purpose."""

    exit_code = 1


class InputError(RagspecError, ValueError):
    """A request with an invalid argument or input."""

    exit_code = 2


class PromptTooLongError(InputError):
    """The prompt plus the tokens to generate exceed the model's context."""

    exit_code = 3


class SamplingError(InputError):
    """A sampling setting outside its range, or two that contradict each other."""


class UnknownNameError(InputError):
    """An unknown drafter, rule or model name; the message suggests the nearest ones."""


class ModelError(RagspecError, ValueError):
    """A model that cannot do what was asked of it."""

    exit_code = 4


class UnsupportedModelError(ModelError):
    """An architecture outside the scope of the project, with the reason."""


class ModelNotFoundError(ModelError):
    """No local path, bundled model or cached hub model has this name."""

    exit_code = 5


class TokenizerMismatchError(ModelError):
    """Target and draft model do not share one vocabulary."""

    exit_code = 6


class RuleError(RagspecError, TypeError):
    """An acceptance rule was paired with a kind of draft that it cannot judge."""


class DocumentError(RagspecError, ValueError):
    """A file or folder from which no usable text could be read."""

    exit_code = 7


class HostError(RagspecError, RuntimeError):
    """A host program, such as vLLM, has another interface than the supported one."""

    exit_code = 11


class StoreError(RagspecError, OSError):
    """An index on disk that is missing, incomplete, damaged or of another kind."""

    exit_code = 8


class MissingExtraError(RagspecError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""

    exit_code = 9


class EngineError(RagspecError, RuntimeError):
    """An engine that takes no requests."""

    exit_code = 10


class QueueFullError(EngineError):
    """The queue of an engine is full; the same request may be accepted later."""


class EngineClosedError(EngineError):
    """The engine was closed and accepts no more requests."""


class ResultTimeoutError(RagspecError, TimeoutError):
    """A text that has not ended within the timeout; it goes on."""


class CallbackError(RagspecError, RuntimeError):
    """A callback raised SystemExit, StopIteration or the like, which ended its text alone."""
