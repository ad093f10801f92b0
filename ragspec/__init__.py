"""Retrieval-augmented and multimodal speculation: the same output, sooner.

`import ragspec` is light: the public names below are imported when they are first used.
"""

from ragspec.registry import lazy_exports

__version__ = "0.1.0"
__getattr__, __dir__, _names = lazy_exports(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
