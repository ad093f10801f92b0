"""`python -m ragspec`: the command line without an installed script."""

import os
import signal
import sys
from importlib import import_module


def main() -> int:
    """Run the command line and return its exit code; 130 after Ctrl-C, also while it is imported.

    The room is named in a string so that the core imports none.
    """
    try:
        code = import_module("ragspec.pipelines.cli.app").main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would interrupt this, too
        sys.stderr.write("interrupted\n")
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends: no traceback of that
    return code if isinstance(code, int) else 0


def run() -> None:
    """Run the command line and exit; after Ctrl-C at once, as a thread that loads would abort."""
    try:
        code = main()
    except KeyboardInterrupt:  # another one, while the first was handled
        code = 130
    if code == 130:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
