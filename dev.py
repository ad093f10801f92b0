#!/usr/bin/env python3
"""Set up, test and show ragspec with nothing but Python 3.11 and pip.

    python3 dev.py setup          make .venv and install what constraints/tested.txt pins
    python3 dev.py lint           ruff check, ruff format --check, mypy --strict
    python3 dev.py test           lint, the wheel in a clean environment, and every test
    python3 dev.py test -k tree   pytest alone, with these arguments
    python3 dev.py demo [MODEL]   examples/demo.py over the bundled documents

Every command sets up first; a second run sees the stamp in .venv and installs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "ragspec-setup.json"
CONSTRAINTS = ROOT / "constraints" / "tested.txt"
EXTRAS = "rag,office,images,data,gguf,adapters,onnx,serve,langchain,llamaindex,haystack,lm-eval,dev"
OLDEST = (3, 11)
BROWSER_SECONDS = 60.0  # to download chromium


class Failure(Exception):
    """A step that did not work; the message is all that the user needs."""


# --- running things ---------------------------------------------------------------------------


TESTING = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def clean_environment() -> dict[str, str]:
    """Return the variables for everything run inside .venv: no stray paths or packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": path, "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}


def run(*command: str | Path, **variables: str) -> int:
    """Run a command at the root, its output on the screen, and return its exit code."""
    environment = clean_environment() | variables
    return subprocess.call([str(part) for part in command], cwd=ROOT, env=environment)


def must(*command: str | Path, why: str) -> None:
    """Run a command as the tests run; Failure with `why` when it exits non-zero."""
    code = run(*command, **TESTING)
    if code:
        shown = " ".join(str(part) for part in command)
        raise Failure(f"{why}: exit code {code} from {shown}")


# --- set-up -----------------------------------------------------------------------------------


def right_python() -> None:
    """Go on under a Python that is new enough; Failure when there is none."""
    if sys.version_info >= OLDEST:
        return
    for minor in range(14, OLDEST[1] - 1, -1):
        if newer := shutil.which(f"python3.{minor}"):
            os.execv(newer, [newer, *sys.argv])
    got = ".".join(map(str, sys.version_info[:3]))
    raise Failure(f"Python {got} is too old: install Python 3.11 or newer and run this with it")


def wanted_stamp() -> dict[str, str]:
    """Return what a finished set-up of this checkout, by this Python, leaves in .venv."""
    digest = hashlib.sha256(EXTRAS.encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    return {"root": str(ROOT), "python": sys.version.split()[0], "sha256": digest.hexdigest()}


def read_stamp() -> dict[str, str]:
    """Return the stamp in .venv, empty where no set-up has finished."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def inside_venv() -> bool:
    """Tell whether this very process runs from .venv (then it must not be rebuilt)."""
    return Path(sys.prefix).resolve() == VENV.resolve()


def make_venv(moved: bool) -> None:
    """Create .venv, also where Debian's Python has no ensurepip; rebuild it when it was moved."""
    usable = PYTHON.exists() and run(PYTHON, "-c", "") == 0
    if inside_venv() or (usable and not moved):
        return
    print(f"making {VENV}", flush=True)
    if run(sys.executable, "-m", "venv", "--clear", VENV) == 0:
        return
    print("no ensurepip here: the pip of this Python fills the environment instead", flush=True)
    failed = run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV)
    if failed or run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "pip"):
        raise Failure("could not make .venv: install pip (for Debian: python3-venv) and try again")


def set_up() -> None:
    """Bring .venv up to date with pyproject.toml and the constraints; does nothing when it is."""
    present, wanted = read_stamp(), wanted_stamp()
    if inside_venv():
        wanted["python"] = present.get("python", wanted["python"])
    if present == wanted and PYTHON.exists():
        return
    began = time.monotonic()
    make_venv(moved=any(present.get(k, wanted[k]) != wanted[k] for k in ("root", "python")))
    STAMP.unlink(missing_ok=True)
    # Python compiles the few modules that it imports; pip would compile all, for a minute.
    brief = ("--progress-bar", "off", "--disable-pip-version-check", "--no-compile")
    pip = (PYTHON, "-m", "pip", "install", *brief, "-c", CONSTRAINTS)
    target = f"{ROOT}[{EXTRAS}]"
    print("installing the pinned dependencies, 2.1 GB: some minutes", flush=True)
    must(*pip, "-e", target, why="installing the dependencies failed")
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n")
    print(f"set up in {time.monotonic() - began:.0f} s: {VENV}", flush=True)


