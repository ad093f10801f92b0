"""`python -m ragspec`: the command line without an installed script."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    """Run the command line and return its exit code.

    The room is named in a string so that the core imports none.
    """
    code = import_module("ragspec.pipelines.cli.app").main()
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
