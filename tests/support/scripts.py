"""Run scripts in processes forked from one that has done the slow imports once."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SLOW_IMPORTS = (
    "ragspec.bridge",
    "ragspec.pipelines.answering.docqa",
    "ragspec.pipelines.bench.variants",
    "ragspec.visual.pipeline",
    "transformers.models.llama.modeling_llama",
    "tests.support.scripts",
)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(list(SLOW_IMPORTS))


def run_script(
    script: Path, *arguments: str | Path, cwd: Path | None = None, **variables: str
) -> str:
    """Run a Python script as `python SCRIPT ARGUMENTS` does, and return its output.

    Args:
        cwd: Working directory, None for this one.
        variables: Environment variables that the script reads.

    Raises:
        AssertionError: The script failed; the message is its output of errors.
    """
    command = [str(script), *map(str, arguments)]
    with TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = SERVER.Process(
            target=_run, args=(command, cwd or Path.cwd(), variables, out, errors)
        )
        process.start()
        process.join()
        written = out.read_text(encoding="utf-8", errors="replace")
        assert process.exitcode == 0, f"{written}\n{errors.read_text(errors='replace')}"
    return written


def _run(command: list[str], cwd: Path, variables: dict[str, str], out: Path, errors: Path) -> None:
    for path, number in ((out, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
