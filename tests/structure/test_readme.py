"""README and docs/: every Python snippet runs, every command and option exists, links lead on.

The snippets of a page run in their order in one namespace, in a folder with a copy of the
bundled guide as `manuals/`.
"""

import io
import itertools
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.main import get_command

from ragspec.drafters.method import listed
from ragspec.pipelines.cli.app import app, main
from ragspec.registry import names
from tests.support import tiny
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "ragspec" / "starter" / "guide"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
HOSTS = ROOT / "docs" / "integrations.md"  # tests/ragspec/adapters run it with the hosts
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


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands that hold no others, by their words."""
    below = getattr(command, "commands", {})
    if not below or getattr(command, "invoke_without_command", False):
        yield words, command
    for word, each in below.items():
        yield from leaves(each, (*words, word))


COMMANDS = dict(leaves(get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_has_fifteen_options_at_most(words: tuple[str, ...]) -> None:
    options = [each for each in COMMANDS[words].params if each.param_type_name == "option"]
    assert len(options) <= 15, [each.name for each in options]


def test_every_option_of_docs_exists() -> None:
    lines = [line for page in PAGES for line in text(page)]
    assert len(lines) > 30
    for line in lines:
        parts = shlex.split(line, comments=True)
        words = next(words for n in (2, 1) if (words := tuple(parts[:n])) in COMMANDS)
        command = COMMANDS[words]
        known = {flag for each in command.params for flag in each.opts}
        assert {part for part in parts if re.match("--?[a-z]", part)} <= known, line
        for flag, pair in itertools.pairwise(parts):
            if flag in ("--set", "-s") and words != ("draw",):
                settings = re.sub(r"\[.*?\]", "", command.epilog)  # without its markup
                assert f"\n{pair.partition('=')[0]}=" in settings, line


# Work of the same kind but less of it, as the figures are not read here.
LESS = {"--items": "1", "--images": "1", "--port": "0"}
CHAT = "chat-model"
MORE = {
    "train-head": "--steps 2 -s batch=2 -s length=32",
    "serve": "--port 0",
    "chat": f"--model {CHAT}",
    "bench text": "-s new-tokens=8",
    "bench image --model latent-tiles": "--images 1 --steps 2",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home folder with all that the commands of the docs read."""
    folder = tmp_path / "home"
    guide = sorted(GUIDE.glob("*.md"))
    (folder / "manuals").mkdir(parents=True)
    for path in guide[:4]:
        shutil.copy(path, folder / "manuals")
    book = "\n\n".join(path.read_text(encoding="utf-8") for path in guide)
    (folder / "book.txt").write_text(book[:6000], encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "A generator is"}\n', encoding="utf-8")
    features = np.ones((2, 12, 224), "f")  # of prompts, for the model of emoji
    np.savez(folder / "hearts.npz", codes=np.zeros((2, 64), int), features=features)
    tiny.save(folder / CHAT, chat=True, max_position_embeddings=4096)
    return folder


def reduced(line: str, home: Path) -> list[str]:
    """Return the words of a command of the docs, with a small model in place of SmolLM2."""
    words = [word.replace("~", str(home)) for word in shlex.split(line, comments=True)]
    words = [CHAT if word == "smollm2" else word for word in words]
    for flag, value in LESS.items():
        if flag in words and (flag, words[0]) != ("--images", "serve"):
            words[words.index(flag) + 1] = value
    for start, more in MORE.items():
        if line.startswith(start):
            words += more.split()
    return words


@pytest.mark.parametrize("page", [page for page in PAGES if text(page)], ids=lambda page: page.stem)
def test_every_command_runs(
    page: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for line in text(page):
        words = reduced(line, home)
        if words[:2] == ["models", "get"]:
            continue  # tests/ragspec/models downloads from a local registry
        code, error = (
            serve(words) if words[0] == "serve" else (main(words), capsys.readouterr().err)
        )
        assert code in (0, -signal.SIGTERM), f"{line}\n{error}"


def serve(words: list[str]) -> tuple[int, str]:
    """Start a server, end it once it is ready, and return its exit code and messages."""
    command = [sys.executable, "-m", "ragspec", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        while process.poll() is None and "http://" not in first:
            first += process.stderr.readline()
        if address := re.search(r"http://\S+:\d+", first):
            health = f"{address[0].replace('0.0.0.0', '127.0.0.1')}/health"
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(health).status_code == httpx.codes.OK:
                        break
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
        return process.wait(), first + process.stderr.read()


def test_every_link_leads_somewhere() -> None:
    for text in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (text.parent / target).exists(), f"{text.name} links to {target}"


def test_every_file_that_the_readme_names_exists() -> None:
    pattern = r"`((?:ragspec|retrievers|visual|pipelines|examples)/[\w./]+)`"
    named = set(re.findall(pattern, README.read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_the_table_of_methods_is_that_of_their_files() -> None:
    rows = []
    for name, method in listed().items():
        module = names("drafter")[name].partition(":")[0].replace(".", "/")
        needs = ", ".join(sorted(method.needs)) or "-"
        file = re.sub("^ragspec/(?=retr)(retrievers/methods/)?", "", module) + ".py"
        rows.append(
            f"| `{name}` | {method.paper} | {method.drafts_from} | exact | {needs} | `{file}` |"
        )
    assert "\n".join(rows) in README.read_text(encoding="utf-8")
