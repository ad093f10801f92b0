"""Image generation over the verification core, independent of `ragspec.retrievers`.

Importing this package is light: the public names are imported when they are first used.
"""

from ragspec.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
