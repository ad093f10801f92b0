"""docs/integrations.md: the snippet of each host runs, where that host is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SNIPPET = re.compile(r"^## (\S+)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOSTS = {
    "LangChain": "langchain_core",
    "LlamaIndex": "llama_index.core",
    "Haystack": "haystack",
    "lm-eval": "lm_eval",
}
SNIPPETS = dict(SNIPPET.findall(PAGE))


@pytest.mark.parametrize("host", HOSTS)
def test_the_snippet_of_a_host_runs(host: str, tmp_path: Path) -> None:
    pytest.importorskip(HOSTS[host], reason=f"{host} is not installed")
    guide = ROOT / "ragspec" / "starter" / "guide"
    shutil.copytree(guide, tmp_path / "manuals", ignore=shutil.ignore_patterns("*.jsonl"))
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[host], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_host_that_is_missing_is_named_by_its_extra() -> None:
    """As if none were installed: a module cannot be imported, and says what brings its host."""
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "from ragspec.errors import MissingExtraError\n"
        f"for host in {[(name.lower(), module) for name, module in HOSTS.items()]!r}:\n"
        "    sys.modules[host[1].partition('.')[0]] = None\n"
        "    try:\n"
        "        import_module('ragspec.adapters.' + host[0].replace('-', '_'))\n"
        "    except MissingExtraError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    message = done.stdout.splitlines()
    assert len(message) == len(HOSTS)
    for host, line in zip(HOSTS, message, strict=True):
        assert f"pip install 'ragspec[{host.lower()}]'" in line
