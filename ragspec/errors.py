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

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code


class InputError(RagspecError, ValueError, exit_code=2):
    """A request with an invalid argument or input."""


class PromptTooLongError(InputError, exit_code=3):
    """The prompt plus the tokens to generate exceed the model's context."""


class SamplingError(InputError):
    """A sampling setting outside its range, or two that contradict each other."""


class UnknownNameError(InputError):
    """An unknown drafter, rule or model name; the message suggests the nearest ones."""


class ModelError(RagspecError, ValueError, exit_code=4):
    """A model that cannot do what was asked of it."""


class UnsupportedModelError(ModelError):
    """An architecture outside the scope of the project, with the reason."""


class MissingModelError(ModelError, exit_code=5):
    """No local path, bundled model or cached hub model has this name."""


class TokenizerMismatchError(ModelError, exit_code=6):
    """Target and draft model do not share one vocabulary."""


class RuleError(RagspecError, TypeError):
    """An acceptance rule was paired with a kind of draft that it cannot judge."""


class DocumentError(RagspecError, ValueError, exit_code=7):
    """A file or folder from which no usable text could be read."""


class HostError(RagspecError, RuntimeError, exit_code=11):
    """A host program, such as vLLM, has another interface than the supported one."""


class StoreError(RagspecError, OSError, exit_code=8):
    """An index on disk that is missing, incomplete, damaged or of another kind."""


class MissingExtraError(RagspecError, ImportError, exit_code=9):
    """An optional dependency that is not installed; the message names the extra."""


class EngineError(RagspecError, RuntimeError, exit_code=10):
    """An engine that takes no requests."""


class QueueFullError(EngineError):
    """The queue of an engine is full; the same request may be accepted later."""


class EngineClosedError(EngineError):
    """The engine was closed and accepts no more requests."""


class ResultTimeoutError(RagspecError, TimeoutError):
    """A text that has not ended within the timeout; it goes on."""


class CallbackError(RagspecError, RuntimeError):
    """A callback raised SystemExit, StopIteration or the like, which ended its text alone."""
