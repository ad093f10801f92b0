"""Retrieval-augmented and multimodal speculation: the same output, sooner.

`import ragspec` is light: the public names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.engine import Engine as Engine
    from ragspec.errors import RagspecError as RagspecError
    from ragspec.output import Generation as Generation
    from ragspec.report import Report as Report
    from ragspec.sampling import Sampling as Sampling

__version__ = "0.1.0"

_WHERE = {
    "Engine": "ragspec.engine",
    "Generation": "ragspec.output",
    "RagspecError": "ragspec.errors",
    "Report": "ragspec.report",
    "Sampling": "ragspec.sampling",
}

__all__ = ["Engine", "Generation", "RagspecError", "Report", "Sampling", "__version__"]

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module 'ragspec' has no attribute {name!r}")
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