# --- the stages of `test` ---------------------------------------------------------------------


def ruff_check() -> str:
    """Check the style rules."""
    must(PYTHON, "-m", "ruff", "check", ".", why="ruff found something")
    return ""


def ruff_format() -> str:
    """Check that every file is formatted."""
    must(PYTHON, "-m", "ruff", "format", "--check", ".", why="run: .venv/bin/ruff format .")
    return ""


def mypy() -> str:
    """Check the types, strictly."""
    must(PYTHON, "-m", "mypy", why="mypy found something")
    return ""


def workers() -> int:
    """Return how many test processes this machine can feed (each may hold a few models)."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(free or 1, 4)


def pytest(arguments: Sequence[str] = ()) -> str:
    """Run the tests and return pytest's own last line."""
    command = [str(PYTHON), "-m", "pytest", "--color=no"]
    if not arguments:
        command += ["--durations=10", "-n", str(workers()), "--dist", "worksteal"]
    last = ""
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=clean_environment() | TESTING,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if re.search(r"\b(passed|failed|errors?|skipped|no tests ran)\b.* in [\d.:]+", line):
                last = line.strip()
    if process.returncode:
        raise Failure(last or f"pytest ended with exit code {process.returncode}")
    return last


def wheel() -> str:
    """Build the wheel and answer a question with it, in a clean environment."""
    must(PYTHON, ROOT / "tests" / "structure" / "wheel.py", why="the wheel does not do the job")
    return ""


def browser() -> str:
    """Install Debian's chromium, which tests of pages need; never fail, wait at most a minute."""
    if shutil.which("chromium") or shutil.which("google-chrome") or not shutil.which("apt-get"):
        return ""
    root = ["sudo", "-n"] if getattr(os, "geteuid", lambda: 1)() else []
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    end = time.monotonic() + BROWSER_SECONDS
    try:  # a download may be cut off; what it got is then installed in seconds
        for command in (["apt-get", "update", "-qq"], [*install, "--download-only"], install):
            left = None if command is install else max(0.0, end - time.monotonic())
            subprocess.run([*root, *command], check=True, capture_output=True, timeout=left)
    except (OSError, subprocess.SubprocessError) as error:
        return f"tests of pages are skipped, as chromium was not installed: {error}"
    return "installed chromium"


# --- commands ---------------------------------------------------------------------------------

LINT: dict[str, Callable[[], str]] = {
    "ruff check": ruff_check,
    "ruff format": ruff_format,
    "mypy --strict": mypy,
}
EVERYTHING: dict[str, Callable[[], str]] = {
    **LINT,
    "wheel": wheel,
    "browser": browser,
    "pytest": pytest,
}


def run_stages(stages: Mapping[str, Callable[[], str]]) -> int:
    """Run all stages, then print one line for each and what it said; return the exit code."""
    lines: list[str] = []
    failed = 0
    for name, action in stages.items():
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        try:
            verdict, said = "passed", action()
        except Failure as failure:
            verdict, said, failed = "FAILED", str(failure), 1
        lines.append(f"{verdict}  {name:<14} {time.monotonic() - began:6.1f} s   {said}")
    print("", *lines, sep="\n", flush=True)
    return failed


def demo(arguments: list[str]) -> int:
    """Run the demonstration with smollm2 if it is here or can be fetched, else the starter."""
    if not arguments and run(PYTHON, "-m", "ragspec", "models", "get", "smollm2") == 0:
        arguments = ["smollm2"]
    return run(PYTHON, str(ROOT / "examples" / "demo.py"), *arguments)


def command(name: str, arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    set_up()
    if name == "setup":
        return 0
    if name == "demo":
        return demo(arguments)
    if name == "lint":
        return run_stages(LINT)
    return run_stages({"pytest": lambda: pytest(arguments)} if arguments else EVERYTHING)


def main(arguments: list[str]) -> int:
    """Parse the command line and return the exit code."""
    known = ("setup", "lint", "test", "demo")
    if not arguments or arguments[0] not in known:
        print(__doc__)
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    try:
        right_python()
        return command(arguments[0], arguments[1:])
    except Failure as failure:
        print(f"dev.py: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
