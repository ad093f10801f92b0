"""Where other programs take ragspec in: one module a host, imported when that host is there.

No module here is imported by another part of the library. A host that is not installed, or whose
version is another one than the module was written for, is told of by name.
"""

from __future__ import annotations

from ragspec.registry import door

_WHERE: dict[str, str] = {}

__all__ = sorted(_WHERE)

__getattr__, __dir__ = door(__name__, _WHERE)
