"""README and docs/: every Python snippet runs, every command and option exists, links lead on.

The snippets of a page run in their order in one namespace, in a folder of their own with
`manuals/`, a copy of the bundled guide, in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "ragspec" / "starter" / "guide"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
HOSTS = (
    ROOT / "docs" / "integrations.md"
)  # run by tests/ragspec/adapters, where the hosts are there
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [body for language, body in FENCE.findall(text) if language in languages]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != HOSTS and "```python" in page.read_text(encoding="utf-8")],
    ids=lambda page: page.name,
)
def test_every_python_snippet_runs(page: Path, tmp_path: Path) -> None:
    snippets = blocks(page, "python", "py")
    shutil.copytree(GUIDE, tmp_path / "manuals", ignore=shutil.ignore_patterns("*.jsonl"))
    script = tmp_path / "readme_snippets.py"
    script.write_text("\n".join(snippets), encoding="utf-8")
    run_script(script, cwd=tmp_path)


def text(page: Path) -> list[str]:
    """Return the lines of a page's console blocks that call `ragspec`, without that word."""
    lines = "\n".join(blocks(page, "bash", "console", "sh", "shell", "text")).splitlines()
    result = (re.match(r"(?:\$ )?(?:python3? -m )?ragspec (.*)", line) for line in lines)
    return [match[1] for match in result if match]


def commands() -> list[str]:
    """Return the sub-commands of `ragspec` that the console blocks of all pages use."""
    return sorted({line.split()[0] for page in PAGES for line in text(page)})


@pytest.mark.parametrize("command", commands() if README.exists() else [])
def test_every_command_exists(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", command, "--help"],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("command", ["draw", "bench image"])
def test_every_option_of_docs_exists(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", *command.split(), "--help"],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    lines = [line for page in PAGES[1:] for line in text(page) if line.startswith(command)]
    used = {name for line in lines for name in re.findall(r"--[a-z][a-z-]*", line)}
    assert used, f"docs show no {command}"
    assert used <= set(re.findall(r"--[a-z][a-z-]*", done.stdout))


def test_every_link_leads_somewhere() -> None:
    for text in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (text.parent / target).exists(), f"{text.name} links to {target}"


def test_every_file_in_the_tree_of_readme_exists() -> None:
    named = set(
        re.findall(
            r"`((?:ragspec|retrievers|visual|pipelines|examples)/[\w./]+)`",
            README.read_text(encoding="utf-8"),
        )
    )
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing


def test_the_table_of_methods_is_that_of_their_files() -> None:
    from ragspec.drafters.method import listed
    from ragspec.registry import names

    rows = []
    for name, method in listed().items():
        module = names("drafter")[name].partition(":")[0].removeprefix("ragspec.")
        needs = ", ".join(sorted(method.needs)) or "-"
        file = "/".join(module.split(".")[-2:]).removeprefix("methods/") + ".py"
        rows.append(
            f"| `{name}` | {method.paper} | {method.drafts_from} | exact | {needs} | `{file}` |"
        )
    assert "\n".join(rows) in README.read_text(encoding="utf-8")
